"""What a step number alone decides: its stage, learning-rate factors, pruning targets. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from allattn.config import LrConfig, PruneConfig, StageConfig


class Schedule:
    """Maps optimiser steps to stages. Steps count from 0: step s makes s + 1 done."""

    def __init__(self, stages: Sequence[StageConfig]):
        """Take a run's stages."""
        self.ends: list[int] = []
        for stage in stages:
            self.ends.append((self.ends[-1] if self.ends else 0) + stage.steps)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.ends[-1]

    def lookup(self, step: int) -> tuple[int, int]:
        """Stage number and step within it; the last stage's end belongs to the last stage."""
        for i, end in enumerate(self.ends):
            if step < end or i == len(self.ends) - 1:
                return i, step - (self.ends[i - 1] if i else 0)
        raise AssertionError("a schedule has at least one stage")


def lr_factor(lr: LrConfig, step: int, steps: int) -> float:
    """Share of the peak rate at a step (from 0) of a stage of `steps` steps.

    Linear warm-up reaches the peak at step `warmup_steps - 1`; then constant; or down to `final` at
    the stage's end along a line or half a cosine; or by the inverse square root of the step.
    """
    warmup = min(lr.warmup_steps, steps)
    if step < warmup:
        return (step + 1) / warmup
    if lr.schedule == "constant":
        return 1.0
    if lr.schedule == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    left = 1 - progress if lr.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr.final + (1 - lr.final) * left


def ramp(prune: PruneConfig, step: int) -> float:
    """Penalty warm-up (Shim et al. 2021): how much of the penalty, or target, counts: 0 to 1."""
    return min((step + 1) / prune.warmup_steps, 1.0) if prune.warmup_steps else 1.0


def heads_to_keep(keep: float, initial_heads: int) -> int:
    """The exact head count of a target: halves round up, so that 0.5 of 3 heads is 2."""
    return min(math.floor(keep * initial_heads + 0.5), initial_heads)


def heads_at(prune: PruneConfig, step: int, steps: int, start: int, end: int) -> int:
    """Gradual pruning by scores: heads open after the cut at a step (1 to `steps`) of a stage.

    From `start` to `end` over `warmup_steps` (0: the whole stage): along a line, or along the cubic
    of Zhu and Gupta 2017, which cuts most at the beginning. Halves round up.
    """
    progress = min(step / (prune.warmup_steps or steps), 1.0)
    left = (1 - progress) ** (3 if prune.schedule == "cubic" else 1)
    return math.floor(end + (start - end) * left + 0.5)


def annealed(temperature: Sequence[float], step: int, steps: int) -> float:
    """From the first temperature to the second, by the same factor at every step."""
    first, last = temperature
    now: float = first * (last / first) ** (step / max(steps - 1, 1))
    return now
