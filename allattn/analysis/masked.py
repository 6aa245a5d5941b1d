"""The losses of a sample of text under masks of heads, each segment on its own.

A mask is the gates of the one attention implementation. Layers below the first that loses a head
give what they gave with all heads, so they run once for all masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from allattn.analysis.sample import Sample
from allattn.analysis.undisturbed import undisturbed
from allattn.model.attention import Attention
from allattn.model.transformer import Block, TransformerLM
from allattn.pruning.gates import MaskGate

Head = tuple[int, int]  # layer, number in it
Kept = list[list[int]]  # by layer, the numbers of the heads that stay, rising


def all_heads(heads: Sequence[int]) -> list[Head]:
    """Every head of layers with so many, in order."""
    return [(layer, head) for layer, n in enumerate(heads) for head in range(n)]


def without(heads: Sequence[int], removed: Sequence[Head]) -> Kept:
    """What is left of layers with so many heads."""
    gone = set(removed)
    return [[h for h in range(n) if (layer, h) not in gone] for layer, n in enumerate(heads)]


def segment_losses(
    model: TransformerLM,
    sample: Sample,
    masks: Sequence[Kept],
    batch_size: int = 8,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> np.ndarray:
    """Mean loss of every segment with all heads, and under each mask.

    A mask is put on top of gates that the model has, and nothing is scaled up for the heads that
    are gone (Michel et al. 2019, section 2.2). Every mask runs with the same shapes as the whole
    model, so taking a head that does nothing changes no bit.

    Args:
        model: on any device; left as it was. The inputs of all its layers are kept meanwhile, for
            `batch_size` lanes.
        sample: text, with memory from segment to segment.
        masks: what stays.
        batch_size: lanes side by side; changes nothing but rounding.
        on_tokens: called with the number of tokens after each segment: sample.n_tokens in all for
            the whole model, and as many for each mask.

    Returns:
        Nats a token, float64 [1 + masks, lanes, segments].

    Raises:
        RuntimeError: a loss that is not finite.
    """
    whole = without(model.config.heads, [])
    device = next(model.parameters()).device
    layers = model.layers
    parts = []
    with undisturbed(model), torch.no_grad():
        scales = [_multipliers(layer.attention) for layer in layers]
        for stream in sample.streams(batch_size):
            segments = [(ids.to(device), targets.to(device)) for ids, targets in stream]
            _mask(model, whole, scales)
            inputs = [_Recorder() for _ in layers]
            with contextlib.ExitStack() as stack:
                for layer, recorder in zip(layers, inputs, strict=True):
                    stack.callback(layer.register_forward_pre_hook(recorder).remove)
                losses = [_run(model, segments, on_tokens)]
            for kept in masks:
                first = next((i for i, heads in enumerate(kept) if heads != whole[i]), None)
                if first is None:
                    losses.append(losses[0])
                    on_tokens(losses[0].numel() * sample.lanes.seq_len)
                    continue
                _mask(model, kept, scales)
                try:
                    rest = nn.ModuleList([_Replay(inputs[first].seen), *layers[first:]])
                    model.layers = cast("Sequence[Block]", rest)  # it stands for those before
                    losses.append(_run(model, segments, on_tokens))
                finally:
                    model.layers = layers
            parts.append(torch.stack(losses).cpu())
    result = torch.cat(parts, dim=1).numpy()
    if not np.isfinite(result).all():
        raise RuntimeError("a loss without some heads is not finite; the model has diverged")
    return result


def _multipliers(attention: Attention | None) -> Tensor | None:
    """What the gates that are there give, [N]; None: no gates."""
    return None if attention is None or attention.gate is None else attention.gate()


def _mask(model: TransformerLM, kept: Kept, scales: list[Tensor | None]) -> None:
    """Give every layer the gates of a mask."""
    for layer, heads, scale_N in zip(model.layers, kept, scales, strict=True):
        if layer.attention is not None:
            gate = MaskGate(layer.attention.n_heads, heads, 1.0)
            gate.to(layer.attention.output.weight.device)
            if scale_N is not None:
                gate.mask = gate.mask * scale_N
            layer.attention.gate = gate


def _run(
    model: TransformerLM,
    segments: list[tuple[Tensor, Tensor]],
    on_tokens: Callable[[int], object],
) -> Tensor:
    """Mean loss of each segment of a stream: float64 [B, segments]."""
    memory, losses = model.empty_cache(), []
    for ids_BT, targets_BT in segments:
        output = model(ids_BT, targets_BT, memory)
        memory = output.memory
        losses.append(output.nll.double().mean(1))
        on_tokens(ids_BT.numel())
    return torch.stack(losses, dim=1)


class _Recorder:
    """Forward pre-hook of a layer that keeps its inputs, one [B, T, D] a segment."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen.append(args[0])


class _Replay(nn.Module):
    """Stands for a model's first layers: gives what they gave, one segment a call."""

    attention = None

    def __init__(self, outputs: list[Tensor]):
        super().__init__()
        self._outputs = iter(outputs)

    def forward(self, x_BTD: Tensor, *_: Any) -> Tensor:
        return next(self._outputs)
