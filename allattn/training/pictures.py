"""Draws what a run shows as a picture: the map of its heads."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# closed, undecided, open: told apart in every common kind of colour blindness
COLOURS = np.array([[140, 20, 20], [250, 232, 190], [25, 95, 165]], dtype=float)
REMOVED, HATCH, NOT_FINITE = (226, 226, 226), (178, 178, 178), (255, 0, 255)
BACKGROUND, INK = (255, 255, 255), (40, 40, 40)
LEFT, TOP, BOTTOM, MARGIN = 44, 44, 46, 12  # pixels around the map
LEGEND = 300  # pixels that the line under the map takes


def colour(p: float) -> tuple[int, int, int]:
    """RGB of P(open): dark red at 0, over a light yellow, to blue at 1."""
    if not math.isfinite(p):
        return NOT_FINITE
    place = 2 * min(max(p, 0.0), 1.0)
    i = min(int(place), 1)
    r, g, b = np.rint(COLOURS[i] + (COLOURS[i + 1] - COLOURS[i]) * (place - i)).astype(int).tolist()
    return r, g, b


def head_map(p_open: list[list[float | None]], title: str) -> np.ndarray:
    """Layers down, heads across, each head's P(open) as a colour; removed heads grey and hatched.

    Args:
        p_open: by layer and head; None for a head that is no longer in the weights.
        title: the line above.

    Returns:
        RGB, uint8 [height, width, 3].
    """
    n_layers, n_heads = len(p_open), max(map(len, p_open), default=0)
    cell = cell_size(n_layers, n_heads)
    width = max(LEFT + n_heads * cell + MARGIN, LEGEND + 2 * MARGIN)
    height = TOP + n_layers * cell + BOTTOM
    image = Image.new("RGB", (width, height), BACKGROUND)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default()
    draw.text((MARGIN, 6), title, INK, font)
    every = -(-20 // cell)  # so that numbers do not run into each other
    for head in range(0, n_heads, every):
        draw.text((LEFT + (head + 0.5) * cell, TOP - 4), str(head), INK, font, anchor="ms")
    hatch = _hatch(cell)
    for layer, row in enumerate(p_open):
        y = TOP + layer * cell
        if layer % every == 0:
            draw.text((LEFT - 6, y + cell / 2), f"L{layer}", INK, font, anchor="rm")
        for head, p in enumerate(row):
            x = LEFT + head * cell
            if p is None:
                image.paste(hatch, (x, y))
            else:
                draw.rectangle((x, y, x + cell - 2, y + cell - 2), colour(p))
    _legend(image, draw, font, height - BOTTOM + 20)
    return np.array(image)


def cell_size(n_layers: int, n_heads: int) -> int:
    """Pixels of a head, the line between heads included: smaller in large models."""
    return min(max(640 // max(n_layers, n_heads, 1), 8), 28)


def _hatch(cell: int) -> Image.Image:
    """What stands in the place of a removed head."""
    side = cell - 1
    rows, columns = np.mgrid[:side, :side]
    stripes = (rows + columns) % 6 < 2
    return Image.fromarray(np.where(stripes[..., None], HATCH, REMOVED).astype(np.uint8))


def _legend(
    image: Image.Image,
    draw: ImageDraw.ImageDraw,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
    y: int,
) -> None:
    x = MARGIN
    draw.text((x, y + 6), "closed", INK, font, anchor="lm")
    for i in range(80):
        draw.line((x + 44 + i, y, x + 44 + i, y + 12), colour(i / 79))
    draw.text((x + 130, y + 6), "open: P(open)", INK, font, anchor="lm")
    image.paste(_hatch(14), (x + 226, y))
    draw.text((x + 245, y + 6), "removed", INK, font, anchor="lm")
