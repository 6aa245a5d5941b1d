"""Scores in tiles that stay in the cache: which there are, how one is computed (see `fused.py`).

Shapes: as in `fused.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

# Elements of one score tile over all its heads: 1 MiB of float32. The backward pass has two such
# tiles, which leaves room in two 2 MiB second-level caches for the operands.
_TILE = 256 * 1024
_MAX_COLUMNS = 1024  # of a persistent tile
_MAX_ROWS = 128  # of a content tile: shorter tiles leave out more of what the mask hides


def persistent_tiles(
    n_queries: int, N: int, P: int, tile: int
) -> Iterator[tuple[slice, slice, int]]:
    """(heads, persistent vectors, queries in a tile) for each group of heads and vectors."""
    if P == 0:
        return
    n_cols = -(-P // -(-P // _MAX_COLUMNS))
    for n in range(0, N, 2):  # bmm splits over heads: one a core, and an odd last one over both
        heads = slice(n, min(n + 2, N))
        n_rows = max(16, tile // ((heads.stop - n) * n_cols))
        n_rows = -(-n_queries // -(-n_queries // n_rows))  # equal tiles rather than a short last
        for p in range(0, P, n_cols):
            yield heads, slice(p, min(p + n_cols, P)), n_rows


@dataclass(frozen=True)
class ContentTile:
    """Queries i0 to i0 + R - 1 of sequence b and its keys j0 to j0 + K - 1, the last query's."""

    b: int
    rows: slice  # in the B * T queries
    keys: slice
    R: int
    K: int
    first_key: int | None  # row t sees keys from first_key + t on, or all: None

    def hide_(self, p_NRK: Tensor) -> Tensor:
        """Zeroes, in place, what the mask hides in a tile of exp(score)."""
        if self.R > 1:
            p_NRK[:, :, self.K - self.R :].tril_()
        if self.first_key is not None and self.first_key + self.R > 1:
            p_NRK[:, :, : self.first_key + self.R - 1].triu_(self.first_key)
        return p_NRK


def content_tiles(
    B: int, T: int, S: int, N: int, window: int | None, padding: list[int] | None
) -> Iterator[ContentTile]:
    """Keys that no query of a tile may see are left out of it."""
    M = S - T
    n_rows = min(_MAX_ROWS, max(16, _TILE // (N * S)))
    n_rows = -(-T // -(-T // n_rows))
    for b in range(B):
        for i0 in range(0, T, n_rows):
            R = min(n_rows, T - i0)
            j0 = 0 if padding is None else padding[b]
            first_key = None
            if window is not None:
                first_key = M + i0 - window
                j0 = max(j0, first_key)
                first_key -= j0
            j1 = M + i0 + R
            yield ContentTile(
                b, slice(b * T + i0, b * T + i0 + R), slice(j0, j1), R, j1 - j0, first_key
            )


class Scratch:
    """Named buffers of this thread, kept from call to call, each as large as was ever asked for.

    Fresh memory costs a page fault for every 4 KiB, more than most of what is done with it here.
    """

    _threads = threading.local()

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None) -> None:
        """Buffers of a tensor's device, and its type or another."""
        self._dtype, self._device = dtype or like.dtype, like.device
        buffers = self._threads.__dict__.setdefault("buffers", {})
        self._flat: dict[str, Tensor] = buffers.setdefault((self._dtype, self._device), {})

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A buffer of this name and shape, with whatever was left in it."""
        n = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < n:
            flat = self._flat[name] = torch.empty(n, dtype=self._dtype, device=self._device)
        return flat[:n].view(shape)


def shifted(position_NRK1: Tensor) -> Tensor:
    """The [N, R, K] view in which row i, column j of the position scores is distance K - R + i - j.

    Elements in the future (j > K - R + i) are those of the next row: finite, for the mask to hide.
    """
    N, R, K1 = position_NRK1.shape
    return position_NRK1.view(N, R * K1)[:, R - 1 : -1].view(N, R, K1 - 1)


def queries_first(x_BTNH: Tensor) -> Tensor:
    """[N, B*T, H] view."""
    return x_BTNH.flatten(0, 1).transpose(0, 1)


class Scores:
    """The operands of both passes, and exp(score - shift) tile by tile.

    Returned tiles live in scratch: the next call overwrites them.
    """

    def __init__(
        self, q: Tensor, k: Tensor, r: Tensor, u: Tensor, w: Tensor, Kp: Tensor, c: Tensor | None
    ) -> None:
        (B, T, N, H), S = q.shape, k.shape[2]
        scale = 1 / math.sqrt(H)
        self.scratch = Scratch(q)
        self.k = k
        shape = (N, B * T, H)
        self.q_NXH = torch.mul(queries_first(q), scale, out=self.scratch("q", *shape))
        self.qu_NXH, self.qw_NXH = self.scratch("qu", *shape), self.scratch("qw", *shape)
        torch.add(self.q_NXH, (u * scale).unsqueeze(1), out=self.qu_NXH)
        torch.add(self.q_NXH, (w * scale).unsqueeze(1), out=self.qw_NXH)
        self.Kp_NPH, self.c_N = Kp, c
        # by falling distance S-1 .. 0, then a zero column: the future
        self.r_NHS1 = self.scratch("r", N, H, S + 1)
        self.r_NHS1[:, :, S] = 0
        self.r_NHS1[:, :, :S] = r.transpose(1, 2)
        self.shift_NX1: Tensor | None = None
        # oneDNN's half-precision products cost more to start and less to run: larger tiles
        self.tile = _TILE if q.element_size() >= 4 else 4 * _TILE

    @cached_property
    def KpT_NHP(self) -> Tensor:
        """For the forward pass alone; the copy is slow enough not to be made for nothing."""
        KpT_NHP = self.Kp_NPH.transpose(1, 2)
        if KpT_NHP.is_contiguous():  # as evaluation keeps it
            return KpT_NHP
        return self.scratch("KpT", *KpT_NHP.shape).copy_(KpT_NHP)

    def persistent(self, q_NRH: Tensor, KpT_NHP: Tensor) -> Tensor:
        """Scores of a persistent tile without their bias, [n, R, P]."""
        return torch.bmm(q_NRH, KpT_NHP, out=self.scratch("p", *q_NRH.shape[:2], KpT_NHP.shape[2]))

    def persistent_shift(self) -> Tensor | None:
        """What persistent scores are lowered by, [N, X, 1]: the shift less their bias, or None."""
        if self.c_N is None:
            return self.shift_NX1
        bias_N11 = self.c_N[:, None, None]
        if self.shift_NX1 is None:
            return -bias_N11.expand(*self.q_NXH.shape[:2], 1)
        return self.shift_NX1 - bias_N11

    def content(self, t: ContentTile) -> Tensor:
        """Scores of a content tile, nothing hidden yet, [N, R, K]."""
        N, S = self.r_NHS1.shape[0], self.k.shape[2]
        position = self.scratch("position", N, t.R, t.K + 1)
        torch.bmm(self.qw_NXH[:, t.rows], self.r_NHS1[:, :, S - t.K :], out=position)
        p = self.scratch("p", N, t.R, t.K)
        torch.bmm(self.qu_NXH[:, t.rows], self.k[t.b, :, t.keys].transpose(1, 2), out=p)
        return p.add_(shifted(position))

    def exp_persistent(
        self, heads: slice, q_NRH: Tensor, KpT_NHP: Tensor, first_row: int
    ) -> Tensor:
        """exp(score - shift) of a persistent tile."""
        p = self.persistent(q_NRH, KpT_NHP)
        shift_NX1 = self.persistent_shift()
        if shift_NX1 is not None:
            p.sub_(shift_NX1[heads, first_row : first_row + p.shape[1]])
        return p.exp_()

    def exp_content(self, t: ContentTile) -> Tensor:
        """exp(score - shift) of a content tile, 0 where hidden."""
        p = self.content(t)
        if self.shift_NX1 is not None:
            p.sub_(self.shift_NX1[:, t.rows])
        return t.hide_(p.exp_())


def flash_kernel(q_NXH: Tensor, k_NPH: Tensor, v_NPH: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's CPU kernel: output [N, X, H] and log-sum-exp [N, X]. Not a promised interface."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q_NXH[None], k_NPH[None], v_NPH[None], scale=1.0)
    return out[0], lse[0]


@cache
def flash_kernel_works() -> bool:
    """Whether this PyTorch has that kernel and it computes what is expected; tried once."""
    q, k, v = (torch.randn(2, n, 8, dtype=torch.bfloat16) for n in (3, 5, 5))
    scores = (q @ k.transpose(1, 2)).float()
    try:
        out, lse = flash_kernel(q, k, v)
        right = torch.allclose(lse.float(), scores.logsumexp(-1), atol=0.1)
        return right and torch.allclose(out.float(), scores.softmax(-1) @ v.float(), atol=0.1)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
