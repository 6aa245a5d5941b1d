"""What every pruning method does: decide, during a stage, which heads stay.

A method attaches gates to a model, draws their noise, may add a term to the loss, and names the
heads that stay. `HardConcrete` and `Subset` learn gates; `Scored` cuts by scores that
`importance.py` computes. Nothing here changes weights: see `removal.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allattn.config import PruneConfig
from allattn.model.transformer import TransformerLM
from allattn.pruning.budget import apportion, select
from allattn.pruning.gates import gates
from allattn.pruning.schedule import heads_to_keep


@dataclass
class PruningState:
    """What a resumed run needs of a method beside the gates' log_alpha."""

    initial_heads: list[int]  # by layer, when the stage began
    run_heads: int  # of the whole run's first model: what `keep` is a share of
    target: int | None = None  # heads left at the stage's end; None: keep x run_heads, or a penalty
    multipliers: list[list[float]] = field(default_factory=list)  # of each group of heads
    closed_checks: list[list[int]] = field(default_factory=list)  # by layer and head
    open_heads: list[list[int]] = field(default_factory=list)  # Scored: by layer, among the present
    open_count: int | None = None  # Subset: how many are open now


class Method:
    """What all methods share; heads are numbered as in the model of the moment.

    Attributes:
        config: the stage's pruning.
        state: goes into checkpoints.
        target: heads left at the end, or None.
    """

    learns = True  # it has gates that an optimiser has to move

    def __init__(self, config: PruneConfig, seed: int, state: PruningState):
        """Start, or go on from, a state."""
        self.config, self.seed, self.state = config, seed, state
        self.target = state.target
        if self.target is None and config.keep is not None:
            self.target = heads_to_keep(config.keep, state.run_heads)

    @property
    def closed_below(self) -> float:
        """A head with a smaller P(open) is closed, as evaluation sees it."""
        return 0.5

    @property
    def decided_below(self) -> float:
        """A head with a smaller P(open) than this is closed for good."""
        return 0.1

    @property
    def goal(self) -> int:
        """`target`, in methods that always have one."""
        assert self.target is not None, "a validated config gives it"
        return self.target

    def attach(self, model: TransformerLM) -> None:
        """Give every layer that has heads a gate."""
        raise AssertionError("each method attaches its own gates")

    def draw(
        self,
        model: TransformerLM,
        step: int,
        stage_step: int = 0,
        stage_steps: int = 1,
        lanes: range = range(1),
        head_ids: list[list[int]] | None = None,
        first_heads: list[int] | None = None,
    ) -> None:
        """Set the gates' noise, and what else depends on the step, before a forward pass.

        Args:
            model: with this method's gates.
            step: of the run.
            stage_step: of the stage.
            stage_steps: of the whole stage.
            lanes: global numbers of the sequences to come.
            head_ids: by layer the numbers of the heads in the run's first model: a head's noise
                stays its own when others are removed.
            first_heads: head counts of that first model.
        """
        if self.learns and gates(model):
            noise = self._uniform(model.config.heads, step, lanes, head_ids, first_heads)
            self._take_step(model, noise, stage_step, stage_steps)

    def _take_step(
        self, model: TransformerLM, noise: list[Tensor], stage_step: int, stage_steps: int
    ) -> None:
        """Hand the noise, by layer, to the gates; set what follows from the stage's step."""
        raise AssertionError("a method that learns has its own")

    def objective(
        self, model: TransformerLM, stage_step: int
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """After a forward pass: the term to add to the loss, and its parts for the log."""
        return None, {}

    def after_step(self, logged: dict[str, Any], stage_step: int) -> None:
        """After an optimiser step, with what `objective` logged."""

    def cut_due(self, stage_step: int, stage_steps: int) -> int | None:
        """How many heads a cut by scores has to leave now, `stage_step` steps into the stage."""
        return None

    def open_now(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """Heads that evaluation uses, by layer."""
        raise AssertionError("each method has its own")

    def probabilities(self, log_alpha: list[Tensor | None]) -> list[list[float]]:
        """P(open) by layer and head."""
        open_heads = self.open_now(log_alpha)
        return [
            [float(h in is_open) for h in range(n)]
            for n, is_open in zip(self._sizes(log_alpha), open_heads, strict=True)
        ]

    def final(self, log_alpha: list[Tensor | None]) -> tuple[list[list[int]], dict[str, Any]]:
        """The heads that stay when the stage ends, and how ready the gates were for it.

        With a target exactly so many stay: those with the largest log_alpha. `undecided` counts
        gates with decided_below < P(open) < 0.9, `cut_open` those of the heads cut that evaluation
        still had open.
        """
        p = self.probabilities(log_alpha)
        undecided = sum(self.decided_below < x < 0.9 for row in p for x in row)
        is_open = self.open_now(log_alpha)
        kept = self._best(log_alpha)
        cut_open = sum(len(set(a) - set(b)) for a, b in zip(is_open, kept, strict=True))
        return kept, {"undecided": undecided, "cut_open": cut_open}

    def warnings(
        self, log_alpha: list[Tensor | None], logged: dict[str, Any], at_end: bool
    ) -> list[str]:
        """What looks wrong with the gates, in words; `logged` is the last step's."""
        return []

    def check_closed(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """One check of `remove: {every: N}`: which heads to keep.

        Those found closed `patience` times in a row go, but not below what the stage must leave.
        """
        p, is_open = self.probabilities(log_alpha), self.open_now(log_alpha)
        may_go = []
        for layer, row in enumerate(p):
            for head, probability in enumerate(row):
                # what evaluation uses stays, however seldom open: its loss must not change
                closed = probability < self.closed_below and head not in is_open[layer]
                checks = self.state.closed_checks[layer][head] + 1 if closed else 0
                self.state.closed_checks[layer][head] = checks
                if checks >= self.config.patience:
                    may_go.append((probability, -layer, -head))
        left = list(map(len, p))
        floors = [min(self.config.min_heads, n) for n in left]
        total = 0
        if self.target is not None:
            total = self.target
            if self.config.scope == "layer":
                floors = self._quotas(self.target, left)
        going = set()
        for _, layer, head in sorted(may_go):  # the higher layer and head first: ties stay low
            layer, head = -layer, -head
            if sum(left) > total and left[layer] > floors[layer]:
                left[layer] -= 1
                going.add((layer, head))
        return [
            [h for h in range(len(row)) if (layer, h) not in going] for layer, row in enumerate(p)
        ]

    def removed(self, kept: list[list[int]]) -> None:
        """Follow a removal: what is counted by head keeps the heads that are left."""
        self.state.closed_checks = [
            [checks[h] for h in heads]
            for checks, heads in zip(self.state.closed_checks, kept, strict=True)
        ]

    def output_scales(self, kept: list[list[int]]) -> list[float]:
        """By layer, what output scaling multiplies by once the gates are gone."""
        return [
            initial / len(heads) if heads and self.config.output_scaling else 1.0
            for initial, heads in zip(self.state.initial_heads, kept, strict=True)
        ]

    def _best(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        rows = rows_of(log_alpha)
        if self.target is None:
            # all that are open, and the best where min_heads asks for more
            is_open = self.open_now(log_alpha)
            least = select(rows, 0, "global", self.config.min_heads)
            return [sorted({*a, *b}) for a, b in zip(is_open, least, strict=True)]
        return self._select(rows, self.target)

    def _select(self, rows: list[list[float]], k: int) -> list[list[int]]:
        """The best k of scores by layer and head, as the scope has it."""
        c = self.config
        return select(rows, k, c.scope, c.min_heads, self.state.initial_heads)

    def _quotas(self, k: int, present: list[int]) -> list[int]:
        """`scope: layer`: heads of each layer when k are left, of those the stage began with."""
        return apportion(k, self.state.initial_heads, self.config.min_heads, present)

    def _sizes(self, log_alpha: list[Tensor | None]) -> list[int]:
        return [0 if a is None else len(a) for a in log_alpha]

    def _start_counters(self, model: TransformerLM) -> None:
        if not self.state.closed_checks:
            self.state.closed_checks = [[0] * n for n in model.config.heads]

    def _uniform(
        self,
        sizes: list[int],
        step: int,
        lanes: range,
        head_ids: list[list[int]] | None,
        first_heads: list[int] | None,
    ) -> list[Tensor]:
        """Draws by layer, [N] or [lanes, N]: a function of seed, step, lane and the head alone."""
        first_heads = first_heads or self.state.initial_heads
        head_ids = head_ids or [list(range(n)) for n in sizes]
        keys = [()] if self.config.noise == "step" else [(lane,) for lane in lanes]
        draws = np.stack(
            [
                np.random.default_rng([self.seed, step, *key, 0x6A7E]).uniform(
                    1e-6, 1 - 1e-6, sum(first_heads)
                )
                for key in keys
            ]
        )
        draws = draws[0] if self.config.noise == "step" else draws
        starts = np.cumsum([0, *first_heads])
        return [
            torch.from_numpy(draws[..., [start + h for h in ids]].astype(np.float32))
            for start, ids in zip(starts[:-1], head_ids, strict=True)
        ]


def rows_of(log_alpha: list[Tensor | None]) -> list[list[float]]:
    """Logits by layer and head."""
    return [[] if a is None else a.tolist() for a in log_alpha]


def standing_still(log_alpha: list[Tensor | None], start: float) -> list[str]:
    """A warning where no gate has moved from where it started."""
    moved = max(
        (float((a - start).abs().max()) for a in log_alpha if a is not None and a.numel()),
        default=math.inf,
    )
    if moved >= 1e-3:
        return []
    return [
        f"the gates did not move (log_alpha by {moved:.1e} at most): raise prune.gate_lr or give "
        "the stage more steps"
    ]
