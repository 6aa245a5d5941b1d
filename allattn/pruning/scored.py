"""Masks that follow scores of heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from allattn.model.transformer import TransformerLM
from allattn.pruning.gates import MaskGate
from allattn.pruning.method import Method
from allattn.pruning.schedule import heads_at


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
            due, k = stage_step == 0, self.goal
        else:
            due = stage_step % self.config.every == 0 or stage_step == stage_steps
            start = sum(self.state.initial_heads)
            k = heads_at(self.config, stage_step, stage_steps, start, self.goal)
            if stage_step == stage_steps:
                k = self.goal  # also where the schedule was longer than the stage
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
                gate = layer.attention.gate
                assert isinstance(gate, MaskGate)
                gate.mask.zero_()[heads] = scale

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
