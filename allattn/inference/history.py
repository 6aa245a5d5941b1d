"""The run that a model comes from, and the models that it went through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allattn.inference.load import Source
from allattn.training.state import blaming, checkpoints_of, read_meta


@dataclass
class RunHistory:
    """A run's checkpoints before a model of it.

    Attributes:
        folder: the run's; None: the model stands alone, an export elsewhere.
        checkpoints: folders of those of earlier steps, earliest first.
        dense: the last of them with all heads and no gates; None: there is none.
    """

    folder: Path | None
    checkpoints: list[Path]
    dense: Path | None


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
    run = source.run
    if folder is None:
        return RunHistory(None, [], None)
    earlier: list[Path] = []
    dense = None
    for path in checkpoints_of(folder):
        meta = read_meta(path)
        with blaming(path / "meta.json"):
            whole = meta["pruner"] is None and meta["masks"] is None
            whole = whole and list(map(len, meta["head_ids"])) == run["first_heads"]
            if meta["step"] < run["step"]:
                earlier.append(path)
                dense = path if whole else dense
    n = len(earlier)
    chosen = {earlier[(i + 1) * n // n_states - 1] for i in range(n_states)} if n else set()
    chosen |= {dense} if dense else set()
    return RunHistory(folder, [path for path in earlier if path in chosen], dense)
