"""Scores of heads for `methods.Scored` and `allattn prune`: importance, magnitude, random.

Shapes: B sequences, N heads of a layer, D model width, H head width, P persistent vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from allattn.config import PruneConfig
from allattn.model.transformer import Memory, TransformerLM
from allattn.pruning.gates import gates

Stream = Iterable[tuple[Tensor, Tensor]]  # consecutive segments of the same lanes: ids, targets


class ProbeGate(nn.Module):
    """The same multipliers for every sequence, as a leaf whose gradient is read: [B, N]."""

    def __init__(self, mask_N: Tensor):
        super().__init__()
        self.mask_N = mask_N
        self.value: Tensor | None = None

    def start(self, n_sequences: int) -> None:
        """A new leaf, for the next forward pass."""
        self.value = self.mask_N.expand(n_sequences, -1).clone().requires_grad_()

    def forward(self) -> Tensor:
        """Multipliers [B, N]."""
        assert self.value is not None, "started before each forward pass"
        return self.value


def put_probes(model: TransformerLM) -> list[ProbeGate | None]:
    """Replace every layer's gate by a probe with the same multipliers; None: no heads there."""
    probes: list[ProbeGate | None] = []
    for layer in model.layers:
        probe = None
        if layer.attention is not None:
            weight, gate = layer.attention.output.weight, layer.attention.gate
            mask = weight.new_ones(layer.attention.n_heads) if gate is None else gate()
            # never narrower than float32, and as wide as the model
            dtype = torch.promote_types(weight.dtype, torch.float32)
            probe = ProbeGate(mask.detach().to(weight.device, dtype))
            layer.attention.gate = probe
        probes.append(probe)
    return probes


def head_scores(
    config: PruneConfig,
    model: TransformerLM,
    streams: Callable[[], Iterable[Stream]],
    seed: list[int],
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[list[float]]:
    """By layer and head, what the config's method thinks of it; higher is better.

    Args:
        config: its method, and how to normalise importance.
        model: scored as it is, masks included; importance replaces its gates by probes.
        streams: gives the calibration text of this rank (importance only).
        seed: of `random`.
        total: sums a tensor over ranks.
    """
    if config.method == "importance":
        return importance(model, streams(), config.normalize, total)
    if config.method == "magnitude":
        return magnitude(model)
    rng = np.random.default_rng([*seed, 0x5A4D])
    return [rng.uniform(size=n).tolist() for n in model.config.heads]


def importance(
    model: TransformerLM,
    streams: Iterable[Stream],
    normalize: bool = True,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[list[float]]:
    """E abs(dL / d gate), L a sequence's mean loss a token (Michel et al. 2019, equation 2).

    The expectation is over sequences of a segment, so it depends neither on the batch size nor on
    the number of ranks. `normalize` divides a layer's scores by their L2 norm (Molchanov et al.
    2017, section 2.2, as Michel et al. do).

    Args:
        model: in evaluation mode; its gates become probes, and its weights need no gradient after.
        streams: calibration text; memory goes from a stream's segment to the next.
        normalize: within each layer.
        total: sums a tensor over ranks.

    Raises:
        RuntimeError: a gate without a gradient, or a score that is not finite.
    """
    model.eval().requires_grad_(False)
    device = next(model.parameters()).device
    probes = put_probes(model)
    sums = torch.zeros(len(probes), max(model.config.heads, default=0), dtype=torch.float64)
    n_sequences = 0
    for stream in streams:
        memory: Memory | None = None
        for ids_BT, targets_BT in stream:
            for probe in gates(model):
                probe.start(len(ids_BT))
            with torch.enable_grad():
                output = model(ids_BT.to(device), targets_BT.to(device), memory)
                output.nll.float().mean(1).sum().backward()
            memory = output.memory
            n_sequences += len(ids_BT)
            for i, probe in enumerate(probes):
                if probe is None:
                    continue
                assert probe.value is not None, "started above"
                if probe.value.grad is None:
                    raise RuntimeError(f"layer {i}: the gates got no gradient; heads unscored")
                # of the head's own 0 or 1, which output scaling multiplies
                grad = (probe.value.grad.double().abs().sum(0) * probe.mask_N).cpu()
                sums[i, : len(grad)] += grad
    both = total(torch.cat([sums.flatten(), torch.tensor([float(n_sequences)])]).to(device)).cpu()
    scores = both[:-1].view(sums.shape) / both[-1]
    if not scores.isfinite().all():
        raise RuntimeError("importance: a gate's gradient is not finite; the model has diverged")
    if normalize:
        scores = scores / scores.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return [row[:n].tolist() for row, n in zip(scores, model.config.heads, strict=True)]


@torch.no_grad()
def magnitude(model: TransformerLM) -> list[list[float]]:
    """Root mean square size of what a head can add to the residual stream, if it attended evenly.

    sqrt(|Wo Wv|^2 + |Wo Vp^T|^2 / P) with Frobenius norms: the first is the mean square output for
    a normalised input, the second that over the persistent values Vp = sqrt(P) Vp'.
    """
    scores: list[list[float]] = []
    for layer in model.layers:
        a = layer.attention
        if a is None:
            scores.append([])
            continue
        N, H = a.n_heads, a.d_head
        out_NHD = a.output.weight.double().t().reshape(N, H, -1)
        value_NHD = a.value.weight.double().view(N, H, -1)
        # |Wo Wv|^2 = trace(Wo' Wo Wv Wv'), of [H, H] products
        grams = (out_NHD @ out_NHD.mT, value_NHD @ value_NHD.mT)
        square = (grams[0] * grams[1]).sum((1, 2))
        if a.n_persistent:
            Vp_NPH = a.persistent_value.double() * math.sqrt(a.n_persistent)
            square += (Vp_NPH @ out_NHD).square().sum((1, 2)) / a.n_persistent
        if a.gate is not None:
            square = square * (a.gate() != 0).to(square.device)  # it may still be on the CPU
        scores.append(square.clamp(min=0).sqrt().tolist())
    return scores
