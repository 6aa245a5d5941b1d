"""The run that a model comes from, and the models that it went through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allattn.config import model_config_from_dict
from allattn.inference.load import Source
from allattn.training.state import blaming, checkpoints_of, read_meta


@dataclass
class RunHistory:
    """A run's checkpoints before a model of it.

    Attributes:
        folder: the run's; None: the model stands alone, an export elsewhere.
        first_heads: head counts of the run's first model, by layer.
        checkpoints: folders of those of earlier steps, earliest first.
        dense: the last of them with all heads and no gates; None: there is none.
    """

    folder: Path | None
    first_heads: list[int]
    checkpoints: list[Path]
    dense: Path | None


def step_of(source: Source) -> int:
    """Optimiser steps that a model was trained for."""
    info = source.weights.info
    return info.get("run", info)["step"]


def head_ids_of(source: Source) -> list[list[int]]:
    """By layer, the numbers of a model's heads in its run's first model."""
    info = source.weights.info
    return info.get("run", info).get("head_ids") or [list(range(n)) for n in source.config.heads]


def history_of(source: Source, n_states: int) -> RunHistory:
    """Look for the run around a model: it is the run's `final`, or one of its checkpoints.

    Args:
        source: the model.
        n_states: at most so many checkpoints, spread evenly; the last dense one is always taken.

    Raises:
        ValueError: a damaged checkpoint.
    """
    place = source.weights.path.resolve()
    folder = next((f for f in (place.parent, place.parent.parent) if checkpoints_of(f)), None)
    with blaming(source.weights.path / "config.json"):
        heads = _first_heads(source)
    if folder is None:
        return RunHistory(None, heads, [], None)
    earlier: list[Path] = []
    dense = None
    for path in checkpoints_of(folder):
        meta = read_meta(path)
        with blaming(path / "meta.json"):
            heads = model_config_from_dict(meta["config"]["model"], str(path)).heads
            whole = meta["pruner"] is None and meta["masks"] is None
            whole = whole and list(map(len, meta["head_ids"])) == heads
            if meta["step"] < step_of(source):
                earlier.append(path)
                dense = path if whole else dense
    n = len(earlier)
    chosen = {earlier[(i + 1) * n // n_states - 1] for i in range(n_states)} if n else set()
    chosen |= {dense} if dense else set()
    return RunHistory(folder, heads, [path for path in earlier if path in chosen], dense)


def _first_heads(source: Source) -> list[int]:
    """Head counts of the first model of a model's run, by layer."""
    info = source.weights.info
    if "config" in info:  # a checkpoint
        return model_config_from_dict(info["config"]["model"], str(source.weights.path)).heads
    if "first_heads" in info["run"]:
        return info["run"]["first_heads"]
    ids = zip(head_ids_of(source), source.config.heads, strict=True)  # an older export
    return [max([n, *(i + 1 for i in layer)]) for layer, n in ids]
