"""Hard-concrete gates (Louizos et al. 2018) on heads, as in Voita et al. 2019 and Shim et al. 2021.

A gate module sits at `layer.attention.gate` and returns one multiplier a head. `HardConcrete` is
the method: it attaches gates, draws their noise, gives the objective, says which heads stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from allattn.config import PruneConfig
from allattn.model.transformer import TransformerLM
from allattn.pruning.schedule import heads_to_keep, ramp

TEMPERATURE, STRETCH_LOW, STRETCH_HIGH = 1 / 3, -0.1, 1.1
CLOSED_FOR_GOOD = 0.1  # P(open) below it, on several checks in a row, lets a head go early


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(gate > 0), closed form (Louizos et al. 2018, equation 12)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-STRETCH_LOW / STRETCH_HIGH))


def hard_concrete(log_alpha: Tensor, uniform: Tensor) -> Tensor:
    """A gate's value in [0, 1] for a uniform draw in (0, 1) (Louizos et al. 2018, eq. 10, 11)."""
    logistic = uniform.log() - (-uniform).log1p()
    s = torch.sigmoid((logistic + log_alpha) / TEMPERATURE)
    return (s * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW).clamp(0, 1)


class HardConcreteGate(nn.Module):
    """One layer's gates: random in training mode, 0 or 1 in evaluation mode; always float32.

    Attributes:
        log_alpha: [N].
        uniform: [N], this step's draw, set by the method.
        expected_open: the last forward pass's sum of P(open), with gradient. It is kept from there
            because ZeRO-3 shows parameters only inside a module's forward.
    """

    def __init__(self, n_heads: int, initial_heads: int, config: PruneConfig):
        """Gates for n_heads of a layer that had initial_heads when pruning began."""
        super().__init__()
        self.initial_heads = initial_heads
        self.straight_through = config.sampling == "straight_through"
        self.output_scaling = config.output_scaling
        self.log_alpha = nn.Parameter(torch.full((n_heads,), config.gate_init))
        self.uniform: Tensor | None = None
        self.expected_open: Tensor | None = None

    def forward(self) -> Tensor:
        """Multipliers [N]."""
        probability = open_probability(self.log_alpha)
        self.expected_open = probability.sum()
        if self.training:
            assert self.uniform is not None, "the method draws before each forward pass"
            gate = hard_concrete(self.log_alpha, self.uniform.to(self.log_alpha.device))
            if self.straight_through:
                gate = gate + ((gate > 0).to(gate.dtype) - gate).detach()
        else:
            gate = (probability > 0.5).to(probability.dtype)
        if self.output_scaling:
            gate = gate * (self.initial_heads / (gate > 0).sum().clamp(min=1))
        return gate


class MaskGate(nn.Module):
    """Fixed multipliers: heads that were decided on but stay in the weights (`remove: never`)."""

    def __init__(self, n_heads: int, kept: list[int], scale: float):
        """Ones (times scale) for the kept heads, zeros for the others."""
        super().__init__()
        mask = torch.zeros(n_heads)
        mask[kept] = scale
        self.register_buffer("mask", mask, persistent=False)

    def forward(self) -> Tensor:
        """Multipliers [N]."""
        return self.mask


@dataclass
class HardConcreteState:
    """What a resumed run needs beside the gates' log_alpha."""

    initial_heads: list[int]  # by layer, when the stage began
    run_heads: int  # of the whole run's first model: what `keep` is a share of
    multipliers: list[float] = field(default_factory=lambda: [0.0, 10.0])
    closed_checks: list[list[int]] = field(default_factory=list)  # by layer and head


class HardConcrete:
    """Stochastic gates with an expected-L0 objective: a fixed penalty, or a Lagrangian to a target.

    The Lagrangian is that of Wang et al. 2020 and CoFi (Xia et al. 2022): with e the expected and t
    the wanted share of open heads, l1 (e - t) + l2 (e - t)^2, minimised over gates, maximised over
    both l. It works like a controller with an integral (l1) and a proportional part (l2), so l2
    starts above zero: without it the share overshoots the target and swings back late.
    """

    def __init__(self, config: PruneConfig, seed: int, state: HardConcreteState):
        """Start, or go on from, a state."""
        self.config, self.seed, self.state = config, seed, state

    def attach(self, model: TransformerLM) -> None:
        """Give every layer that has heads a gate."""
        for layer, initial in zip(model.layers, self.state.initial_heads, strict=True):
            if layer.attention is not None:
                gate = HardConcreteGate(layer.attention.n_heads, initial, self.config)
                layer.attention.gate = gate
        if not self.state.closed_checks:
            self.state.closed_checks = [[0] * n for n in model.config.heads]

    def draw(self, model: TransformerLM, step: int) -> None:
        """Noise of one step, the same on every rank: a function of seed and step alone."""
        rng = np.random.default_rng([self.seed, step, 0x6A7E])
        for layer in model.layers:
            uniform = rng.uniform(
                1e-6, 1 - 1e-6, 0 if layer.attention is None else layer.attention.n_heads
            )
            if layer.attention is not None:
                layer.attention.gate.uniform = torch.from_numpy(uniform.astype(np.float32))

    def objective(self, model: TransformerLM, stage_step: int) -> tuple[Tensor, dict[str, float]]:
        """The term to add to the loss after a forward pass, and its parts for the log."""
        # the start value also serves a model whose last head is gone
        expected = sum((gate.expected_open for gate in gates(model)), torch.zeros(()))
        weight = ramp(self.config, stage_step)
        if self.config.penalty is not None:
            term = self.config.penalty * weight * expected
            logged = {"penalty_weight": self.config.penalty * weight}
        else:
            gap = expected / self.state.run_heads - self._target(stage_step)
            linear, quadratic = self.state.multipliers
            term = linear * gap + quadratic * gap**2
            logged = {"penalty_weight": linear, "penalty_weight_quadratic": quadratic}
            logged["target_heads"] = self._target(stage_step) * self.state.run_heads
        return term, logged | {
            "penalty": float(term.detach()),
            "expected_heads": float(expected.detach()),
        }

    def after_step(self, expected_heads: float, stage_step: int) -> None:
        """Gradient ascent on the multipliers of `keep`."""
        if self.config.keep is not None:
            gap = expected_heads / self.state.run_heads - self._target(stage_step)
            rate = self.config.lagrangian_lr
            linear, quadratic = self.state.multipliers
            self.state.multipliers = [linear + rate * gap, quadratic + rate * gap**2]

    def open_now(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """Heads whose deterministic gate is open, by layer."""
        return [
            [] if a is None else (open_probability(a) > 0.5).nonzero().flatten().tolist()
            for a in log_alpha
        ]

    def final(self, log_alpha: list[Tensor | None]) -> tuple[list[list[int]], dict[str, int]]:
        """The heads that stay when the stage ends, and how ready the gates were for it.

        With `keep` exactly round(keep x the run's heads) stay: those with the largest log_alpha,
        ties to the lower layer and head. `undecided` counts gates with 0.1 < P(open) < 0.9,
        `cut_open` those of the heads cut that evaluation still had open.
        """
        rows = [
            (-value, layer, head)
            for layer, a in enumerate(log_alpha)
            for head, value in enumerate([] if a is None else a.tolist())
        ]
        undecided = sum(
            int(((open_probability(a) > 0.1) & (open_probability(a) < 0.9)).sum())
            for a in log_alpha
            if a is not None
        )
        if self.config.keep is None:
            return self.open_now(log_alpha), {"undecided": undecided, "cut_open": 0}
        kept: list[list[int]] = [[] for _ in log_alpha]
        for _, layer, head in sorted(rows)[: heads_to_keep(self.config.keep, self.state.run_heads)]:
            kept[layer].append(head)
        cut_open = sum(
            len(set(is_open) - set(stay))
            for is_open, stay in zip(self.open_now(log_alpha), kept, strict=True)
        )
        return [sorted(heads) for heads in kept], {"undecided": undecided, "cut_open": cut_open}

    def check_closed(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """One check of `remove: {every: N}`: which heads to keep.

        Those found closed `patience` times in a row go, but not below the target.
        """
        may_go = []
        for layer, a in enumerate(log_alpha):
            for head, p in enumerate([] if a is None else open_probability(a).tolist()):
                checks = self.state.closed_checks[layer][head] + 1 if p < CLOSED_FOR_GOOD else 0
                self.state.closed_checks[layer][head] = checks
                if checks >= self.config.patience:
                    may_go.append((p, layer, head))
        total = sum(0 if a is None else len(a) for a in log_alpha)
        floor = 0
        if self.config.keep is not None:
            floor = heads_to_keep(self.config.keep, self.state.run_heads)
        going = {(layer, head) for _, layer, head in sorted(may_go)[: max(total - floor, 0)]}
        return [
            [h for h in range(0 if a is None else len(a)) if (layer, h) not in going]
            for layer, a in enumerate(log_alpha)
        ]

    def removed(self, kept: list[list[int]]) -> None:
        """Follow a removal: the counters of the heads that are left."""
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

    def _target(self, stage_step: int) -> float:
        """The wanted share of open heads: falls along a line from the stage's start to `keep`."""
        start = sum(self.state.initial_heads) / self.state.run_heads
        return start + (self.config.keep - start) * ramp(self.config, stage_step)


def gates(model: TransformerLM) -> list[Any]:
    """The gate modules of a model, by layer, where there are any."""
    return [
        layer.attention.gate
        for layer in model.layers
        if layer.attention is not None and layer.attention.gate is not None
    ]


def log_alphas(parameters: dict[str, Tensor], n_layers: int) -> list[Tensor | None]:
    """The gates' logits out of named tensors, by layer; None for a layer without a gate."""
    return [parameters.get(f"layers.{i}.attention.gate.log_alpha") for i in range(n_layers)]
