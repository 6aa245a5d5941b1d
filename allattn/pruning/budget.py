"""How many heads stay, and how the budget is shared out: exact counts for every method and scope.

All heads of a model cost the same (`d_head` is one number), so a budget in parameters or FLOPs is a
number of heads too. In all-attention models all three agree; a Transformer-XL layer has a
feed-forward block that no head takes with it.
"""

from __future__ import annotations

import math
from typing import Any

from allattn.config import Config, ConfigError, ModelConfig, PruneConfig
from allattn.model.transformer import count_parameters, feed_forward_flops, head_flops
from allattn.pruning.schedule import Schedule, heads_to_keep


def target_heads(
    prune: PruneConfig, model: ModelConfig, run_heads: int, where: str = "prune"
) -> int | None:
    """Heads left at a stage's end; None where a penalty decides.

    Args:
        prune: with one of keep, keep_params, keep_flops, or penalty.
        model: of the run, with the layers' present heads.
        run_heads: heads of the run's first model, which shares are shares of.
        where: the config key that an error names.

    Raises:
        ConfigError: the budget cannot be reached by removing heads, or min_heads needs more.
    """
    if prune.keep is not None:
        k = heads_to_keep(prune.keep, run_heads)
    elif prune.keep_params is not None:
        head, fixed = _parameters(model)
        k = _heads_of_share(prune.keep_params, head, fixed, run_heads, f"{where}.keep_params")
    elif prune.keep_flops is not None:
        head, fixed = head_flops(model), model.n_layers * feed_forward_flops(model)
        k = _heads_of_share(prune.keep_flops, head, fixed, run_heads, f"{where}.keep_flops")
    else:
        return None
    least = sum(min(prune.min_heads, n) for n in model.heads)
    if k < least:
        raise ConfigError(
            f"{where}.min_heads: {prune.min_heads} in every layer are {least} heads, but the "
            f"budget leaves {k}; lower it or keep more"
        )
    return k


def stage_table(config: Config, model: ModelConfig) -> list[dict[str, Any]]:
    """A run's stages for people: name, first_step, last_step (from 1), and what happens, in words.

    Args:
        config: of the run.
        model: with the heads that it begins with.

    Raises:
        ConfigError: as `target_heads`.
    """
    stages, ends, heads = [], Schedule(config.stages).ends, sum(model.heads)
    for i, (stage, end) in enumerate(zip(config.stages, ends, strict=True)):
        what = f"lr {stage.lr.schedule}"
        if stage.distill is not None:
            what += f", distill {stage.distill.weight}"
        if stage.prune is not None:
            k = target_heads(stage.prune, model, heads, f"stages[{i}].prune")
            target = f"penalty {stage.prune.penalty}" if k is None else f"{k} of {heads} heads stay"
            what += f"; {stage.prune.method}: {target}, remove {stage.prune.remove}"
        first = end - stage.steps + 1
        stages.append({"name": stage.name, "first_step": first, "last_step": end, "what": what})
    return stages


def _parameters(model: ModelConfig) -> tuple[float, float]:
    """(of one head, of what no head takes with it): the layers' matrices, norms aside."""
    changes = {"vocab_size": 2, "embedding": "tied", "cutoffs": [], "div_value": 1, "n_heads": 1}
    parts = count_parameters(ModelConfig(**{**vars(model), **changes}))
    return (parts["attention"] + parts["persistent"]) / model.n_layers, parts["feed_forward"]


def _heads_of_share(share: float, head: float, fixed: float, heads: int, where: str) -> int:
    """The head count whose cost is nearest to a share of the whole; halves round up."""
    k = math.floor((share * (heads * head + fixed) - fixed) / head + 0.5)
    if k < 0:
        least = fixed / (heads * head + fixed)
        raise ConfigError(
            f"{where}: {share} cannot be reached by removing heads; with none left, "
            f"{least:.3f} is still there (the feed-forward blocks)"
        )
    return min(k, heads)


def apportion(
    k: int, sizes: list[int], min_heads: int, at_most: list[int] | None = None
) -> list[int]:
    """How many of k heads each layer keeps when all keep the same share (`scope: layer`).

    One head at a time goes to the layer that is furthest below its share, the lower one on a tie.

    Args:
        k: heads in all.
        sizes: what shares are shares of, by layer.
        min_heads: so many at least, where a layer has them.
        at_most: heads that a layer still has, where it lost some.
    """
    at_most = sizes if at_most is None else at_most
    total = max(sum(sizes), 1)
    quotas = [min(min_heads, n) for n in at_most]
    while sum(quotas) < min(k, sum(at_most)):
        lacking = [
            (k * n / total - q if q < most else -math.inf, -layer)
            for layer, (n, q, most) in enumerate(zip(sizes, quotas, at_most, strict=True))
        ]
        quotas[-max(lacking)[1]] += 1
    return quotas


def select(
    scores: list[list[float]],
    k: int,
    scope: str = "global",
    min_heads: int = 0,
    sizes: list[int] | None = None,
) -> list[list[int]]:
    """The heads that stay: exactly min(k, all of them).

    Args:
        scores: by layer and head; higher stays. Ties go to the lower layer, then the lower head.
        k: heads that stay.
        scope: `global`: the best k wherever they are; `layer`: the same share of every layer.
        min_heads: how many stay in a layer at least, where it has so many.
        sizes: `layer`: what the share is of, by layer; default: the heads that have a score.

    Returns:
        By layer, rising head numbers.
    """
    present = list(map(len, scores))
    ranked = [[h for _, h in sorted((-x, h) for h, x in enumerate(s))] for s in scores]
    if scope == "layer":
        quotas = apportion(k, sizes or present, min_heads, present)
    else:
        quotas = [min(min_heads, n) for n in present]
        rest = sorted(
            (-scores[layer][head], layer, head)
            for layer, order in enumerate(ranked)
            for head in order[quotas[layer] :]
        )
        for _, layer, _ in rest[: max(k - sum(quotas), 0)]:
            quotas[layer] += 1  # a layer's best come first in `rest` too
    return [sorted(order[:quota]) for order, quota in zip(ranked, quotas, strict=True)]
