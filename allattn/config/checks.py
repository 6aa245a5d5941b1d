"""Values that cannot be used are refused, each in one line that names the key."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from allattn.config.keys import Range, documentation
from allattn.config.schema import (
    Config,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    PrepareConfig,
    TrainConfig,
)
from allattn.config.stages import LrConfig, PruneConfig, StageConfig

CHOICES = {
    f"{where}.{field.name}": found.allowed
    for where, section in (
        ("model", ModelConfig),
        ("data.prepare", PrepareConfig),
        ("train", TrainConfig),
        ("train.optimizer", OptimizerConfig),
        ("stage.lr", LrConfig),
        ("stage.prune", PruneConfig),
    )
    for field in dataclasses.fields(section)
    if (found := documentation(field)) is not None and isinstance(found.allowed, tuple)
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
    for name in ("run", "data", "train"):
        _check_section(name, getattr(config, name))
    if config.data.prepare is not None:
        _check_prepare(config.data.prepare)
    train = config.train
    if train.micro_batch_size is not None and train.batch_size % train.micro_batch_size:
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
    if prepare.dataset == "tiny" and prepare.source is not None:
        raise ConfigError("data.prepare.source: the dataset tiny ships with allattn; leave it out")
    if prepare.dataset != "tiny" and prepare.source is None:
        raise ConfigError(
            f"data.prepare.source: {prepare.dataset} needs the folder, or the .zip, of its files"
        )
    if prepare.vocab_size is not None and prepare.tokenizer != "sentencepiece":
        raise ConfigError("data.prepare.vocab_size: only for data.prepare.tokenizer: sentencepiece")


def check_model(model: ModelConfig) -> None:
    """Check the `model` section, and fill in d_head and a learned table's size.

    Raises:
        ConfigError: naming the key, what is wrong and what would be right.
    """
    _check_section("model", model)
    if model.persistent_share is not None and not model.n_persistent:
        raise ConfigError("model.persistent_share: only where model.n_persistent is above 0")
    if model.d_model % 2 and model.position == "sinusoidal":
        raise ConfigError(f"model.d_model: sinusoids need an even number, not {model.d_model}")
    n_heads = model.n_heads
    if isinstance(n_heads, bool) or not isinstance(n_heads, (int, list, tuple)):
        raise ConfigError(
            f"model.n_heads: a number or a list of numbers is needed, not {n_heads!r}"
        )
    if isinstance(n_heads, int):
        if n_heads < 0:
            raise ConfigError(f"model.n_heads: 0 or more is needed, not {n_heads}")
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
    if model.clamp_len is None and model.position == "learned":
        model.clamp_len = model.seq_len + model.mem_len - 1  # the table's last row
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
    _check_section(where, stage)
    if stage.prune is not None:
        check_prune(f"{where}.prune", stage.prune)


def check_prune(where: str, prune: PruneConfig) -> None:
    """Check a `prune` section.

    Args:
        where: the path of the section, for messages.
        prune: the section.

    Raises:
        ConfigError: naming the key, what is wrong and what would be right.
    """
    _check_section(where, prune)
    budgets = {key: getattr(prune, key) for key in (*BUDGETS, "penalty")}
    if sum(value is not None for value in budgets.values()) != 1:
        raise ConfigError(
            f"{where}: set one of keep (a share of heads), keep_params, keep_flops (of the layers' "
            "parameters or FLOPs) and penalty (a weight)"
        )
    if prune.penalty is not None and prune.method != "hard_concrete":
        raise ConfigError(f"{where}.penalty: only hard_concrete has one; set {where}.keep")
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


def _check_section(where: str, section: Any) -> None:
    """Hold every value of a section, and of those inside it, against what its key allows."""
    for field in dataclasses.fields(section):
        name, value = f"{where}.{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, PruneConfig):
            _check_section(name, value)
        found = documentation(field)
        if found is None or value is None:
            continue
        if isinstance(found.allowed, Range) and not found.allowed.holds(value):
            needed = found.allowed.words("share" if "share" in found.unit else "number")
            verb = "is" if found.allowed.count is None else "are"
            raise ConfigError(f"{name}: {needed} {verb} needed, not {value}")
        if isinstance(found.allowed, tuple) and value not in found.allowed:
            near = difflib.get_close_matches(str(value), found.allowed, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(found.allowed)}{hint}")
