"""The sections of a config as dataclasses: every key, its default, what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EXPORT_VERSION = 4  # of the folder that `export` makes; `config.json` names it


class ConfigError(ValueError):
    """A config, an override or a command line that cannot be used; the message is one line."""


class ArgumentError(ConfigError):
    """An argument of a function, or an option of a command, that cannot be used.

    Attributes:
        argument: its name in Python.
    """

    def __init__(self, argument: str, problem: str, mentions: tuple[str, ...] = ()):
        """Say what is wrong in Python's spelling; the command line spells it in its own.

        Args:
            argument: the name in Python, such as `batch_size`.
            problem: what is wrong and what would be right, with other arguments in braces.
            mentions: those other arguments.
        """
        self.argument, self._problem, self._mentions = argument, problem, mentions
        super().__init__(self.spelt(str))

    def spelt(self, spell: Callable[[str], str]) -> str:
        """Return the message with every argument's name as `spell` writes it."""
        text = self._problem
        for name in self._mentions:
            text = text.replace(f"{{{name}}}", spell(name))
        return f"{spell(self.argument)}: {text}"


class UnavailableError(ArgumentError):
    """An argument that is right in itself, but asks for what this machine does not have."""


@dataclass
class RunConfig:
    """Where a run lives."""

    name: str = "run"
    dir: str = "runs"
    seed: int = 1
    init_from: str | None = None  # a run, checkpoint or export whose weights to start from
    init_structure: str | None = None  # one whose head counts to take, with fresh weights


@dataclass
class PrepareConfig:
    """How `train` prepares the corpus where there is none yet; as the options of `prepare`."""

    dataset: str = "tiny"
    source: str | None = None  # where the files of WikiText are
    tokenizer: str = "word"
    vocab_size: int | None = None  # sentencepiece: number of pieces


@dataclass
class DataConfig:
    """The prepared corpus (`allattn prepare`)."""

    dir: str = "data/tiny"
    shift: bool = False  # start each pass at another token, drawn from run.seed
    prepare: PrepareConfig | None = None  # None: the corpus has to be there


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
    # a learned bias a head on the persistent scores, first so that they get about this share of the
    # softmax; None: no bias, as in the papers
    persistent_share: float | None = None
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
    def content_keys(self) -> float:
        """How many keys a query sees on average, persistent vectors aside, when memory is full."""
        return self.mem_len + (1 if self.same_length else (self.seq_len + 1) / 2)

    @property
    def heads(self) -> list[int]:
        """Head counts, one a layer."""
        return (
            [self.n_heads] * self.n_layers if isinstance(self.n_heads, int) else list(self.n_heads)
        )


@dataclass
class OptimizerConfig:
    """Adam with decoupled weight decay; `lr` is the peak that the stages' schedules scale."""

    name: str = "adamw"  # or muon: Muon for the layers' matrices, AdamW for the rest; no DeepSpeed
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
    keep_last: int | None = (
        None  # checkpoints that stay, and the best by valid perplexity; None: all
    )
    save_error: str = "stop"  # a checkpoint that cannot be written (a full disk): stop, or continue
    non_finite: str = "stop"  # a NaN or infinite loss or gradient: stop, or skip the update
    max_skipped: int = 10  # updates skipped in a run before it stops all the same
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
    """Pruning within a stage. One of the budgets, or `penalty`, sets the target.

    Shares are of the run's first model; a budget in parameters or FLOPs is met by the nearest
    number of heads (of the layers alone: no embeddings, no norms).
    """

    method: str = "hard_concrete"
    keep: float | None = None  # share of the heads that is left at the stage's end
    keep_params: float | None = None  # the same of the layers' parameters
    keep_flops: float | None = None  # the same of the layers' FLOPs a token
    penalty: float | None = None  # hard_concrete: weight of the expected number of open heads
    scope: str = "global"  # global: heads go wherever they are; layer: the same share everywhere
    min_heads: int = 0  # so many stay in every layer that has them
    warmup_steps: int = 0  # steps over which the penalty, or the target, grows to its full value
    output_scaling: bool = True  # multiply a layer's output by heads / open heads
    gate_init: float = 2.0  # hard_concrete, subset: log_alpha at the start
    gate_lr: float | None = None  # peak rate of the gates; default: 10 x the stage's
    noise: str = "step"  # one draw of the gates a step, or one for every sequence of it
    sampling: str = "soft"  # hard_concrete: the forward pass sees a gate's value, or 0/1
    lagrangian_lr: float = 0.1  # hard_concrete: ascent rate of the two multipliers of a target
    temperature: list[float] = field(default_factory=lambda: [1.0, 0.1])  # subset: first and last
    batches: int = 8  # importance: segments of every lane to score on
    normalize: bool = True  # importance: divide a layer's scores by their L2 norm
    every: int | None = None  # scored methods: steps between cuts; default: one cut at the start
    schedule: str = "cubic"  # scored methods, with `every`: how the target falls
    remove: Any = "end"
    patience: int = 2  # remove {every: N}: checks in a row that must find a gate closed


@dataclass
class DistillConfig:
    """Learn from the dense model: (1 - weight) cross-entropy + weight KL(dense || this).

    The dense model is the run's as it was when its first stage with pruning or distillation began,
    frozen. Both are softened by the temperature, the term multiplied by its square (Hinton 2015).
    """

    weight: float = 0.5
    temperature: float = 1.0


@dataclass
class StageConfig:
    """A number of optimiser steps with one schedule and, optionally, pruning."""

    name: str = "train"
    steps: int = 1000
    lr: LrConfig = field(default_factory=LrConfig)
    prune: PruneConfig | None = None
    distill: DistillConfig | None = None


@dataclass
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    stages: list[StageConfig] = field(default_factory=list)
    deepspeed: dict[str, Any] = field(default_factory=dict)  # passed through to DeepSpeed
