"""Perplexity against the share of heads that is kept, for several orders of pruning them.

After Michel et al. 2019, section 4, without training in between. The share is of the heads that
the model at hand has. `removable_share` makes one number of a curve, to compare checkpoints by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from allattn.analysis.masked import Head, all_heads, segment_losses, without
from allattn.analysis.sample import Sample
from allattn.analysis.undisturbed import undisturbed
from allattn.model.scoring import perplexity
from allattn.model.transformer import TransformerLM
from allattn.pruning.importance import importance

N_STEPS = 10  # a curve's, each about a tenth of the heads


@dataclass
class CurvePoint:
    """A model with some of its heads, without more training.

    Attributes:
        kept: heads left.
        keep: share of the model's heads.
        loss: nats a token; of several random orders the mean.
        loss_low: the lowest of these; the same as `loss` where there is one order.
        loss_high: the highest.
        ppl, ppl_low, ppl_high: exp of these.
    """

    kept: int
    keep: float
    loss: float
    loss_low: float
    loss_high: float
    ppl: float
    ppl_low: float
    ppl_high: float


@dataclass
class Curve:
    """Points from all heads down to the last that the order removes.

    Attributes:
        order: `importance`, `random` or `gates`.
        points: at least one.
    """

    order: str
    points: list[CurvePoint]


def curve_tokens(
    heads: Sequence[int],
    sample: Sample,
    calibration: Sample,
    gates_order: Sequence[Head] = (),
    n_random: int = 3,
) -> int:
    """What `pruning_curves` counts in all, for a model with these head counts by layer."""
    total = sum(heads)
    if not total:
        return 0
    removed = [total] * (1 + n_random) + [len(gates_order)]
    n_masks = 1 + sum(len(_levels(total, n)) for n in removed)
    return calibration.n_tokens + (1 + n_masks) * sample.n_tokens


def pruning_curves(
    model: TransformerLM,
    sample: Sample,
    calibration: Sample,
    gates_order: Sequence[Head] = (),
    *,
    n_random: int = 3,
    seed: int = 1,
    batch_size: int = 8,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> list[Curve]:
    """Curves of greedy pruning by importance, of random orders, and of the trained gates' order.

    Args:
        model: left as it was.
        sample: of the valid split, to evaluate on.
        calibration: of the train split, to score importance on, once with all heads.
        gates_order: heads in the model's numbers (`in_model_numbers`), the first pruned first. Its
            curve ends where it ends; without any there is no such curve.
        n_random: random orders.
        seed: of these.
        batch_size: lanes side by side; changes nothing but rounding.
        on_tokens: called with the number of tokens after each segment; `curve_tokens` in all.

    Returns:
        One for each kind of order; none for a model without heads.

    Raises:
        RuntimeError: a loss or a gradient that is not finite.
    """
    heads, every = model.config.heads, all_heads(model.config.heads)
    total = len(every)
    assert len(set(gates_order)) == len(gates_order) and set(gates_order) <= set(every)
    if not every:
        return []
    with undisturbed(model):
        scores = importance(model, calibration.streams(batch_size, on_tokens))
    # ties: the lower layer, then the lower head, stays, as everywhere
    greedy = sorted(every, key=lambda a: (scores[a[0]][a[1]], -a[0], -a[1]))
    rng = np.random.default_rng([seed, 0xC0B5])
    orders = [("importance", greedy)]
    orders += [("random", [every[i] for i in rng.permutation(total)]) for _ in range(n_random)]
    if gates_order:
        orders.append(("gates", list(gates_order)))
    wanted = [
        (name, kept, without(heads, order[: total - kept]))
        for name, order in orders
        for kept in _levels(total, len(order))
    ]
    masks = [without(heads, every), *(mask for _, _, mask in wanted)]
    losses = segment_losses(model, sample, masks, batch_size, on_tokens).mean((1, 2))
    whole, none, *rest = losses.tolist()
    found: dict[str, dict[int, list[float]]] = {}
    for name, order in orders:
        ends = {total: [whole], 0: [none]} if len(order) == total else {total: [whole]}
        found.setdefault(name, ends)
    for (name, kept, _), loss in zip(wanted, rest, strict=True):
        found[name].setdefault(kept, []).append(loss)
    return [_curve(name, by_level) for name, by_level in found.items()]


def in_model_numbers(order: Iterable[Head], head_ids: Sequence[Sequence[int]]) -> list[Head]:
    """Heads in the numbers of a run's first model, as those of a later one; lost ones left out.

    Args:
        order: (layer, number at the start of the run).
        head_ids: of the later model, by layer and head: the number at the start of the run.
    """
    place = {
        (layer, first): (layer, head)
        for layer, ids in enumerate(head_ids)
        for head, first in enumerate(ids)
    }
    return [place[head] for head in order if head in place]


def removable_share(curve: Curve, tolerance: float = 0.01) -> float:
    """Share of the heads that can go before the loss is higher by more than a share of itself.

    Between two points the loss is taken to follow a line; behind the first that is too high nothing
    counts, even if a later one is lower.

    Args:
        curve: one of `pruning_curves`; a partial one gives at most what its order removes.
        tolerance: 0.01 is 1% of the loss in nats.
    """
    limit = curve.points[0].loss * (1 + tolerance)
    for before, after in pairwise(curve.points):
        if after.loss > limit:
            part = (limit - before.loss) / (after.loss - before.loss)
            return 1 - (before.keep + part * (after.keep - before.keep))
    return 1 - curve.points[-1].keep


def _levels(total: int, n_removed: int) -> list[int]:
    """How many heads to keep when n_removed can go: about N_STEPS even steps, not all or none."""
    tenths = {math.floor(total * i / N_STEPS + 0.5) for i in range(N_STEPS)}
    least = total - n_removed
    return sorted((k for k in tenths | {least} if max(least, 1) <= k < total), reverse=True)


def _curve(order: str, losses: dict[int, list[float]]) -> Curve:
    """From the losses at each number of heads; of several orders the mean and range."""
    total = max(losses)
    points = []
    for kept in sorted(losses, reverse=True):
        values = losses[kept]
        three = (sum(values) / len(values), min(values), max(values))
        points.append(CurvePoint(kept, kept / total, *three, *map(perplexity, three)))
    return Curve(order, points)
