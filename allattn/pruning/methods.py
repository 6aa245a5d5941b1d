"""Pruning methods: what decides, during a stage, which heads stay. One interface for all.

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
from allattn.pruning.gates import (
    HardConcreteGate,
    MaskGate,
    SubsetGate,
    SubsetPool,
    gates,
    open_probability,
    relaxed_top_k,
)
from allattn.pruning.schedule import annealed, heads_at, heads_to_keep, ramp

FAR = 0.05  # of the run's heads: a Lagrangian further from its target at the end is warned about


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
    closed_below = 0.5  # a head with a smaller P(open) is closed, as evaluation sees it
    decided_below = 0.1  # and with a smaller one than this, closed for good

    def __init__(self, config: PruneConfig, seed: int, state: PruningState):
        """Start, or go on from, a state."""
        self.config, self.seed, self.state = config, seed, state
        self.target = state.target
        if self.target is None and config.keep is not None:
            self.target = heads_to_keep(config.keep, state.run_heads)

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
        p = self.probabilities(log_alpha)
        may_go = []
        for layer, row in enumerate(p):
            for head, probability in enumerate(row):
                closed = probability < self.closed_below
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
        rows = _rows(log_alpha)
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


class HardConcrete(Method):
    """Stochastic gates with an expected-L0 objective: a fixed penalty, or a Lagrangian to a target.

    The Lagrangian is that of Wang et al. 2020 and CoFi (Xia et al. 2022): with e the expected and t
    the wanted share of open heads, l1 (e - t) + l2 (e - t)^2, minimised over gates, maximised over
    both l. It works like a controller with an integral (l1) and a proportional part (l2), so l2
    starts above zero: without it the share overshoots the target and swings back late. With
    `scope: layer` every layer has a target and multipliers of its own.
    """

    def __init__(self, config: PruneConfig, seed: int, state: PruningState):
        """Start, or go on from, a state."""
        super().__init__(config, seed, state)
        if not state.multipliers:
            n = len(state.initial_heads) if config.scope == "layer" else 1
            state.multipliers = [[0.0, 10.0] for _ in range(n)]

    def attach(self, model: TransformerLM) -> None:
        """Give every layer that has heads a gate."""
        for layer, initial in zip(model.layers, self.state.initial_heads, strict=True):
            if layer.attention is not None:
                gate = HardConcreteGate(layer.attention.n_heads, initial, self.config)
                layer.attention.gate = gate
        self._start_counters(model)

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
        """Noise of one step, or of each sequence in it."""
        draws = self._uniform(model.config.heads, step, lanes, head_ids, first_heads)
        for layer, uniform in zip(model.layers, draws, strict=True):
            if layer.attention is not None:
                layer.attention.gate.uniform = uniform

    def objective(
        self, model: TransformerLM, stage_step: int
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """The expected number of open heads, priced."""
        sums = [
            None if layer.attention is None else layer.attention.gate.open_probability.sum()
            for layer in model.layers
        ]
        # a model whose last head is gone has no gate left
        none = next((x for x in sums if x is not None), torch.zeros(())).new_zeros(())
        expected = torch.stack([none if x is None else x for x in sums])
        if self.target is None:
            weight = self.config.penalty * ramp(self.config, stage_step)
            term = weight * expected.sum()
            logged: dict[str, Any] = {"penalty_weight": weight}
        else:
            multipliers = expected.new_tensor(self.state.multipliers)
            groups = expected if self.config.scope == "layer" else expected.sum()[None]
            goals = self._goals(stage_step)
            gap = (groups - expected.new_tensor(goals)) / expected.new_tensor(
                self._sizes_of_groups()
            )
            term = (multipliers[:, 0] * gap + multipliers[:, 1] * gap**2).sum()
            linear, quadratic = multipliers.mean(0).tolist()
            logged = {"penalty_weight": linear, "penalty_weight_quadratic": quadratic}
            logged["target_heads"] = sum(goals)
        return term, logged | {
            "penalty": float(term.detach()),
            "expected_heads": float(expected.detach().sum()),
            "expected_by_layer": expected.detach().tolist(),
        }

    def after_step(self, logged: dict[str, Any], stage_step: int) -> None:
        """Gradient ascent on the multipliers of a target."""
        if self.target is None:
            return
        by_layer = logged["expected_by_layer"]
        groups = by_layer if self.config.scope == "layer" else [sum(by_layer)]
        rate = self.config.lagrangian_lr
        goals, sizes = self._goals(stage_step), self._sizes_of_groups()
        for pair, expected, goal, size in zip(
            self.state.multipliers, groups, goals, sizes, strict=True
        ):
            gap = (expected - goal) / size
            pair[0] += rate * gap
            pair[1] += rate * gap**2

    def open_now(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """Heads whose deterministic gate is open."""
        return [[h for h, p in enumerate(row) if p > 0.5] for row in self.probabilities(log_alpha)]

    def probabilities(self, log_alpha: list[Tensor | None]) -> list[list[float]]:
        """P(open), closed form."""
        return [[] if a is None else open_probability(a).tolist() for a in log_alpha]

    def warnings(
        self, log_alpha: list[Tensor | None], logged: dict[str, Any], at_end: bool
    ) -> list[str]:
        """Gates that stand still, that all close, or that miss the target."""
        found = _still(log_alpha, self.config.gate_init) if at_end else []
        p = [x for row in self.probabilities(log_alpha) for x in row]
        wanted = self.target is None or self.target > 0
        if p and wanted and max(p) < 0.5:
            found.append(
                "every head of the model is about to close: lower prune.penalty or prune.gate_lr, "
                "or give the warm-up more steps"
            )
        if at_end and self.target is not None and "expected_heads" in logged:
            gap = logged["expected_heads"] - self.target
            if abs(gap) > max(FAR * self.state.run_heads, 0.5):
                found.append(
                    f"{logged['expected_heads']:.1f} heads were expected open at the end, "
                    f"{self.target} are the target: the Lagrangian is still far from it; give the "
                    "stage more steps, or raise prune.gate_lr or prune.lagrangian_lr"
                )
        return found

    def _sizes_of_groups(self) -> list[float]:
        """What a group's gap is a share of: the run's heads, or those a layer began with."""
        if self.config.scope == "layer":
            return [float(max(n, 1)) for n in self.state.initial_heads]
        return [float(self.state.run_heads)]

    def _goals(self, stage_step: int) -> list[float]:
        """Wanted open heads of each group: from all to the target, along a line."""
        done = ramp(self.config, stage_step)
        if self.config.scope == "layer":
            initial = self.state.initial_heads
            pairs = list(zip(initial, self._quotas(self.target, initial), strict=True))
        else:
            pairs = [(sum(self.state.initial_heads), self.target)]
        return [start + (end - start) * done for start, end in pairs]


class Subset(Method):
    """Gumbel top-k: exactly K heads are open at every step (Li et al. 2021).

    Scores log_alpha plus Gumbel noise; the K best are open, and the gradient is that of the relaxed
    top k at a temperature that falls geometrically over the stage. With `warmup_steps` K falls to
    its target along a line.
    """

    def attach(self, model: TransformerLM) -> None:
        """Gates in every layer, and the pool that computes them before the layers run."""
        for layer, initial in zip(model.layers, self.state.initial_heads, strict=True):
            if layer.attention is not None:
                gate = SubsetGate(layer.attention.n_heads, initial, self.config)
                layer.attention.gate = gate
        self._start_counters(model)
        if self.state.open_count is None:
            self.state.open_count = self._count(0)
        if gates(model):
            model.gate_pool = SubsetPool(gates(model))
            self._set_counts(model)
            model.register_forward_pre_hook(lambda module, _: module.gate_pool())

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
        """Noise, K and temperature of one step."""
        if not gates(model):
            return
        draws = self._uniform(model.config.heads, step, lanes, head_ids, first_heads)
        model.gate_pool.uniform = torch.cat(draws, -1)
        self.state.open_count = self._count(stage_step)
        self._set_counts(model)
        model.gate_pool.temperature = annealed(self.config.temperature, stage_step, stage_steps)

    def objective(
        self, model: TransformerLM, stage_step: int
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Nothing to add: the count is exact by construction."""
        return None, {"target_heads": self._count(stage_step)}

    def open_now(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """The best K without noise."""
        return self._select(_rows(log_alpha), self.state.open_count)

    # with few of many heads open, a good one is open seldom too: shares of the average

    @property
    def closed_below(self) -> float:
        """Half of how often a head is open on average."""
        return 0.5 * self._average()

    @property
    def decided_below(self) -> float:
        """A tenth of it."""
        return 0.1 * self._average()

    def _average(self) -> float:
        return self.state.open_count / max(sum(map(len, self.state.closed_checks)), 1)

    def probabilities(self, log_alpha: list[Tensor | None]) -> list[list[float]]:
        """About how often noise opens each head: the relaxed top k at temperature 1."""
        sizes = self._sizes(log_alpha)
        present = [a for a in log_alpha if a is not None]
        if not present:
            return [[] for _ in sizes]
        scores = torch.cat(present).double()
        out = torch.zeros_like(scores)
        for positions, k in self._groups(sizes, self.state.open_count):
            out[positions] = relaxed_top_k(scores[positions], k, 1.0)
        return [part.tolist() for part in out.split(sizes)]

    def warnings(
        self, log_alpha: list[Tensor | None], logged: dict[str, Any], at_end: bool
    ) -> list[str]:
        """Gates that stand still."""
        return _still(log_alpha, self.config.gate_init) if at_end else []

    def _count(self, stage_step: int) -> int:
        start = sum(self.state.initial_heads)
        done = ramp(self.config, stage_step)
        return min(math.floor(start + (self.target - start) * done + 0.5), start)

    def _set_counts(self, model: TransformerLM) -> None:
        sizes = model.config.heads
        model.gate_pool.groups = self._groups(sizes, self.state.open_count)
        positions = torch.arange(sum(sizes)).split(sizes)
        model.gate_pool.at_least = [
            (p, min(self.config.min_heads, len(p))) for p in positions if self.config.min_heads
        ]

    def _groups(self, sizes: list[int], k: int) -> list[tuple[Tensor, int]]:
        """(positions among all heads, how many of them are open)."""
        every = torch.arange(sum(sizes))
        if self.config.scope == "global":
            return [(every, min(k, len(every)))]
        return [
            (positions, min(quota, len(positions)))
            for positions, quota in zip(every.split(sizes), self._quotas(k, sizes), strict=True)
        ]


class Scored(Method):
    """Cuts by scores: `importance` (Michel et al. 2019), `magnitude`, `random`.

    One shot when the stage begins, or gradually: every `every` steps, scored again each time, along
    a line or the cubic of Zhu and Gupta 2017 over `warmup_steps` (default: the stage).
    """

    learns = False

    def attach(self, model: TransformerLM) -> None:
        """Masks: a head that was cut stays zero."""
        if not self.state.open_heads:
            self.state.open_heads = [list(range(n)) for n in model.config.heads]
        for layer in model.layers:
            if layer.attention is not None:
                layer.attention.gate = MaskGate(layer.attention.n_heads, [], 1.0)
        self.show(model)
        self._start_counters(model)

    def cut_due(self, stage_step: int, stage_steps: int) -> int | None:
        """One shot: at the start. Gradual: at multiples of `every`, and at the end what is left."""
        if self.config.every is None:
            due, k = stage_step == 0, self.target
        else:
            due = stage_step % self.config.every == 0 or stage_step == stage_steps
            start = sum(self.state.initial_heads)
            k = heads_at(self.config, stage_step, stage_steps, start, self.target)
            if stage_step == stage_steps:
                k = self.target  # also where the schedule was longer than the stage
        return k if due and k < sum(map(len, self.state.open_heads)) else None

    def cut(self, scores: list[list[float]], k: int) -> list[list[int]]:
        """Close all but the best k of the open heads; returns the open ones by layer."""
        is_open = self.state.open_heads
        rows = [[row[h] for h in heads] for row, heads in zip(scores, is_open, strict=True)]
        best = self._select(rows, k)
        self.state.open_heads = [
            [heads[i] for i in chosen] for heads, chosen in zip(is_open, best, strict=True)
        ]
        return self.state.open_heads

    def show(self, model: TransformerLM) -> None:
        """Bring the masks of a model up to date."""
        scales = self.output_scales(self.state.open_heads)
        for layer, heads, scale in zip(model.layers, self.state.open_heads, scales, strict=True):
            if layer.attention is not None:
                layer.attention.gate.mask.zero_()[heads] = scale

    def objective(
        self, model: TransformerLM, stage_step: int
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Nothing to add."""
        return None, {"target_heads": sum(map(len, self.state.open_heads))}

    def open_now(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """The heads that no cut has closed."""
        return self.state.open_heads

    def check_closed(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """A head that was cut stays closed: it can go at once."""
        return self.state.open_heads

    def removed(self, kept: list[list[int]]) -> None:
        """Heads get new numbers."""
        super().removed(kept)
        self.state.open_heads = [
            [new for new, old in enumerate(heads) if old in is_open]
            for heads, is_open in zip(kept, self.state.open_heads, strict=True)
        ]

    def _best(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        return self.state.open_heads

    def _sizes(self, log_alpha: list[Tensor | None]) -> list[int]:
        return list(map(len, self.state.closed_checks))


METHODS: dict[str, type[Method]] = {
    "hard_concrete": HardConcrete,
    "subset": Subset,
    "importance": Scored,
    "magnitude": Scored,
    "random": Scored,
}


def build_method(config: PruneConfig, seed: int, state: PruningState) -> Method:
    """The method that a config names."""
    return METHODS[config.method](config, seed, state)


def _rows(log_alpha: list[Tensor | None]) -> list[list[float]]:
    return [[] if a is None else a.tolist() for a in log_alpha]


def _still(log_alpha: list[Tensor | None], start: float) -> list[str]:
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
