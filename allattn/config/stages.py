"""The sections of a stage, which are its learning rate, its pruning and its distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from allattn.config.keys import AT_LEAST_0, AT_LEAST_1, SHARE, Range, key, made_key


@dataclass
class LrConfig:
    """This section is the learning-rate schedule of one stage."""

    schedule: str = key(
        "constant",
        "How the rate moves after the warm-up.",
        allowed=("constant", "linear", "cosine", "inverse_sqrt"),
    )
    warmup_steps: int = key(
        0, "Steps over which the rate grows from 0 to its peak.", unit="steps", allowed=AT_LEAST_0
    )
    peak: float | None = key(
        None,
        "Peak rate of the stage. The default, null, means `train.optimizer.lr`.",
        unit="per step",
        allowed=AT_LEAST_0,
    )
    final: float = key(
        0.0,
        "Rate at the stage's end, for `linear` and `cosine`.",
        unit="share of the peak",
        allowed=AT_LEAST_0,
    )


@dataclass
class PruneConfig:
    """With this section, a stage prunes. One of the three budgets, or `penalty`, sets the target.

    Shares are of the run's first model. A budget in parameters or FLOPs is met by the nearest
    number of heads, and counts the layers alone: no embeddings and no norms.
    """

    method: str = key(
        "hard_concrete",
        "What decides which heads stay.",
        allowed=("hard_concrete", "subset", "importance", "magnitude", "random"),
    )
    keep: float | None = key(
        None,
        "Budget: heads that are left at the stage's end.",
        unit="share of the run's heads",
        allowed=SHARE,
    )
    keep_params: float | None = key(
        None, "Budget: the same in parameters.", unit="share of the layers' parameters",
        allowed=SHARE,
    )  # fmt: skip
    keep_flops: float | None = key(
        None, "Budget: the same in FLOPs per token.", unit="share of the layers' FLOPs",
        allowed=SHARE,
    )  # fmt: skip
    penalty: float | None = key(
        None,
        "Instead of a budget: loss that is added for each head expected open. Pruning ends where "
        "it ends. Only for `hard_concrete`.",
        unit="nats per head",
        allowed=AT_LEAST_0,
    )
    scope: str = key(
        "global",
        "`global` lets the budget move between layers, `layer` takes the same share of each.",
        allowed=("global", "layer"),
    )
    min_heads: int = key(
        0,
        "So many heads stay in every layer that has them.",
        unit="heads per layer",
        allowed=AT_LEAST_0,
    )
    warmup_steps: int = key(
        0,
        "Steps over which the penalty, or the target, grows to its full value.",
        unit="steps",
        allowed=AT_LEAST_0,
    )
    output_scaling: bool = key(
        True, "Multiply a layer's output by heads / open heads, so that its size stays the same."
    )
    gate_init: float = key(
        2.0,
        "Where the gates start. At 2 almost every head is open at first; at 0 many are undecided.",
        unit="log-odds",
        allowed=Range(),
    )
    gate_lr: float | None = key(
        None,
        "Peak rate of the gates. The default, null, means ten times that of the stage.",
        unit="per step",
        allowed=AT_LEAST_0,
    )
    noise: str = key(
        "step",
        "Draw the gates once per step, or anew for each sequence in it.",
        allowed=("step", "sequence"),
    )
    sampling: str = key(
        "soft",
        "Whether the forward pass sees a gate's value (`soft`) or 0 and 1 (`straight_through`).",
        allowed=("soft", "straight_through"),
    )
    lagrangian_lr: float = key(
        0.1,
        "How fast the two multipliers rise that hold a budget.",
        unit="per step",
        allowed=AT_LEAST_0,
    )
    temperature: list[float] = made_key(
        lambda: [1.0, 0.1],
        "Temperature of the relaxed top k, at the stage's first step and at its last.",
        unit="factor",
        allowed=Range(low=0, above=True, count=2),
    )
    batches: int = key(
        8, "Segments of every lane on which heads are scored.", unit="segments",
        allowed=AT_LEAST_1,
    )  # fmt: skip
    normalize: bool = key(True, "Divide the scores of a layer by their L2 norm.")
    every: int | None = key(
        None,
        "Steps between two cuts. The default, null, means a single cut at the stage's start.",
        unit="steps",
        allowed=AT_LEAST_1,
    )
    schedule: str = key(
        "cubic",
        "With `every`: how the number of heads falls. `cubic` cuts most at the beginning.",
        allowed=("cubic", "linear"),
    )
    remove: Any = key(
        "end",
        "When closed heads are cut out of the weights: at the stage's end, every N steps, or "
        "never (they are only masked).",
        unit="steps",
        allowed="`end`, `never`, or `{every: N}` with N 1 or more",
        type="text, or mapping",
    )
    patience: int = key(
        2,
        "With `remove: {every: N}`: how many checks in a row must find a gate closed.",
        unit="checks",
        allowed=AT_LEAST_1,
    )


@dataclass
class DistillConfig:
    """With this section, a stage also learns from the dense model of the run.

    The loss is (1 - weight) cross-entropy + weight KL(dense || this). The dense model is frozen as
    it was when the first stage with pruning or distillation began. Both are softened by the
    temperature, and the term is multiplied by its square (Hinton 2015).
    """

    weight: float = key(
        0.5, "Share of the dense model's part.", unit="share of the loss", allowed=SHARE
    )
    temperature: float = key(
        1.0,
        "Softens both distributions.",
        unit="factor",
        allowed=Range(low=0, above=True),
    )


@dataclass
class StageConfig:
    """A stage is a number of optimiser steps with one schedule.

    It may prune, distill, both, or neither.
    """

    name: str = key("train", "Name of the stage in logs.", allowed="different for every stage")
    steps: int = key(1000, "Length of the stage.", unit="optimiser steps", allowed=AT_LEAST_1)
    lr: LrConfig = field(default_factory=LrConfig)
    prune: PruneConfig | None = None
    distill: DistillConfig | None = None
