"""The map of the heads: every head in its place and colour, the removed ones told apart."""

from __future__ import annotations

import math

import numpy as np
import pytest

from allattn.training.pictures import (
    LEFT,
    NOT_FINITE,
    TOP,
    cell_size,
    colour,
    head_map,
)


def cell_of(image: np.ndarray, layer: int, head: int, cell: int) -> set[tuple[int, ...]]:
    """The colours of one head's cell."""
    y, x = TOP + layer * cell, LEFT + head * cell
    return {tuple(p) for p in image[y : y + cell - 1, x : x + cell - 1].reshape(-1, 3).tolist()}


def test_every_head_is_in_its_place():
    p_open = [[0.0, 1.0, None], [0.25, 0.5, 0.75]]
    image, cell = head_map(p_open, "title"), cell_size(2, 3)
    assert image.dtype == np.uint8 and image.shape[2] == 3
    for layer, row in enumerate(p_open):
        for head, p in enumerate(row):
            if p is not None:
                assert cell_of(image, layer, head, cell) == {colour(p)}
    removed, closed = cell_of(image, 0, 2, cell), cell_of(image, 0, 0, cell)
    assert len(removed) == 2  # hatched
    assert not removed & closed
    assert all(max(c) - min(c) == 0 for c in removed)  # grey, where closed is dark red
    assert closed == {(140, 20, 20)}


def test_the_colour_goes_with_p():
    """Each channel moves one way on each side of 1/2, and no two probabilities look alike."""
    ps = np.linspace(0, 1, 41)
    colours = np.array([colour(p) for p in ps]).astype(int)
    assert len({tuple(c) for c in colours.tolist()}) == len(ps)
    for half in (colours[:21], colours[20:]):
        steps = np.diff(half, axis=0)
        assert all((steps[:, k] >= 0).all() or (steps[:, k] <= 0).all() for k in range(3))
    assert colour(-1.0) == colour(0.0) and colour(2.0) == colour(1.0)


@pytest.mark.parametrize("p", [math.nan, math.inf])
def test_what_is_no_number_stands_out(p):
    assert colour(p) == NOT_FINITE
    assert head_map([[p, 0.5]], "").shape == head_map([[0.1, 0.5]], "").shape


@pytest.mark.parametrize("heads", [[], [0], [0, 3], [16] * 48, [1], [64] * 2])
def test_any_shape(heads):
    image = head_map([[0.5] * n for n in heads], "step 1")
    cell = cell_size(len(heads), max(heads, default=0))
    assert image.shape[0] >= len(heads) * cell and max(image.shape) < 1000
    assert image.shape[1] >= max(heads, default=0) * cell
