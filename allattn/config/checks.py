"""Values that cannot be used are refused, each in one line that names the key."""

from __future__ import annotations

import difflib
import math
from typing import Any

from allattn.config.schema import (
    Config,
    ConfigError,
    ModelConfig,
    PrepareConfig,
    PruneConfig,
    StageConfig,
)

CHOICES = {
    "model.position": ("sinusoidal", "learned"),
    "model.embedding": ("tied", "adaptive"),
    "model.attention": ("auto", "reference", "fused"),
    "train.precision": ("fp32", "bf16", "fp16"),
    "train.save_error": ("stop", "continue"),
    "train.non_finite": ("stop", "skip"),
    "train.engine": ("auto", "local", "deepspeed"),
    "train.device": ("auto", "cpu", "cuda"),
    "train.optimizer.name": ("adamw", "muon"),
    "data.prepare.dataset": ("tiny", "wikitext-2", "wikitext-103"),
    "data.prepare.tokenizer": ("word", "sentencepiece", "byte"),
    "stage.lr.schedule": ("constant", "linear", "cosine", "inverse_sqrt"),
    "stage.prune.method": ("hard_concrete", "subset", "importance", "magnitude", "random"),
    "stage.prune.scope": ("global", "layer"),
    "stage.prune.noise": ("step", "sequence"),
    "stage.prune.schedule": ("cubic", "linear"),
    "stage.prune.sampling": ("soft", "straight_through"),
}
BUDGETS = ("keep", "keep_params", "keep_flops")
_SCORED = ("importance", "magnitude", "random")
ONLY_FOR = {  # keys of a prune section that would have no effect elsewhere
    "sampling": ("hard_concrete",),
    "lagrangian_lr": ("hard_concrete",),
    "noise": ("hard_concrete", "subset"),
    "gate_lr": ("hard_concrete", "subset"),
    "gate_init": ("hard_concrete", "subset"),
    "temperature": ("subset",),
    "batches": ("importance",),
    "normalize": ("importance",),
    "every": _SCORED,
    "schedule": _SCORED,
}
DEEPSPEED_KEYS = (
    "zero_optimization", "activation_checkpointing", "aio", "amp", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_types", "dump_state",
    "elasticity", "flops_profiler", "memory_breakdown", "prescale_gradients",
    "seq_parallel_communication_data_type", "sparse_gradients", "steps_per_print", "tensorboard",
    "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)  # fmt: skip
ZERO_KEYS = (
    "stage", "allgather_bucket_size", "allgather_partitions", "contiguous_gradients",
    "cpu_offload", "ignore_unused_parameters", "load_from_fp32_weights", "offload_optimizer",
    "offload_param", "overlap_comm", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "sub_group_size",
    "zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_weights",
)  # fmt: skip
OURS_IN_DEEPSPEED = {
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "gradient_clipping": "train.clip_norm",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "torch_autocast": "train.precision",
    "optimizer": "train.optimizer",
    "scheduler": "stages[i].lr",
}


def validate(config: Config) -> None:
    """Check values that types alone do not; fill in d_head and a learned table's size.

    Raises:
        ConfigError: naming the key, what is wrong and what would be right.
    """
    check_model(config.model)
    if config.data.prepare is not None:
        _check_prepare(config.data.prepare)
    train = config.train
    for key in ("precision", "engine", "device", "save_error", "non_finite"):
        _choice(f"train.{key}", getattr(train, key))
    _choice("train.optimizer.name", train.optimizer.name)
    for key in ("batch_size", "eval_batch_size", "eval_every", "save_every", "log_every"):
        _at_least(f"train.{key}", getattr(train, key), 1)
    if train.keep_last is not None:
        _at_least("train.keep_last", train.keep_last, 1)
    _at_least("train.max_skipped", train.max_skipped, 0)
    _at_least("train.clip_norm", train.clip_norm, 0)
    _at_least("train.optimizer.lr", train.optimizer.lr, 0)
    _at_least("train.optimizer.weight_decay", train.optimizer.weight_decay, 0)
    _at_least("train.optimizer.eps", train.optimizer.eps, 0)
    if not 0 <= config.run.seed < 2**63:
        raise ConfigError(
            f"run.seed: a number from 0 to 2**63 - 1 is needed, not {config.run.seed}"
        )
    betas = train.optimizer.betas
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ConfigError(f"train.optimizer.betas: two numbers in [0, 1) are needed, not {betas}")
    if train.micro_batch_size is not None:
        _at_least("train.micro_batch_size", train.micro_batch_size, 1)
        if train.batch_size % train.micro_batch_size:
            raise ConfigError(
                f"train.micro_batch_size: {train.micro_batch_size} does not divide "
                f"train.batch_size {train.batch_size}"
            )
    if not config.run.name or "/" in config.run.name or config.run.name in (".", ".."):
        raise ConfigError(f"run.name: a folder name is needed, not {config.run.name!r}")
    if not config.stages:
        raise ConfigError("stages: at least one stage is needed")
    names = [stage.name for stage in config.stages]
    if len(set(names)) < len(names):
        raise ConfigError(f"stages: names must differ, not {names}")
    for i, stage in enumerate(config.stages):
        _validate_stage(f"stages[{i}]", stage)
        if stage.prune and not sum(config.model.heads):
            raise ConfigError(f"stages[{i}].prune: model.n_heads leaves no head to prune")
        masked = [s.name for s in config.stages[:i] if s.prune and s.prune.remove == "never"]
        for key in BUDGETS if stage.prune else ():
            share = getattr(stage.prune, key)
            before = [getattr(s.prune, key) for s in config.stages[:i] if s.prune]
            smallest = min((b for b in before if b is not None), default=1)
            if share is not None and share > smallest:
                raise ConfigError(
                    f"stages[{i}].prune.{key}: {share} of the run's first model cannot be left "
                    f"after a stage that keeps {smallest}"
                )
        if stage.prune and masked:
            raise ConfigError(
                f"stages[{i}].prune: stage {masked[0]!r} before it has remove: never, so its "
                "closed heads would still be there; use remove: end in that stage"
            )
    _near_misses("deepspeed", config.deepspeed, DEEPSPEED_KEYS)
    zero = config.deepspeed.get("zero_optimization")
    if isinstance(zero, dict):
        _near_misses("deepspeed.zero_optimization", zero, ZERO_KEYS)
    for key, ours in OURS_IN_DEEPSPEED.items():
        if key in config.deepspeed:
            raise ConfigError(f"deepspeed.{key}: set {ours} instead; allattn passes it on")


def _check_prepare(prepare: PrepareConfig) -> None:
    for key in ("dataset", "tokenizer"):
        _choice(f"data.prepare.{key}", getattr(prepare, key))
    if prepare.dataset == "tiny" and prepare.source is not None:
        raise ConfigError("data.prepare.source: the dataset tiny ships with allattn; leave it out")
    if prepare.dataset != "tiny" and prepare.source is None:
        raise ConfigError(
            f"data.prepare.source: {prepare.dataset} needs the folder, or the .zip, of its files"
        )
    if prepare.vocab_size is not None:
        _at_least("data.prepare.vocab_size", prepare.vocab_size, 1)
        if prepare.tokenizer != "sentencepiece":
            raise ConfigError(
                "data.prepare.vocab_size: only for data.prepare.tokenizer: sentencepiece"
            )


def check_model(model: ModelConfig) -> None:
    """The `model` section alone; fills in d_head and a learned table's size."""
    for key in ("n_layers", "d_model", "seq_len"):
        _at_least(f"model.{key}", getattr(model, key), 1)
    for key in ("n_persistent", "d_ff", "mem_len"):
        _at_least(f"model.{key}", getattr(model, key), 0)
    for key in ("dropout", "attn_dropout"):
        if not 0 <= getattr(model, key) < 1:
            raise ConfigError(
                f"model.{key}: a share in [0, 1) is needed, not {getattr(model, key)}"
            )
    share = model.persistent_share
    if share is not None and not (model.n_persistent and 0 < share < 1):
        raise ConfigError(
            "model.persistent_share: a share between 0 and 1, and model.n_persistent, are needed, "
            f"not {share} and {model.n_persistent}"
        )
    for key in ("position", "embedding", "attention"):
        _choice(f"model.{key}", getattr(model, key))
    if model.d_model % 2 and model.position == "sinusoidal":
        raise ConfigError(f"model.d_model: sinusoids need an even number, not {model.d_model}")
    n_heads = model.n_heads
    if isinstance(n_heads, bool) or not isinstance(n_heads, (int, list, tuple)):
        raise ConfigError(
            f"model.n_heads: a number or a list of numbers is needed, not {n_heads!r}"
        )
    if isinstance(n_heads, int):
        _at_least("model.n_heads", n_heads, 0)
        if model.d_head is None:
            if n_heads == 0 or model.d_model % n_heads:
                raise ConfigError(
                    f"model.n_heads: {n_heads} does not divide model.d_model {model.d_model}; "
                    "choose one that does, or set model.d_head"
                )
            model.d_head = model.d_model // n_heads
    else:
        if len(n_heads) != model.n_layers:
            raise ConfigError(
                f"model.n_heads: {len(n_heads)} numbers for model.n_layers {model.n_layers}; "
                "give one number, or one for each layer"
            )
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in n_heads):
            raise ConfigError(
                f"model.n_heads: whole numbers from 0 on are needed, not {list(n_heads)}"
            )
        if model.d_head is None:
            raise ConfigError("model.d_head: needed where model.n_heads is a list")
        model.n_heads = list(n_heads)
    _at_least("model.d_head", model.d_head, 1)
    if model.clamp_len is not None:
        _at_least("model.clamp_len", model.clamp_len, 1)
    elif model.position == "learned":
        model.clamp_len = model.seq_len + model.mem_len - 1  # the table's last row
    if model.vocab_size is not None:
        _at_least("model.vocab_size", model.vocab_size, 2)
    _at_least("model.div_value", model.div_value, 1)
    if model.embedding == "tied":
        for key, default in (("cutoffs", []), ("div_value", 1)):
            if getattr(model, key) != default:
                raise ConfigError(f"model.{key}: only for model.embedding: adaptive")
        return
    if model.cutoffs != sorted(set(model.cutoffs)) or (model.cutoffs and model.cutoffs[0] < 1):
        raise ConfigError(f"model.cutoffs: rising ids from 1 on are needed, not {model.cutoffs}")
    if model.vocab_size is not None and model.cutoffs and model.cutoffs[-1] >= model.vocab_size:
        raise ConfigError(
            f"model.cutoffs: the last one, {model.cutoffs[-1]}, must be below the vocabulary size "
            f"{model.vocab_size}"
        )
    if model.d_model // model.div_value ** len(model.cutoffs) < 1:
        raise ConfigError(
            f"model.div_value: {model.div_value} leaves the last cluster no width; use less"
        )


def _validate_stage(where: str, stage: StageConfig) -> None:
    _at_least(f"{where}.steps", stage.steps, 1)
    _choice("stage.lr.schedule", stage.lr.schedule, f"{where}.lr.schedule")
    _at_least(f"{where}.lr.warmup_steps", stage.lr.warmup_steps, 0)
    _at_least(f"{where}.lr.final", stage.lr.final, 0)
    if stage.lr.peak is not None:
        _at_least(f"{where}.lr.peak", stage.lr.peak, 0)
    if stage.distill is not None:
        if not 0 <= stage.distill.weight <= 1:
            raise ConfigError(
                f"{where}.distill.weight: a share from 0 to 1 is needed, not {stage.distill.weight}"
            )
        if not 0 < stage.distill.temperature < math.inf:
            raise ConfigError(
                f"{where}.distill.temperature: a number above 0 is needed, not "
                f"{stage.distill.temperature}"
            )
    if stage.prune is not None:
        check_prune(f"{where}.prune", stage.prune)


def check_prune(where: str, prune: PruneConfig) -> None:
    """A `prune` section alone."""
    for key in ("method", "sampling", "scope", "noise", "schedule"):
        _choice(f"stage.prune.{key}", getattr(prune, key), f"{where}.{key}")
    budgets = {key: getattr(prune, key) for key in (*BUDGETS, "penalty")}
    if sum(value is not None for value in budgets.values()) != 1:
        raise ConfigError(
            f"{where}: set one of keep (a share of heads), keep_params, keep_flops (of the layers' "
            "parameters or FLOPs) and penalty (a weight)"
        )
    if prune.penalty is not None and prune.method != "hard_concrete":
        raise ConfigError(f"{where}.penalty: only hard_concrete has one; set {where}.keep")
    for key in BUDGETS:
        share = budgets[key]
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"{where}.{key}: a share from 0 to 1 is needed, not {share}")
    if prune.penalty is not None:
        _at_least(f"{where}.penalty", prune.penalty, 0)
    if not math.isfinite(prune.gate_init):
        raise ConfigError(f"{where}.gate_init: a number is needed, not {prune.gate_init}")
    for key in ("warmup_steps", "lagrangian_lr", "min_heads"):
        _at_least(f"{where}.{key}", getattr(prune, key), 0)
    for key in ("patience", "batches"):
        _at_least(f"{where}.{key}", getattr(prune, key), 1)
    for key in ("gate_lr", "every"):
        if getattr(prune, key) is not None:
            _at_least(f"{where}.{key}", getattr(prune, key), 1 if key == "every" else 0)
    if len(prune.temperature) != 2 or not all(0 < t < math.inf for t in prune.temperature):
        raise ConfigError(
            f"{where}.temperature: two numbers above 0 are needed (the stage's first and last), "
            f"not {prune.temperature}"
        )
    defaults = PruneConfig()
    for key, methods in ONLY_FOR.items():
        if getattr(prune, key) != getattr(defaults, key) and prune.method not in methods:
            raise ConfigError(
                f"{where}.{key}: only for method {' and '.join(methods)}, not {prune.method}"
            )
    remove = prune.remove
    every = isinstance(remove, dict) and list(remove) == ["every"] and type(remove["every"]) is int
    if not (remove in ("end", "never") or (every and remove["every"] >= 1)):
        raise ConfigError(f"{where}.remove: end, never or {{every: N}} is needed, not {remove}")


def _near_misses(where: str, section: dict[str, Any], known: tuple[str, ...]) -> None:
    """DeepSpeed drops a misspelt key without a word; one that is almost a known one is refused."""
    for key in section:
        near = difflib.get_close_matches(str(key), known, 1, cutoff=0.8)
        if near and key not in known:
            raise ConfigError(f"unknown key {where}.{key}; did you mean {near[0]}?")


def _choice(key: str, value: str, where: str | None = None) -> None:
    if value not in CHOICES[key]:
        near = difflib.get_close_matches(str(value), CHOICES[key], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{where or key}: {value!r} is not one of {', '.join(CHOICES[key])}{hint}"
        )


def _at_least(key: str, value: float, low: float) -> None:
    if not value >= low or not math.isfinite(value):
        raise ConfigError(f"{key}: {low} or more is needed, not {value}")
