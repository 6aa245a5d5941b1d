"""Score a stream of tokens with memory: every token exactly once, whatever the batch.

A long stream is cut into lanes that run side by side. Each lane starts as many segments early as
its memory can reach back (layers x mem_len), unscored, so that a token's loss does not depend on
how many lanes there are. Segments stay where one lane would have put them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from allattn.model.transformer import Memory, Output, TransformerLM
from allattn.moments import reached


def perplexity(loss: float) -> float:
    """exp of nats a token (or word); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def score_stream(
    forward: Callable[..., Output],
    model: TransformerLM,
    tokens: np.ndarray,
    first_context: int,
    *,
    seq_len: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    cache: bool = True,
    on_segment: Callable[[int], object] | None = None,
) -> torch.Tensor:
    """Sum of the losses of this rank's share of a stream.

    Args:
        forward: the model, or an engine around it; called alike on every rank.
        model: for its config; must be in evaluation mode.
        tokens: [n] ids. All n are scored; the first one after `first_context` (a line end).
        first_context: id that stands before the stream.
        seq_len: tokens a segment.
        batch_size: how many lanes to run side by side at most, of all ranks together.
        rank: this process.
        world_size: of so many.
        cache: keep the memory's keys and values instead of computing them anew each segment.
        on_segment: called with the number of tokens scored, after every segment.

    Returns:
        float64 [2]: nats, tokens scored. To be summed over ranks.
    """
    config, device = model.config, next(model.parameters()).device
    n, T = len(tokens), seq_len
    n_segments = -(-n // T)
    warmup = config.n_layers * -(-config.mem_len // T)
    # lanes shorter than their warm-up would spend more on it than they save
    n_lanes = max(1, min(batch_size, n_segments // max(2 * warmup, 1)))
    n_lanes = -(-n_lanes // world_size) * world_size
    per_lane = -(-n_segments // n_lanes)
    warmup = warmup if n_lanes > 1 else 0
    starts = [lane * per_lane for lane in range(rank, n_lanes, world_size)]
    memory: Memory | None = model.empty_cache() if cache else None
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for k in range(-warmup, per_lane):
        inputs = np.full((len(starts), T), first_context, dtype=np.int64)
        targets = np.full((len(starts), T), -1, dtype=np.int64)
        for row, start in enumerate(starts):
            low = (start + k) * T
            if start + k < 0 or low >= n:
                continue
            piece = tokens[low : low + T].astype(np.int64)
            inputs[row, 0] = tokens[low - 1] if low else first_context
            inputs[row, 1 : len(piece)] = piece[:-1]
            if 0 <= k and start + k < min(start + per_lane, n_segments):
                targets[row, : len(piece)] = piece
        first = [row for row, start in enumerate(starts) if start + k == 0]
        if memory is not None and memory.length and first:
            # the corpus starts here in this lane: what it ran before was nothing
            if memory.padding is None:
                memory.padding = torch.zeros(len(starts), dtype=torch.long, device=device)
            memory.padding[first] = memory.length
        targets_BT = torch.from_numpy(targets).to(device)
        output = forward(torch.from_numpy(inputs).to(device), targets_BT, memory)
        memory = output.memory
        assert output.nll is not None, "targets were given"
        scored = targets_BT != -1
        total += torch.stack([output.nll.double()[scored].sum(), scored.sum().double()])
        reached("evaluate:segment")
        if on_segment is not None:
            on_segment(int((targets != -1).sum()))
    return total
