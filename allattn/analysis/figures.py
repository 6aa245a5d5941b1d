"""The pictures of the report: maps of heads and curves of perplexity, as matplotlib figures."""

from __future__ import annotations

import io
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window, wherever it runs
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

PerHead = list[list[float]]  # by layer and head

GONE = "#d9d9d9"  # a head that is not there


def png(figure: Figure) -> bytes:
    """The picture as a file's content; the figure is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return buffer.getvalue()


def head_maps(maps: dict[str, PerHead], head_ids: list[list[int]], n_heads: list[int]) -> Figure:
    """One map of layers x heads for each quantity, every head at its original place.

    Args:
        maps: title to a value for each head of the model, by layer.
        head_ids: by layer the original numbers of these heads.
        n_heads: by layer how many heads there were at first; those that are gone are grey.
    """
    n_rows, n_columns = len(n_heads), max(n_heads, default=1)
    width = min(max(0.32 * n_columns + 1.4, 2.6), 6)
    across = min(len(maps), 3)
    down = -(-len(maps) // across)
    figure, panels = plt.subplots(
        down, across, figsize=(width * across, (0.3 * n_rows + 1.3) * down), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for spare in panels.flat[len(maps) :]:
        spare.set_axis_off()
    for axes, (title, values) in zip(panels.flat, maps.items(), strict=False):
        grid = np.full((n_rows, n_columns), np.nan)
        for layer, (ids, row) in enumerate(zip(head_ids, values, strict=True)):
            grid[layer, ids] = row
        image = axes.imshow(grid, cmap=_colours(), aspect="auto")
        for layer, n in enumerate(n_heads):  # beyond the layer's heads there never was one
            axes.barh(layer, n_columns - n, left=n - 0.5, height=1, color="white")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("head", fontsize=8)
        axes.tick_params(labelsize=7)
        figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
    for row in panels:
        row[0].set_ylabel("layer", fontsize=8)
    return figure


def _colours() -> Any:
    return plt.get_cmap("viridis").with_extremes(bad=GONE)


def curves(groups: dict[str, dict[str, list[tuple[float, float]]]]) -> Figure:
    """Perplexity against the share of heads kept: a panel for each state of the run.

    Args:
        groups: state to order of removal to points (share kept, perplexity).
    """
    figure, panels = plt.subplots(
        1, len(groups), figsize=(3.6 * len(groups) + 0.6, 3.4), layout="constrained",
        sharey=True, squeeze=False,
    )  # fmt: skip
    for axes, (state, orders) in zip(panels[0], groups.items(), strict=True):
        for order, points in orders.items():
            axes.plot(*zip(*points, strict=True), ".-", label=order)
        axes.set_title(state, fontsize=9)
        axes.set_xlabel("share of heads kept")
        axes.invert_xaxis()
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("perplexity a token (log scale)")
    panels[0][-1].legend(fontsize=8)
    return figure
