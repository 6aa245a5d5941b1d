"""What is lost without a head, and what is left of a layer with one (Michel et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from allattn.analysis.masked import all_heads, segment_losses, without
from allattn.analysis.sample import Sample
from allattn.analysis.significance import holm, sign_flip_test, units
from allattn.model.scoring import perplexity
from allattn.model.transformer import TransformerLM


@dataclass
class Effect:
    """What a mask does to the loss (nats a token) and the perplexity of a sample.

    Attributes:
        loss: under the mask.
        ppl: likewise.
        delta_loss: minus that of the whole model; above 0: the heads that are gone were of use.
        delta_ppl: likewise.
        p_value: of a paired two-sided test over units of the text (`significance`).
        p_corrected: the same for as many tests as were made together (Holm).
    """

    loss: float
    ppl: float
    delta_loss: float
    delta_ppl: float
    p_value: float
    p_corrected: float


@dataclass
class HeadEffect(Effect):
    """A model without one head."""

    layer: int
    head: int


@dataclass
class LayerEffect(Effect):
    """A model with a layer reduced to its best single head, the other layers whole.

    Attributes:
        layer: which.
        best: the head of the lowest loss, the first one on a tie. It was chosen on the same text,
            so its loss is a little better than it would be on other text.
        losses: with each head of the layer alone.
    """

    layer: int
    best: int
    losses: list[float]


def ablation_tokens(heads: Sequence[int], sample: Sample) -> int:
    """What `ablate_each` counts in all, and `best_single_heads` too, for head counts by layer."""
    return (1 + sum(heads)) * sample.n_tokens


def ablate_each(
    model: TransformerLM,
    sample: Sample,
    *,
    seed: int = 1,
    batch_size: int = 8,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> list[HeadEffect]:
    """Each head removed alone (Michel et al. 2019, section 3.2), by layer and head.

    Args:
        model: left as it was.
        sample: of the valid split.
        seed: of the test.
        batch_size: lanes side by side; changes nothing but rounding.
        on_tokens: called with the number of tokens after each segment; `ablation_tokens` in all.

    Raises:
        RuntimeError: a loss that is not finite.
    """
    config, every = model.config, all_heads(model.config.heads)
    masks = [without(config.heads, [head]) for head in every]
    losses = segment_losses(model, sample, masks, batch_size, on_tokens)
    effects = _effects(losses, config.mem_len, sample.lanes.seq_len, seed)
    return [
        HeadEffect(**vars(effect), layer=layer, head=head)
        for effect, (layer, head) in zip(effects, every, strict=True)
    ]


def best_single_heads(
    model: TransformerLM,
    sample: Sample,
    *,
    seed: int = 1,
    batch_size: int = 8,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> list[LayerEffect]:
    """Each layer reduced to its best single head (section 3.3); layers without heads are left out.

    Args:
        model: left as it was.
        sample: of the valid split.
        seed: of the test.
        batch_size: lanes side by side; changes nothing but rounding.
        on_tokens: called with the number of tokens after each segment; `ablation_tokens` in all.

    Raises:
        RuntimeError: a loss that is not finite.
    """
    config, every = model.config, all_heads(model.config.heads)
    masks = [
        without(config.heads, [other for other in every if other[0] == layer and other[1] != head])
        for layer, head in every
    ]
    losses = segment_losses(model, sample, masks, batch_size, on_tokens)
    means = losses[1:].mean((1, 2))
    ends = np.cumsum(config.heads)
    layers = [(i, ends[i] - n, ends[i]) for i, n in enumerate(config.heads) if n]
    best = [int(means[start:end].argmin()) for _, start, end in layers]
    rows = [0, *(1 + start + b for (_, start, _), b in zip(layers, best, strict=True))]
    effects = _effects(losses[rows], config.mem_len, sample.lanes.seq_len, seed)
    return [
        LayerEffect(**vars(effect), layer=layer, best=b, losses=means[start:end].tolist())
        for effect, (layer, start, end), b in zip(effects, layers, best, strict=True)
    ]


def _effects(losses: np.ndarray, mem_len: int, seq_len: int, seed: int) -> list[Effect]:
    """Of each mask, from [1 + masks, lanes, segments]."""
    p_values = sign_flip_test(units(losses[1:] - losses[0], mem_len, seq_len), seed)
    whole, *masked = losses.mean((1, 2)).tolist()
    return [
        Effect(loss, perplexity(loss), loss - whole, perplexity(loss) - perplexity(whole), p, q)
        for loss, p, q in zip(masked, p_values.tolist(), holm(p_values).tolist(), strict=True)
    ]
