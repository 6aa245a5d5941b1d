"""The sections of a config as dataclasses: every key, its default, and what it means.

The documentation of a key is part of its field (see `keys.py`). The allowed values that stand here
are those that `checks.py` enforces and that the reference in `configs/README.md` prints. The
sections of a stage are in `stages.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allattn.config.keys import AT_LEAST_0, AT_LEAST_1, NOT_ALL, Range, key, made_key
from allattn.config.stages import StageConfig

EXPORT_VERSION = 4  # of the folder that `export` makes; `config.json` names it

PATH = "a path"


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
    """This section says where a run lives and what it starts from."""

    name: str = key(
        "run", "The run's folder is `run.dir/run.name`.", allowed="a folder name without `/`"
    )
    dir: str = key("runs", "The folder in which runs lie.", allowed=PATH)
    seed: int = key(
        1,
        "Fixes the initial weights, dropout, the noise of the gates and everything else that is "
        "random. The same config with the same seed gives the same run.",
        unit="number",
        allowed=Range(low=0, high=2**63 - 1),
    )
    init_from: str | None = key(
        None,
        "Start from the weights and head counts of another run, checkpoint or export.",
        allowed=PATH,
    )
    init_structure: str | None = key(
        None,
        "Take only the head counts of another run, checkpoint or export, with fresh weights.",
        allowed=PATH,
    )


@dataclass
class PrepareConfig:
    """This section says how `train` prepares the corpus where there is none yet.

    Without it, which is the default, the corpus has to be there.
    """

    dataset: str = key(
        "tiny", "The text to prepare.", allowed=("tiny", "wikitext-2", "wikitext-103")
    )
    source: str | None = key(
        None, "Where the files of WikiText are; `tiny` ships with allattn.", allowed=PATH
    )
    tokenizer: str = key(
        "word",
        "How text becomes tokens.",
        allowed=("word", "sentencepiece", "byte"),
    )
    vocab_size: int | None = key(
        None,
        "Number of pieces, only for `tokenizer: sentencepiece`. The default, null, means 4,000.",
        unit="tokens",
        allowed=AT_LEAST_1,
    )


@dataclass
class DataConfig:
    """This section names the prepared corpus (see `allattn prepare`)."""

    dir: str = key("data/tiny", "The folder that `allattn prepare` wrote.", allowed=PATH)
    shift: bool = key(
        False,
        "Start each pass over the corpus at another of the first `model.seq_len` tokens, drawn "
        "from `run.seed`, so that segments are cut elsewhere in every pass.",
    )
    prepare: PrepareConfig | None = None


@dataclass
class ModelConfig:
    """This section is the shape of a model.

    All-attention has n_persistent > 0 and d_ff = 0. Transformer-XL has n_persistent = 0 and
    d_ff > 0.
    """

    n_layers: int = key(6, "Number of layers.", unit="layers", allowed=AT_LEAST_1)
    d_model: int = key(
        256,
        "Width of the model. It has to be even where `model.position` is `sinusoidal`.",
        unit="dimensions",
        allowed=AT_LEAST_1,
    )
    n_heads: Any = key(
        8,
        "Heads of every layer, or a list with the heads of each layer, from the first to the last. "
        "A pruned model is a model with such a list.",
        unit="heads",
        allowed="1 or more, or a list of `model.n_layers` numbers, each 0 or more",
        type="whole number, or list of whole numbers",
    )
    d_head: int | None = key(
        None,
        "Width of a head. The default, null, means d_model / n_heads; where `model.n_heads` is a "
        "list, a number is needed.",
        unit="dimensions",
        allowed=AT_LEAST_1,
    )
    n_persistent: int = key(
        512,
        "Persistent vectors per head: learned keys and values that every query sees.",
        unit="vectors",
        allowed=AT_LEAST_0,
    )
    persistent_share: float | None = key(
        None,
        "Adds a learned bias per head to the scores of the persistent vectors, which starts so "
        "that they receive about this share of the softmax. The default, null, means no bias, as "
        "in the papers. `model.n_persistent` has to be above 0.",
        unit="share of the softmax",
        allowed=Range(low=0, high=1, above=True, below=True),
    )
    d_ff: int = key(
        0,
        "Width of the feed-forward block; 0 means that there is none.",
        unit="dimensions",
        allowed=AT_LEAST_0,
    )
    seq_len: int = key(64, "Length of a segment.", unit="tokens", allowed=AT_LEAST_1)
    mem_len: int = key(
        64, "How many earlier positions the memory holds.", unit="tokens", allowed=AT_LEAST_0
    )
    clamp_len: int | None = key(
        None,
        "Larger distances count as this one. The default, null, means no limit; with learned "
        "positions it means the size of their table, seq_len + mem_len - 1.",
        unit="tokens",
        allowed=AT_LEAST_1,
    )
    same_length: bool = key(
        False,
        "Every query sees itself and exactly the `model.mem_len` positions before it. Otherwise "
        "the later queries of a segment see more.",
    )
    position: str = key(
        "sinusoidal",
        "How the distance between a query and a key is encoded.",
        allowed=("sinusoidal", "learned"),
    )
    dropout: float = key(
        0.1,
        "Dropout of embeddings, inside and after each block, and of the last hidden layer.",
        unit="share of the values",
        allowed=NOT_ALL,
    )
    attn_dropout: float = key(
        0.0, "Dropout of attention weights.", unit="share of the weights", allowed=NOT_ALL
    )
    embedding: str = key(
        "tied",
        "`tied` uses one matrix for input and output. `adaptive` gives rarer tokens narrower "
        "embeddings, for large word vocabularies.",
        allowed=("tied", "adaptive"),
    )
    cutoffs: list[int] = made_key(
        list,
        "Only for `embedding: adaptive`: the first ids of the clusters of rarer tokens.",
        unit="token ids",
        allowed="rising, each 1 or more and below the vocabulary's size",
    )
    div_value: int = key(
        1,
        "Only for `embedding: adaptive`: each cluster's width is that of the one before, divided "
        "by this.",
        unit="factor",
        allowed=AT_LEAST_1,
    )
    vocab_size: int | None = key(
        None,
        "Number of token types. The default, null, means that of the corpus.",
        unit="tokens",
        allowed=Range(low=2),
    )
    attention: str = key(
        "auto",
        "How attention is computed: `reference` follows the equation, `fused` gives the same "
        "result faster and in less memory, `auto` takes the fastest that fits and says which.",
        allowed=("auto", "reference", "fused"),
    )

    @property
    def family(self) -> str:
        """The architecture's name in tables."""
        if self.n_persistent and self.d_ff:
            return "hybrid"
        return "all-attention" if self.n_persistent else "transformer-xl"

    @property
    def content_keys(self) -> float:
        """The mean number of keys that a query sees when the memory is full.

        Persistent vectors are not counted.
        """
        return self.mem_len + (1 if self.same_length else (self.seq_len + 1) / 2)

    @property
    def heads(self) -> list[int]:
        """The number of heads of each layer."""
        return (
            [self.n_heads] * self.n_layers if isinstance(self.n_heads, int) else list(self.n_heads)
        )


@dataclass
class OptimizerConfig:
    """This section sets the optimiser. The schedules of the stages scale its rate."""

    name: str = key(
        "adamw",
        "`adamw` is Adam with decoupled weight decay. `muon` moves the layers' matrices by Muon "
        "and the rest by AdamW, in one process without DeepSpeed.",
        allowed=("adamw", "muon"),
    )
    lr: float = key(5e-4, "Peak learning rate.", unit="per step", allowed=AT_LEAST_0)
    weight_decay: float = key(
        0.01, "Decoupled weight decay, times the rate.", unit="per step", allowed=AT_LEAST_0
    )
    betas: list[float] = made_key(
        lambda: [0.9, 0.999],
        "Decay of Adam's running means of the gradient and of its square.",
        unit="share kept per step",
        allowed=Range(low=0, high=1, below=True, count=2),
    )
    eps: float = key(
        1e-8, "Adam adds this to the denominator.", unit="size of a gradient", allowed=AT_LEAST_0
    )


@dataclass
class TrainConfig:
    """This section has what all stages share.

    Batch sizes count lanes, which are contiguous streams of the corpus.
    """

    batch_size: int = key(32, "Lanes of all ranks together.", unit="lanes", allowed=AT_LEAST_1)
    micro_batch_size: int | None = key(
        None,
        "Lanes that a rank computes at a time. It has to divide `train.batch_size`. The default, "
        "null, means all lanes of the rank.",
        unit="lanes",
        allowed=AT_LEAST_1,
    )
    eval_batch_size: int = key(
        8, "Lanes of an evaluation. It changes only speed.", unit="lanes", allowed=AT_LEAST_1
    )
    precision: str = key(
        "fp32",
        "Precision of matrix products. Weights, softmax, loss and gates stay in float32. `fp16` "
        "scales the loss.",
        allowed=("fp32", "bf16", "fp16"),
    )
    clip_norm: float = key(
        0.25,
        "Largest norm of the gradient over all parameters; 0 means no clipping.",
        unit="norm of the gradient",
        allowed=AT_LEAST_0,
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval_every: int = key(
        200, "Evaluate on the valid split this often.", unit="steps", allowed=AT_LEAST_1
    )
    save_every: int = key(200, "Write a checkpoint this often.", unit="steps", allowed=AT_LEAST_1)
    keep_last: int | None = key(
        None,
        "How many of the newest checkpoints stay, besides the best by valid perplexity. The "
        "default, null, means all.",
        unit="checkpoints",
        allowed=AT_LEAST_1,
    )
    save_error: str = key(
        "stop",
        "What to do when a checkpoint cannot be written, for example on a full disk.",
        allowed=("stop", "continue"),
    )
    non_finite: str = key(
        "stop",
        "What to do at a NaN or infinite loss or gradient: stop the run, or skip the update.",
        allowed=("stop", "skip"),
    )
    max_skipped: int = key(
        10,
        "With `non_finite: skip`, how many updates a run may skip before it stops.",
        unit="updates",
        allowed=AT_LEAST_0,
    )
    log_every: int = key(10, "Log the training loss this often.", unit="steps", allowed=AT_LEAST_1)
    compile: bool = key(
        False,
        "Use torch.compile on each layer. On a CPU this needs a C++ compiler and takes several "
        "minutes at the start.",
    )
    activation_checkpointing: bool = key(
        False, "Recompute each layer in the backward pass, which saves memory and costs time."
    )
    engine: str = key(
        "auto",
        "`auto` takes DeepSpeed under its launcher, and one plain process otherwise.",
        allowed=("auto", "local", "deepspeed"),
    )
    device: str = key(
        "auto", "Where to train. `auto` takes a GPU if there is one.",
        allowed=("auto", "cpu", "cuda"),
    )  # fmt: skip


@dataclass
class Config:
    """A config describes a whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    stages: list[StageConfig] = field(default_factory=list)
    deepspeed: dict[str, Any] = made_key(
        dict,
        "Passed on to DeepSpeed, for example `zero_optimization: {stage: 2}`. Batch sizes, "
        "clipping, precision and the optimiser belong in `train` instead.",
        allowed="DeepSpeed's own keys",
    )
