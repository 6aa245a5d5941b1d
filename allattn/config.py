"""The configuration of a run: dataclasses, loading, `key=value` overrides, validation.

A config file is YAML; every section is a dataclass below, so a misspelt key or a wrong type fails
at once, with one line that names the key. `load_config` returns a plain, validated `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A config, an override or a command line that cannot be used; the message is one line."""


@dataclass
class RunConfig:
    """Where a run lives."""

    name: str = "run"
    dir: str = "runs"
    seed: int = 1
    init_from: str | None = None  # a run, checkpoint or export whose weights to start from


@dataclass
class DataConfig:
    """The prepared corpus (`allattn prepare`)."""

    dir: str = "data/tiny"


@dataclass
class ModelConfig:
    """Shape of a `TransformerLM`.

    All-attention has n_persistent > 0 and d_ff = 0, Transformer-XL the reverse.
    """

    n_layers: int = 6
    d_model: int = 256
    n_heads: Any = 8  # one number, or one for each layer (0 is allowed there)
    d_head: int | None = None  # default d_model / n_heads; needed where n_heads is a list
    n_persistent: int = 512
    d_ff: int = 0
    seq_len: int = 64
    mem_len: int = 64
    clamp_len: int | None = None  # distances beyond it count as this one; None: no limit
    same_length: bool = False  # every query sees itself and mem_len positions before it, never more
    position: str = "sinusoidal"
    dropout: float = 0.1
    attn_dropout: float = 0.0
    embedding: str = "tied"
    cutoffs: list[int] = field(default_factory=list)  # adaptive: first ids of the rarer clusters
    div_value: int = 1  # adaptive: each cluster's width is the one before divided by this
    vocab_size: int | None = None  # default: the corpus decides
    attention: str = "auto"

    @property
    def family(self) -> str:
        """The architecture's name in tables."""
        if self.n_persistent and self.d_ff:
            return "hybrid"
        return "all-attention" if self.n_persistent else "transformer-xl"

    @property
    def heads(self) -> list[int]:
        """Head counts, one a layer."""
        return (
            [self.n_heads] * self.n_layers if isinstance(self.n_heads, int) else list(self.n_heads)
        )


@dataclass
class OptimizerConfig:
    """Adam with decoupled weight decay; `lr` is the peak that the stages' schedules scale."""

    name: str = "adamw"
    lr: float = 5e-4
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8


@dataclass
class TrainConfig:
    """What every stage shares. Batch sizes count lanes (contiguous streams of the corpus)."""

    batch_size: int = 32  # of all ranks together
    micro_batch_size: int | None = None  # lanes a rank takes at a time; default: all of its lanes
    eval_batch_size: int = 8
    precision: str = "fp32"
    clip_norm: float = 0.25  # of the gradient over all parameters; 0: no clipping
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval_every: int = 200
    save_every: int = 200
    log_every: int = 10
    compile: bool = False  # torch.compile on each layer (needs a C++ compiler on the CPU)
    activation_checkpointing: bool = False  # recompute layers in the backward pass: less memory
    engine: str = "auto"  # auto: DeepSpeed under its launcher, else one plain process
    device: str = "auto"


@dataclass
class LrConfig:
    """Learning-rate schedule of one stage, as a factor on a peak rate."""

    schedule: str = "constant"
    warmup_steps: int = 0
    peak: float | None = None  # default: train.optimizer.lr
    final: float = 0.0  # share of the peak at the stage's end (linear, cosine)


@dataclass
class PruneConfig:
    """Pruning within a stage. Exactly one of `keep` and `penalty` sets the target."""

    method: str = "hard_concrete"
    keep: float | None = None  # share of the run's first head count that is left at the stage's end
    penalty: float | None = None  # weight of the expected number of open heads in the loss
    warmup_steps: int = 0  # steps over which the penalty, or the target, grows to its full value
    gate_init: float = 2.0  # log_alpha at the start
    gate_lr: float | None = None  # peak rate of the gates; default: 10 x the stage's
    sampling: str = "soft"  # what the forward pass sees of a gate's draw: its value, or 0/1
    output_scaling: bool = True  # multiply a layer's output by heads / open heads
    lagrangian_lr: float = 0.1  # ascent rate of the two multipliers of `keep`
    remove: Any = "end"
    patience: int = 2  # remove {every: N}: checks in a row that must find a gate closed


@dataclass
class StageConfig:
    """A number of optimiser steps with one schedule and, optionally, pruning."""

    name: str = "train"
    steps: int = 1000
    lr: LrConfig = field(default_factory=LrConfig)
    prune: PruneConfig | None = None


@dataclass
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    stages: list[StageConfig] = field(default_factory=list)
    deepspeed: dict[str, Any] = field(default_factory=dict)  # passed through to DeepSpeed


CHOICES = {
    "model.position": ("sinusoidal", "learned"),
    "model.embedding": ("tied", "adaptive"),
    "model.attention": ("auto", "reference", "fused"),
    "train.precision": ("fp32", "bf16"),
    "train.engine": ("auto", "local", "deepspeed"),
    "train.device": ("auto", "cpu", "cuda"),
    "train.optimizer.name": ("adamw",),
    "stage.lr.schedule": ("constant", "linear", "cosine", "inverse_sqrt"),
    "stage.prune.method": ("hard_concrete",),
    "stage.prune.sampling": ("soft", "straight_through"),
}
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


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read, override and validate a config file.

    Args:
        path: YAML file.
        overrides: `key=value` strings; keys may index lists (`stages[1].prune.keep=0.3`).

    Raises:
        ConfigError: a file, key, type or value that cannot be used, in one line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config ({error})") from None
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: a config is a mapping with sections {', '.join(_names(Config))}"
        )
    _reject_unknown_keys(raw, Config, "", str(path))
    try:
        config = OmegaConf.merge(OmegaConf.structured(Config), raw)
        for override in overrides:
            config = _override(config, override)
        result: Config = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from None
    validate(result)
    return result


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML."""
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def to_yaml(config: Config) -> str:
    """The resolved config as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def model_config_from_dict(values: dict[str, Any], where: str) -> ModelConfig:
    """A `ModelConfig` from the `model` part of an export or a checkpoint; errors name `where`."""
    _reject_unknown_keys(values, ModelConfig, "model", where)
    try:
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), values))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from None
    _validate_model(model)
    return model


def with_vocabulary(model: ModelConfig, vocab_size: int, where: Any) -> ModelConfig:
    """The model for a corpus's vocabulary.

    Raises:
        ConfigError: the config asks for another one, or has cutoffs beyond it.
    """
    if model.vocab_size not in (None, vocab_size):
        raise ConfigError(
            f"model.vocab_size: {model.vocab_size}, but {where} has {vocab_size} tokens; "
            "leave it out, or prepare the data anew"
        )
    model = dataclasses.replace(model, vocab_size=vocab_size)
    _validate_model(model)
    return model


def validate(config: Config) -> None:
    """Check values that types alone do not; fill in d_head and a learned table's size.

    Raises:
        ConfigError: naming the key, what is wrong and what would be right.
    """
    _validate_model(config.model)
    train = config.train
    for key in ("precision", "engine", "device"):
        _choice(f"train.{key}", getattr(train, key))
    _choice("train.optimizer.name", train.optimizer.name)
    for key in ("batch_size", "eval_batch_size", "eval_every", "save_every", "log_every"):
        _at_least(f"train.{key}", getattr(train, key), 1)
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
        keeps = [s.prune.keep for s in config.stages[:i] if s.prune and s.prune.keep is not None]
        if (
            stage.prune
            and stage.prune.keep is not None
            and stage.prune.keep > min(keeps, default=1)
        ):
            raise ConfigError(
                f"stages[{i}].prune.keep: {stage.prune.keep} of the run's first heads cannot be "
                f"left after a stage that keeps {min(keeps)}"
            )
        if stage.prune and masked:
            raise ConfigError(
                f"stages[{i}].prune: stage {masked[0]!r} before it has remove: never, so its "
                "closed heads would still be there; use remove: end in that stage"
            )
    for key, ours in OURS_IN_DEEPSPEED.items():
        if key in config.deepspeed:
            raise ConfigError(f"deepspeed.{key}: set {ours} instead; allattn passes it on")


def _validate_model(model: ModelConfig) -> None:
    for key in ("n_layers", "d_model", "seq_len"):
        _at_least(f"model.{key}", getattr(model, key), 1)
    for key in ("n_persistent", "d_ff", "mem_len"):
        _at_least(f"model.{key}", getattr(model, key), 0)
    for key in ("dropout", "attn_dropout"):
        if not 0 <= getattr(model, key) < 1:
            raise ConfigError(
                f"model.{key}: a share in [0, 1) is needed, not {getattr(model, key)}"
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
    prune = stage.prune
    if prune is None:
        return
    _choice("stage.prune.method", prune.method, f"{where}.prune.method")
    _choice("stage.prune.sampling", prune.sampling, f"{where}.prune.sampling")
    if (prune.keep is None) == (prune.penalty is None):
        raise ConfigError(
            f"{where}.prune: set one of keep (a share of heads) and penalty (a weight)"
        )
    if not math.isfinite(prune.gate_init):
        raise ConfigError(f"{where}.prune.gate_init: a number is needed, not {prune.gate_init}")
    if prune.keep is not None and not 0 <= prune.keep <= 1:
        raise ConfigError(f"{where}.prune.keep: a share from 0 to 1 is needed, not {prune.keep}")
    if prune.penalty is not None:
        _at_least(f"{where}.prune.penalty", prune.penalty, 0)
    for key in ("warmup_steps", "lagrangian_lr"):
        _at_least(f"{where}.prune.{key}", getattr(prune, key), 0)
    _at_least(f"{where}.prune.patience", prune.patience, 1)
    if prune.gate_lr is not None:
        _at_least(f"{where}.prune.gate_lr", prune.gate_lr, 0)
    remove = prune.remove
    every = isinstance(remove, dict) and list(remove) == ["every"] and type(remove["every"]) is int
    if not (remove in ("end", "never") or (every and remove["every"] >= 1)):
        raise ConfigError(
            f"{where}.prune.remove: end, never or {{every: N}} is needed, not {remove}"
        )


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


def _override(config: Any, override: str) -> Any:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write key=value")
    parts = key.replace("[", ".[").split(".")
    _check_path(config, parts, key)
    section, parent = _section(parts[:-1]), key.rpartition(".")[0]
    is_text = dataclasses.is_dataclass(section) and "str" in _field_type(section, parts[-1])
    is_text = is_text and text != "null" and text[:1] not in ("", "'", '"', "[", "{")
    try:
        # a name stays as it is written, also where YAML would read a number or a date
        value = text if is_text else yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
    if isinstance(value, str) and not is_text:
        value = _number(value)
    try:
        if (
            dataclasses.is_dataclass(section)
            and parent
            and OmegaConf.select(config, parent) is None
        ):
            # an optional section that is absent so far, such as stages[0].prune
            OmegaConf.update(config, parent, section())
        if isinstance(value, dict):
            _reject_unknown_keys({parts[-1]: value}, section, parent, "override")
        OmegaConf.update(config, key, value, merge=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"override {override!r}: {_one_line(error)}") from None
    return config


def _check_path(config: Any, parts: list[str], key: str) -> None:
    """Refuse an unknown key or a list index out of range before OmegaConf does, in our words."""
    node: Any = config
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth]).replace(".[", "[")
        if part.startswith("["):
            index = part[1:-1]
            if not part.endswith("]") or not index.isdigit():
                raise ConfigError(f"override {key!r}: {part} is not a list index")
            if not OmegaConf.is_list(node):
                raise ConfigError(f"override {key!r}: {here} is not a list")
            if int(index) >= len(node):
                last = f", the last is {here}[{len(node) - 1}]" if len(node) else ""
                raise ConfigError(f"override {key!r}: {here} has {len(node)} entries{last}")
            node = node[int(index)]
        else:
            if OmegaConf.is_list(node):
                right = f"{here}[{part}]" if part.isdigit() else f"{here}[0].{part}"
                raise ConfigError(f"override {key!r}: {here} is a list; write {right}")
            section = _section(parts[:depth])
            if section is None:  # inside a free mapping
                return
            if not dataclasses.is_dataclass(section):
                raise ConfigError(f"override {key!r}: {here} has no keys inside")
            if part not in _names(section):
                raise ConfigError(f"override: {_unknown(part, section, here)}")
            node = node[part] if OmegaConf.is_dict(node) else None


def _section(parts: list[str]) -> Any:
    """The dataclass at a path (stages, [0], prune: PruneConfig), or None in a free mapping."""
    section: Any = Config
    for part in parts:
        if part.startswith("["):
            continue
        if section is None:
            return None
        section = _children(section).get(part, str)
    return section


def _field_type(section: Any, name: str) -> str:
    """A field's annotation, as written."""
    return next(f.type for f in dataclasses.fields(section) if f.name == name)


def _names(section: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(section)]


_CHILDREN: dict[Any, dict[str, Any]] = {
    Config: {
        "run": RunConfig, "data": DataConfig, "model": ModelConfig, "train": TrainConfig,
        "stages": StageConfig, "deepspeed": None,
    },
    TrainConfig: {"optimizer": OptimizerConfig},
    StageConfig: {"lr": LrConfig, "prune": PruneConfig},
    PruneConfig: {"remove": None},
}  # fmt: skip


def _children(section: Any) -> dict[str, Any]:
    return _CHILDREN.get(section, {})


def _reject_unknown_keys(raw: Any, section: Any, where: str, source: str) -> None:
    """Also refuses a scalar or a list where a section belongs, and the reverse."""
    if not dataclasses.is_dataclass(section):
        return
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: {where}: a mapping is needed, not {raw!r}")
    for key, value in raw.items():
        if key not in _names(section):
            raise ConfigError(f"{source}: {_unknown(str(key), section, where)}")
        path = f"{where}.{key}" if where else str(key)
        child = _children(section).get(key)
        kind = _field_type(section, key)
        if kind.startswith("list"):
            if not isinstance(value, list):
                raise ConfigError(f"{source}: {path}: a list is needed, not {value!r}")
            for i, item in enumerate(value):
                _reject_unknown_keys(item, child, f"{path}[{i}]", source)
        elif dataclasses.is_dataclass(child):
            if value is not None or "None" not in kind:
                _reject_unknown_keys(value, child, path, source)
        elif isinstance(value, list | dict) and not kind.startswith(("Any", "dict")):
            raise ConfigError(f"{source}: {path}: one value is needed, not {value!r}")


def _unknown(key: str, section: Any, where: str) -> str:
    near = difflib.get_close_matches(key, _names(section), 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_names(section))}"
    return f"unknown key {f'{where}.{key}' if where else key}; {hint}"


def _number(text: str) -> float | str:
    """YAML 1.1 reads 5e-4 as text; people mean a number."""
    try:
        return float(text) if text.strip()[:1] in "+-.0123456789" and text.strip() else text
    except ValueError:
        return text


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    return f"{key}: {lines[0]}" if key else lines[0]
