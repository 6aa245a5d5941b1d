"""Relative positions: one vector for each distance between a query and a key."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


def sinusoids(distances: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal vectors of distances (Dai et al. 2019, section 3.3; sines first, then cosines).

    Args:
        distances: [S], any number type.
        d_model: width D, even.
        dtype: of the result.

    Returns:
        [S, D].
    """
    # float64 inside: at distances of thousands float32 angles are off in the fourth digit
    even = torch.arange(0, d_model, 2, device=distances.device, dtype=torch.float64)
    angles = distances.to(torch.float64)[:, None] / 10000.0 ** (even / d_model)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def falling_distances(n_keys: int, clamp_len: int | None, device: torch.device) -> Tensor:
    """Distances n_keys-1, ..., 1, 0, none above `clamp_len`: [n_keys]."""
    distances = torch.arange(n_keys - 1, -1, -1, device=device)
    return distances if clamp_len is None else distances.clamp(max=clamp_len)


def shift_by_query(scores: Tensor) -> Tensor:
    """From a column for each distance to a column for each key (Dai et al. 2019, appendix B).

    Args:
        scores: [..., T, S]; column c of row i belongs to distance S-1-c.

    Returns:
        [..., T, S]; column j of row i belongs to key j, whose distance is (S-T)+i-j. Entries of
        keys after the query hold values of other rows: mask them.
    """
    T, S = scores.shape[-2:]
    padded = torch.nn.functional.pad(scores, (1, 0)).flatten(-2)
    # cut into rows of S after T entries, every row starts one later than the last
    shifted: Tensor = padded.narrow(-1, T, T * S).unflatten(-1, (T, S))
    return shifted


class Visible:
    """Which of the M + T keys each of the T queries (the last T positions) sees.

    A query sees itself and what lies before it; with a window no further back than that; and never
    the first positions of a sequence that are padding. It always sees itself, so that a row of
    padding has something to attend to.
    """

    def __init__(
        self, T: int, M: int, window: int | None, padding_B: Tensor | None, device: torch.device
    ):
        """For T queries after M positions.

        Args:
            T: number of queries.
            M: positions before them.
            window: with `same_length`, how far back a query sees; None: all the way.
            padding_B: how many of the first positions of each sequence are empty; None: none.
            device: of the mask.
        """
        self.T, self.M, self.window, self.device = T, M, window, device
        self.padding_B = padding_B

    @cached_property
    def padding(self) -> list[int] | None:
        """The padding as numbers."""
        return None if self.padding_B is None else self.padding_B.tolist()

    @cached_property
    def mask(self) -> Tensor | None:
        """Boolean [1 or B, 1, T, M + T], true where visible; None where everything is."""
        T, M, window = self.T, self.M, self.window
        if T == 1 and self.padding_B is None and (window is None or window >= M):
            return None
        query = torch.arange(M, M + T, device=self.device)[:, None]
        key = torch.arange(M + T, device=self.device)[None, :]
        visible = key <= query
        if window is not None:
            visible &= query - key <= window
        if self.padding_B is None:
            return visible[None, None]
        filled = key >= self.padding_B.to(self.device).view(-1, 1, 1)
        return ((visible & filled) | (key == query)).unsqueeze(1)
