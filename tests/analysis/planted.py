"""Models of one layer whose heads look where they were built to look.

What a head's query, key and value read is the normalised vector of a token: in coordinates 0 to 3
the token's code (cos a, sin a, -cos a, -sin a), in coordinate 4 a one. The angle a grows with the
token's rarity, so coordinate 1 tells how rare it is, and all vectors have the same mean and length,
so LayerNorm scales all alike. A head without a plan has equal scores everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import oracles
import torch

from allattn.model.attention import Attention
from allattn.model.transformer import TransformerLM

SHARP = 60.0  # how far the scores of a planted head are apart
CODE, ONE = slice(0, 4), 4
Plan = Callable[[Attention, int], None]


@torch.no_grad()
def plant(model: TransformerLM, counts: np.ndarray, plans: Sequence[Plan]) -> TransformerLM:
    """Heads by plan, the others even; every head writes the code it reads into coordinate 5 on."""
    assert model.config.embedding == "tied" and model.config.d_model >= 8
    D, H = model.config.d_model, model.config.d_head
    rank = np.argsort(np.argsort(-counts, kind="stable"))
    angle = torch.from_numpy((rank / max(len(counts) - 1, 1) - 0.5) * math.pi)
    for p in model.parameters():
        p.zero_()
    code = torch.stack([angle.cos(), angle.sin(), -angle.cos(), -angle.sin()], dim=1)
    model.vocabulary.embedding[:, CODE] = code.to(model.vocabulary.embedding.dtype)
    (layer,) = model.layers
    layer.attention_norm.weight[CODE] = 1
    layer.attention_norm.bias[ONE] = 1
    model.norm.weight.fill_(1)
    a = layer.attention
    for head in range(a.n_heads):
        for h in range(min(H, 2)):
            a.value.weight[head * H + h, h] = 1
            a.output.weight[5 + (head + h) % (D - 5), head * H + h] = 1 + head
    for head, plan in enumerate(plans):
        plan(a, head)
    return model


def offset(distance: int) -> Plan:
    """Look at the token that many places back."""

    def plan(a: Attention, head: int) -> None:
        # of the position vectors, the one at the distance has the largest product with itself
        row = head * a.d_head
        vector = torch.from_numpy(oracles.sinusoid(distance, a.position.in_features))
        a.position.weight[row] = vector.to(a.position.weight.dtype)
        a.position_bias[head, 0] = SHARP * math.sqrt(a.d_head)

    return plan


def rarest() -> Plan:
    """Look at the rarest token in sight."""

    def plan(a: Attention, head: int) -> None:
        a.key.weight[head * a.d_head, 1] = 1
        a.key.weight[head * a.d_head, ONE] = a.key.in_features  # above persistent vectors, always
        a.content_bias[head, 0] = 100 * SHARP * math.sqrt(a.d_head)

    return plan


def persistent(distribution: Sequence[float]) -> Plan:
    """Look at the persistent vectors alone, each as often as given."""

    def plan(a: Attention, head: int) -> None:
        a.query.weight[head * a.d_head, ONE] = 1
        a.persistent_key[head, :, 0] = torch.tensor(distribution).log() + SHARP

    return plan


def dead() -> Plan:
    """Write nothing."""

    def plan(a: Attention, head: int) -> None:
        a.output.weight[:, head * a.d_head : (head + 1) * a.d_head] = 0

    return plan
