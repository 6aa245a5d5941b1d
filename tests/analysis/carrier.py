"""A planted model: one head carries all there is to know, one is dead, two are noise.

The noise has a layer of its own: importance is normalised within a layer, so that one live head
alone in its layer scores 1 however little it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from allattn.analysis.sample import Sample, take_sample
from allattn.model.transformer import TransformerLM
from allattn.pruning.removal import cut_config, cut_tensors

V = 11
CARRIER, DEAD = (1, 1), (1, 0)


def counting(n: int) -> Sample:
    """0, 1, ..., 10, 0, 1, ...: the next token follows from this one."""
    return take_sample(np.arange(n) % V, seq_len=4, n_tokens=n)


def plant(tiny_model: Callable[..., TransformerLM], **values: Any) -> TransformerLM:
    """Two layers of two heads: CARRIER turns a token into the next one, DEAD adds nothing."""
    model = tiny_model(n_heads=[2, 2], d_model=V + 1, d_head=V + 1, vocab_size=V, **values)
    D = V + 1
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1.0 if name.endswith("norm.weight") else 0.02 * torch.randn_like(p))
        model.vocabulary.embedding.copy_(torch.eye(V, D))
        attention = model.layers[CARRIER[0]].attention
        rows = slice(CARRIER[1] * D, (CARRIER[1] + 1) * D)
        following = torch.zeros(D, D)
        following[[(t + 1) % V for t in range(V)], range(V)] = 2.0
        attention.query.weight[rows] = torch.eye(D)
        attention.key.weight[rows] = torch.eye(D)
        attention.value.weight[rows] = torch.eye(D)
        attention.output.weight[:, rows] = following.double()
        dead = slice(DEAD[1] * D, (DEAD[1] + 1) * D)
        model.layers[DEAD[0]].attention.output.weight[:, dead] = 0
    return model


def losses_of_removed(model: TransformerLM, sample: Sample, kept: list[list[int]]) -> np.ndarray:
    """Heads really cut out, and every segment run with plain memory: [lanes, segments]."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    smaller = TransformerLM(cut_config(model.config, kept)).to(model.norm.weight.dtype).eval()
    smaller.load_state_dict(cut_tensors(parameters, kept, model.config.d_head), strict=True)
    losses, memory = [], None
    (stream,) = sample.streams(sample.lanes.n_lanes)
    with torch.no_grad():
        for ids, targets in stream:
            output = smaller(ids, targets, memory)
            memory = output.memory
            losses.append(output.nll.double().mean(1))
    return torch.stack(losses, 1).numpy()
