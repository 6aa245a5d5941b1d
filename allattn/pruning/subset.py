"""Gates of which exactly K are open at every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from allattn.model.transformer import TransformerLM
from allattn.pruning.gates import SubsetGate, SubsetPool, gates, relaxed_top_k
from allattn.pruning.method import Method, rows_of, standing_still
from allattn.pruning.schedule import annealed, ramp


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
            model.register_forward_pre_hook(lambda module, _: _pool(module)())

    def _take_step(
        self, model: TransformerLM, noise: list[Tensor], stage_step: int, stage_steps: int
    ) -> None:
        _pool(model).uniform = torch.cat(noise, -1)
        self.state.open_count = self._count(stage_step)
        self._set_counts(model)
        _pool(model).temperature = annealed(self.config.temperature, stage_step, stage_steps)

    def objective(
        self, model: TransformerLM, stage_step: int
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Nothing to add: the count is exact by construction."""
        return None, {"target_heads": self._count(stage_step)}

    def open_now(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """The best K without noise."""
        return self._select(rows_of(log_alpha), self._n_open)

    # with few of many heads open, a good one is open seldom too: shares of the average

    @property
    def closed_below(self) -> float:
        """Half of how often a head is open on average."""
        return 0.5 * self._average()

    @property
    def decided_below(self) -> float:
        """A tenth of it."""
        return 0.1 * self._average()

    @property
    def _n_open(self) -> int:
        assert self.state.open_count is not None, "set when the gates were attached"
        return self.state.open_count

    def _average(self) -> float:
        return self._n_open / max(sum(map(len, self.state.closed_checks)), 1)

    def probabilities(self, log_alpha: list[Tensor | None]) -> list[list[float]]:
        """About how often noise opens each head: the relaxed top k at temperature 1."""
        sizes = self._sizes(log_alpha)
        present = [a for a in log_alpha if a is not None]
        if not present:
            return [[] for _ in sizes]
        scores = torch.cat(present).double()
        out = torch.zeros_like(scores)
        for positions, k in self._groups(sizes, self._n_open):
            out[positions] = relaxed_top_k(scores[positions], k, 1.0)
        return [part.tolist() for part in out.split(sizes)]

    def warnings(
        self, log_alpha: list[Tensor | None], logged: dict[str, Any], at_end: bool
    ) -> list[str]:
        """Gates that stand still."""
        return standing_still(log_alpha, self.config.gate_init) if at_end else []

    def _count(self, stage_step: int) -> int:
        start = sum(self.state.initial_heads)
        done = ramp(self.config, stage_step)
        return min(math.floor(start + (self.goal - start) * done + 0.5), start)

    def _set_counts(self, model: TransformerLM) -> None:
        sizes = model.config.heads
        _pool(model).groups = self._groups(sizes, self._n_open)
        positions = torch.arange(sum(sizes)).split(sizes)
        _pool(model).at_least = [
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


def _pool(model: nn.Module) -> SubsetPool:
    """The pool that `Subset.attach` gave a model."""
    pool = model.gate_pool
    assert isinstance(pool, SubsetPool)
    return pool
