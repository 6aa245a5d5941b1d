"""Gate modules: one multiplier a head, at `layer.attention.gate`, and their distributions.

`HardConcreteGate` (Louizos et al. 2018) decides each head alone; `SubsetGate`s share a `SubsetPool`
that draws exactly K heads (Li et al. 2021); `MaskGate` holds what was decided. Which heads stay is
for `methods.py` to say. Shapes: N heads of a layer, A heads of all layers, B sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from allattn.config import PruneConfig
from allattn.model.transformer import TransformerLM

TEMPERATURE, STRETCH_LOW, STRETCH_HIGH = 1 / 3, -0.1, 1.1


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(gate > 0), closed form (Louizos et al. 2018, equation 12)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-STRETCH_LOW / STRETCH_HIGH))


def hard_concrete(log_alpha: Tensor, uniform: Tensor) -> Tensor:
    """A gate's value in [0, 1] for a uniform draw in (0, 1) (Louizos et al. 2018, eq. 10, 11)."""
    logistic = uniform.log() - (-uniform).log1p()
    s = torch.sigmoid((logistic + log_alpha) / TEMPERATURE)
    return (s * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW).clamp(0, 1)


def relaxed_top_k(scores: Tensor, k: int, temperature: float) -> Tensor:
    """How much of each entry is among the k largest: [..., A] in [0, 1], adding up to k.

    sigmoid((score - threshold) / temperature) with the threshold that makes the sum k: of all such
    vectors the one of largest entropy (Amos et al. 2019, arXiv 1906.08707). At a low temperature it
    nears the hard top k; the gradient is exact, the threshold's part included.
    """
    n = scores.shape[-1]
    if k in (0, n):
        return torch.full_like(scores, float(k > 0)) + 0 * scores
    with torch.no_grad():
        wide = scores.double()
        # the threshold lies where all or none would be taken, and is halved down to rounding
        margin = temperature * 40.0
        low = wide.amin(-1, keepdim=True) - margin
        high = wide.amax(-1, keepdim=True) + margin
        for _ in range(64):
            middle = (low + high) / 2
            too_many = torch.sigmoid((wide - middle) / temperature).sum(-1, keepdim=True) > k
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        threshold = (low + high) / 2
        share = torch.sigmoid((wide - threshold) / temperature)
        # d threshold / d score_j; where all are 0 or 1 there is no gradient to speak of
        pull = share * (1 - share)
        pull = (pull / pull.sum(-1, keepdim=True).clamp(min=1e-30)).to(scores.dtype)
        threshold = threshold.to(scores.dtype)
    moving = threshold + ((scores - scores.detach()) * pull).sum(-1, keepdim=True)
    return torch.sigmoid((scores - moving) / temperature)


class HardConcreteGate(nn.Module):
    """One layer's gates: random in training mode, 0 or 1 in evaluation mode; always float32.

    Attributes:
        log_alpha: [N].
        uniform: this step's draw, set by the method: [N], or [B, N] with a draw for each sequence.
        open_probability: [N], of the last forward pass, with gradient. It is kept from there
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
        self.open_probability: Tensor | None = None

    def forward(self) -> Tensor:
        """Multipliers [N] or [B, N]."""
        self.open_probability = open_probability(self.log_alpha)
        if self.training:
            assert self.uniform is not None, "the method draws before each forward pass"
            gate = hard_concrete(self.log_alpha, self.uniform.to(self.log_alpha.device))
            if self.straight_through:
                gate = gate + ((gate > 0).to(gate.dtype) - gate).detach()
        else:
            gate = (self.open_probability > 0.5).to(self.log_alpha.dtype)
        return scale_output(gate, self.initial_heads) if self.output_scaling else gate


class SubsetGate(nn.Module):
    """One layer's gates of a `SubsetPool`, which computes them before the layers run."""

    def __init__(self, n_heads: int, initial_heads: int, config: PruneConfig):
        """As for `HardConcreteGate`."""
        super().__init__()
        self.initial_heads = initial_heads
        self.output_scaling = config.output_scaling
        self.log_alpha = nn.Parameter(torch.full((n_heads,), config.gate_init))
        self.value: Tensor | None = None

    def forward(self) -> Tensor:
        """Multipliers [N] or [B, N]."""
        assert self.value is not None, "the pool computes before the layers"
        return scale_output(self.value, self.initial_heads) if self.output_scaling else self.value


class SubsetPool(nn.Module):
    """Opens exactly K heads of all layers together: at random in training, the best otherwise.

    It holds the layers' `log_alpha` under names of its own, so that ZeRO-3 gathers them for it.

    Attributes:
        uniform: [A] or [B, A] draws in (0, 1), set by the method; they become Gumbel noise.
        groups: for each part of the heads that has its own count: (positions among A, count).
        at_least: positions of each layer, and how many of them must be open.
        temperature: of the relaxation that gives the gradient.
    """

    def __init__(self, gates: list[SubsetGate]):
        """A pool of the gates of all layers that have heads."""
        super().__init__()
        self.gates = tuple(gates)  # no submodules: they belong to the layers
        for i, gate in enumerate(gates):
            self.register_parameter(f"log_alpha_{i}", gate.log_alpha)
        self.uniform: Tensor | None = None
        self.groups: list[tuple[Tensor, int]] = []
        self.at_least: list[tuple[Tensor, int]] = []
        self.temperature = 1.0

    def forward(self) -> None:
        """Set every gate's value: exactly K ones, with the relaxed top k's gradient."""
        scores = torch.cat([getattr(self, f"log_alpha_{i}") for i in range(len(self.gates))])
        if self.training:
            assert self.uniform is not None, "the method draws before each forward pass"
            scores = scores - (-self.uniform.to(scores.device).log()).log()
        value = torch.zeros_like(scores)
        groups = [(positions.to(scores.device), k) for positions, k in self.groups]
        at_least = [(positions.to(scores.device), n) for positions, n in self.at_least]
        for positions, k in groups:
            value[..., positions] = _top_k(scores, positions, k, at_least)
        if self.training:
            soft = torch.zeros_like(scores)
            for positions, k in groups:
                part = relaxed_top_k(scores[..., positions], k, self.temperature)
                soft = soft.index_add(-1, positions, part)
            value = value + soft - soft.detach()
        sizes = [gate.log_alpha.numel() for gate in self.gates]
        for gate, part in zip(self.gates, value.split(sizes, -1), strict=True):
            gate.value = part


def _top_k(scores: Tensor, positions: Tensor, k: int, at_least: list[tuple[Tensor, int]]) -> Tensor:
    """1 for the k best of some positions, else 0; each layer's first few count as best of all."""
    with torch.no_grad():
        ranked = scores.clone()
        # stable sorts: ties go to the lower layer and head, as everywhere
        for layer, n in at_least:
            first = scores[..., layer].argsort(dim=-1, descending=True, stable=True)[..., :n]
            ranked.scatter_(-1, layer[first], math.inf)
        ranked = ranked[..., positions]
        best = ranked.argsort(dim=-1, descending=True, stable=True)[..., :k]
        return torch.zeros_like(ranked).scatter_(-1, best, 1.0)


class MaskGate(nn.Module):
    """Fixed multipliers: heads that were decided on but are still in the weights."""

    def __init__(self, n_heads: int, kept: list[int], scale: float):
        """Ones (times scale) for the kept heads, zeros for the others."""
        super().__init__()
        self.mask: Tensor
        mask = torch.zeros(n_heads)
        mask[kept] = scale
        self.register_buffer("mask", mask, persistent=False)

    def forward(self) -> Tensor:
        """Multipliers [N]."""
        return self.mask


def scale_output(gate: Tensor, initial_heads: int) -> Tensor:
    """Attention output scaling (Shim et al. 2021): times heads / open heads, no gradient there."""
    return gate * (initial_heads / (gate > 0).sum(-1, keepdim=True).clamp(min=1))


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
