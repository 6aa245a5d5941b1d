"""The fused attention core: exact, forward and backward, without a [T, S + P] matrix.

Shapes: B batch, T queries, M memory positions, S = M + T content keys, P persistent vectors,
N heads, H head width, X = B * T queries of all sequences; in tiles R rows (queries), K keys.

How it is computed, and why so (measured on two cores, `tools/benchmark.py`):

* Scores are built in tiles that fit the second-level cache, with `bmm` into scratch: at H = 32 the
  product then runs near the machine's peak, and exp and multiply never leave the cache.
* A softmax needs its maximum only where exp would overflow or vanish. So exp of the raw score is
  used, the content and the persistent part merge by adding numerators and denominators, and no
  maximum or subtraction pass is needed. Each row's sum shows afterwards whether that was safe
  (`_SAFE_SUM`); if not, another pass finds the rows' maxima and all is done again with them.
* The backward pass uses the unnormalised exp(s) too: 1/Z goes into the output's gradient, and the
  softmax's row correction is one more column of that gradient against a column of ones in V, so the
  product itself gives dP - delta. What is left elementwise is one exp and one multiply a score.
* The relative shift is a view: [R, K + 1] position scores, written row after row and read with row
  length K from element R - 1 on, are the shifted [R, K] scores. Their gradient goes back that way.

Where there is a C++ compiler, float32 and bfloat16 on the CPU take the same tiles compiled
(`fused_cpu.cpp`, built by `kernel.py`); what is here serves float64, GPUs and everyone else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from allattn.model import kernel
from allattn.model.tiles import (
    Scores,
    Scratch,
    content_tiles,
    flash_kernel,
    flash_kernel_works,
    persistent_tiles,
    queries_first,
    shifted,
)

# A row whose sum of exp(score) lies between these has a largest term that is neither near overflow
# nor so small that its neighbours would be denormal (float32 and bfloat16 reach 1e-38 to 3e38).
_SAFE_SUM = (1e-20, 1e20)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not annotate it
def fused_attention(
    q_BTNH: Tensor,
    kv_2BNSH: Tensor,
    r_NSH: Tensor,
    u_NH: Tensor,
    w_NH: Tensor,
    Kp_NPH: Tensor,
    Vp_NPH: Tensor,
    c_N: Tensor | None = None,
    window: int | None = None,
    padding: list[int] | None = None,
) -> Tensor:
    """Attention over content and persistent vectors together.

    Args:
        q_BTNH: queries.
        kv_2BNSH: keys and values of the M = S - T memory positions, then of the T positions.
        r_NSH: projected position vectors by falling distance S-1, ..., 0.
        u_NH: content bias (added to the query against k).
        w_NH: position bias (added to the query against r).
        Kp_NPH: persistent keys sqrt(H) Kp'. P may be 0.
        Vp_NPH: persistent values sqrt(P) Vp'.
        c_N: what is added to each head's persistent scores, or None.
        window: a query sees keys at most this far back; None: no limit.
        padding: how many of the first memory keys each sequence must not see (0 to M), or None.

    Returns:
        heads_BTNH, contiguous.
    """
    assert padding is None or max(padding) <= kv_2BNSH.shape[3] - q_BTNH.shape[1]
    with torch.autocast(q_BTNH.device.type, enabled=False):
        dtype = q_BTNH.dtype
        small = (u_NH, w_NH, Kp_NPH, Vp_NPH, c_N)
        operands = (q_BTNH, kv_2BNSH.to(dtype), r_NSH.to(dtype))
        if q_BTNH.device.type == "cpu" and dtype in kernel.DTYPES and kernel.load()[0] is not None:
            wide = (x if x is None else x.float() for x in small)
            out: Tensor = _CompiledAttention.apply(*operands, *wide, window, padding)
            return out
        same = (x if x is None else x.to(dtype) for x in small)
        out = _FusedAttention.apply(*operands, *same, window, padding)
        return out


class _Context(Protocol):
    """What autograd hands to both passes, with what we keep on it."""

    window: int | None
    padding: list[int] | None
    saved_tensors: tuple[Any, ...]  # None where None was saved

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _CompiledAttention(torch.autograd.Function):
    """`_FusedAttention` compiled: the same tiles and the same equation, see `fused_cpu.cpp`."""

    @staticmethod
    def forward(
        ctx: _Context,
        q: Tensor,
        kv: Tensor,
        r: Tensor,
        u: Tensor,
        w: Tensor,
        Kp: Tensor,
        Vp: Tensor,
        c: Tensor | None,
        window: int | None,
        padding: list[int] | None,
    ) -> Tensor:
        compiled = kernel.load()[0]
        assert compiled is not None, "the caller has seen it"
        out, rest, lse = compiled.forward(q, kv, r, u, w, Kp, Vp, c, window, padding)
        ctx.save_for_backward(out, rest, lse, q, kv, r, u, w, Kp, Vp, c)
        ctx.window, ctx.padding = window, padding
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        compiled = kernel.load()[0]
        assert compiled is not None, "the forward pass used it"
        out, rest, lse, q, kv, r, u, w, Kp, Vp, c = ctx.saved_tensors
        grads = compiled.backward(
            grad_BTNH, out, rest, lse, q, kv, r, u, w, Kp, Vp, c, ctx.window, ctx.padding
        )
        return *grads, None, None


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        q: Tensor,
        kv: Tensor,
        r: Tensor,
        u: Tensor,
        w: Tensor,
        Kp: Tensor,
        Vp: Tensor,
        c: Tensor | None,
        window: int | None,
        padding: list[int] | None,
    ) -> Tensor:
        k, v = kv
        scores = Scores(q, k, r, u, w, Kp, c)
        out_NXH, sum_NX1 = _accumulate(scores, v, Vp, q.shape[1], window, padding)
        # float16 ends at 65504: there the maximum is always needed
        safe = q.dtype != torch.float16 and (
            _SAFE_SUM[0] < float(sum_NX1.min()) and float(sum_NX1.max()) < _SAFE_SUM[1]
        )
        if not safe:
            scores.shift_NX1 = _row_maximum(scores, q.shape[1], window, padding)
            out_NXH, sum_NX1 = _accumulate(scores, v, Vp, q.shape[1], window, padding)
        out = q.new_empty(q.shape)
        queries_first(out).copy_(out_NXH.div_(sum_NX1))
        # in the accumulators' precision: delta in the backward pass is a small difference
        ctx.save_for_backward(q, kv, r, u, w, Kp, Vp, c, out_NXH, sum_NX1, scores.shift_NX1)
        ctx.window, ctx.padding = window, padding
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_BTNH: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, r, u, w, Kp, Vp, c, out_NXH, sum_NX1, shift_NX1 = ctx.saved_tensors
        (k, v), (B, T, N, H), S, P = kv, q.shape, kv.shape[3], Kp.shape[1]
        X = B * T
        scores = Scores(q, k, r, u, w, Kp, c)
        scores.shift_NX1 = shift_NX1
        persistent_shift_NX1 = scores.persistent_shift()
        scratch = scores.scratch

        # g = [dO / Z, -rowsum(dO / Z * O)]: against [V, 1] it gives (dP - delta) / Z at once.
        # In half precision delta takes two columns, its rounded value and the rest.
        n_delta = 1 if q.dtype == sum_NX1.dtype else 2
        g_NXG = scratch("g", N, X, H + n_delta)
        g_NXH = g_NXG[:, :, :H]
        wide = Scratch(sum_NX1)
        g = torch.div(queries_first(grad_BTNH), sum_NX1, out=wide("wide g", N, X, H))
        g_NXH.copy_(g)
        delta_NX = torch.linalg.vecdot(g, out_NXH).neg_()
        for i in range(n_delta):
            g_NXG[:, :, H + i] = delta_NX
            delta_NX -= g_NXG[:, :, H + i]

        dq_NXH = wide("dq total", N, X, H)
        if not P:
            dq_NXH.zero_()
        dKp, dVp = Kp.new_empty(Kp.shape), Vp.new_empty(Vp.shape)
        dc_N = None if c is None else sum_NX1.new_zeros(N)
        Vp_NPG = scratch("Vp", N, P, H + n_delta)
        Vp_NPG[:, :, H:] = 1
        Vp_NPG[:, :, :H] = Vp
        for heads, cols, n_rows in persistent_tiles(X, N, P, scores.tile):
            # Transposed scores [heads, P, R]: then neither product that sums over the queries (dV,
            # dK) has a transposed left operand, which oneDNN is slow at.
            Kp_t, Vp_t = Kp[heads, cols], Vp_NPG[heads, cols]
            dKp_t, dVp_t = scratch("dKp", *Kp_t.shape).zero_(), scratch("dVp", *Kp_t.shape).zero_()
            q_heads, g_heads = scores.q_NXH[heads], g_NXG[heads]
            for i, (q_t, qT_t, g_t, gT_t, dq_t) in enumerate(
                zip(
                    q_heads.split(n_rows, 1),
                    q_heads.transpose(1, 2).split(n_rows, 2),
                    g_heads[:, :, :H].split(n_rows, 1),
                    g_heads.transpose(1, 2).split(n_rows, 2),
                    dq_NXH[heads].split(n_rows, 1),
                    strict=True,
                )
            ):
                p = torch.bmm(Kp_t, qT_t, out=scratch("p", *Kp_t.shape[:2], q_t.shape[1]))
                if persistent_shift_NX1 is not None:
                    rows = slice(i * n_rows, i * n_rows + p.shape[2])
                    p.sub_(persistent_shift_NX1[heads, rows].transpose(1, 2))
                p.exp_()
                dVp_t.baddbmm_(p, g_t)
                ds = torch.bmm(Vp_t, gT_t, out=scratch("ds", *p.shape)).mul_(p)
                dKp_t.baddbmm_(ds, q_t)
                if dc_N is not None:
                    dc_N[heads] += ds.sum((1, 2), dtype=dc_N.dtype)
                part = torch.bmm(ds.transpose(1, 2), Kp_t, out=scratch("dq", *q_t.shape))
                if cols.start == 0:
                    dq_t.copy_(part)
                else:
                    dq_t.add_(part)
            dKp[heads, cols] = dKp_t
            dVp[heads, cols] = dVp_t

        dqu_NXH, dqw_NXH = wide("dqu", N, X, H), wide("dqw", N, X, H)
        # laid out as one projection gives them, so that its backward copies nothing
        dkv = kv.new_empty(B, S, 2, N, H).permute(2, 0, 3, 1, 4)
        dr_NHS1 = sum_NX1.new_zeros(N, H, S + 1)
        v_BNSG = scratch("v", B, N, S, H + n_delta)
        v_BNSG[..., H:] = 1
        v_BNSG[..., :H] = v
        r_NS1H = scores.r_NHS1.transpose(1, 2)
        dk_NSH, dv_NSH = wide("dk", N, S, H), wide("dv", N, S, H)
        for t in content_tiles(B, T, S, N, ctx.window, ctx.padding):
            if t.rows.start == t.b * T:
                dk_NSH.zero_()
                dv_NSH.zero_()
            p = scores.exp_content(t)
            part = scratch("dkv", N, t.K, H)
            dv_NSH[:, t.keys].add_(torch.bmm(p.transpose(1, 2), g_NXH[:, t.rows], out=part))
            ds = torch.bmm(
                g_NXG[:, t.rows],
                v_BNSG[t.b, :, t.keys].transpose(1, 2),
                out=scratch("ds", *p.shape),
            )
            ds.mul_(p)
            # The shifted scores' gradient, put back where the position scores stood. What the view
            # does not cover (the first R - 1 elements and the last) has no gradient.
            ds_NRK1 = scratch("position", N, t.R, t.K + 1)
            uncovered = ds_NRK1.view(N, -1)
            uncovered[:, : t.R - 1] = 0
            uncovered[:, -1] = 0
            shifted(ds_NRK1).copy_(ds)
            dk_NSH[:, t.keys].add_(
                torch.bmm(ds.transpose(1, 2), scores.qu_NXH[:, t.rows], out=part)
            )
            part = scratch("dq", N, t.R, H)
            dqu_NXH[:, t.rows] = torch.bmm(ds, k[t.b, :, t.keys], out=part)
            dqw_NXH[:, t.rows] = torch.bmm(ds_NRK1, r_NS1H[:, S - t.K :], out=part)
            part = scratch("dr", N, H, t.K + 1)
            dr_NHS1[:, :, S - t.K :].add_(
                torch.bmm(scores.qw_NXH[:, t.rows].transpose(1, 2), ds_NRK1, out=part)
            )
            if t.rows.stop == (t.b + 1) * T:
                dkv[0, t.b] = dk_NSH
                dkv[1, t.b] = dv_NSH

        scale = 1 / math.sqrt(H)
        du, dw = (dq.sum(1).mul_(scale).to(u.dtype) for dq in (dqu_NXH, dqw_NXH))
        dq = q.new_empty(q.shape)
        queries_first(dq).copy_(dq_NXH.add_(dqu_NXH).add_(dqw_NXH).mul_(scale))
        dr = dr_NHS1[:, :, :S].transpose(1, 2).to(r.dtype)
        dc = None if dc_N is None else dc_N.to(c.dtype)
        return dq, dkv, dr, du, dw, dKp, dVp, dc, None, None


def _row_sum(p_NRK: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, R, 1]: the sum over each row, in `dtype`.

    `sum(dtype=float32)` of bfloat16 first copies all of it to float32. Instead, add up short pieces
    (each in float32 inside, then rounded), and those in float32.
    """
    if p_NRK.dtype == dtype:
        return p_NRK.sum(-1, keepdim=True)
    pieces = [piece.sum(-1) for piece in p_NRK.split(-(-p_NRK.shape[-1] // 8), -1)]
    return torch.stack(pieces, -1).sum(-1, keepdim=True, dtype=dtype)


def _accumulate(
    scores: Scores, v: Tensor, Vp: Tensor, T: int, window: int | None, padding: list[int] | None
) -> tuple[Tensor, Tensor]:
    """Numerator [N, X, H] and denominator [N, X, 1] of the softmax average over both parts."""
    N, X, H = scores.q_NXH.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    out_NXH = scores.q_NXH.new_zeros(N, X, H, dtype=dtype)
    sum_NX1 = scores.q_NXH.new_zeros(N, X, 1, dtype=dtype)
    half_on_cpu = v.element_size() < 4 and v.device.type == "cpu"
    if half_on_cpu and Vp.shape[1] > 0 and flash_kernel_works():
        # In half precision PyTorch's flash kernel is the fastest forward (not so its backward),
        # with a float32 softmax. The batch folds into the queries: all sequences share these keys.
        part, lse_NX = flash_kernel(scores.q_NXH, scores.Kp_NPH, Vp)
        lse_NX1, shift_NX1 = lse_NX.unsqueeze(-1), scores.persistent_shift()
        torch.exp(lse_NX1 if shift_NX1 is None else lse_NX1 - shift_NX1, out=sum_NX1)
        torch.mul(part, sum_NX1, out=out_NXH)
        tiles: Iterable[tuple[slice, slice, int]] = ()
    else:
        # one tile of scores at a time here, two in the backward pass: it may be twice as large
        tiles = persistent_tiles(X, N, Vp.shape[1], 2 * scores.tile)
    for heads, cols, n_rows in tiles:
        KpT, Vp_tile = scores.KpT_NHP[heads, :, cols], Vp[heads, cols]
        for i, (q_t, out_t, sum_t) in enumerate(
            zip(*(x[heads].split(n_rows, 1) for x in (scores.q_NXH, out_NXH, sum_NX1)), strict=True)
        ):
            p = scores.exp_persistent(heads, q_t, KpT, i * n_rows)
            sum_t.add_(p.sum(-1, keepdim=True))
            out_t.add_(torch.bmm(p, Vp_tile, out=scores.scratch("out", *q_t.shape)))
    for t in content_tiles(X // T, T, v.shape[2], N, window, padding):
        p = scores.exp_content(t)
        sum_NX1[:, t.rows].add_(_row_sum(p, dtype))
        part = scores.scratch("out", N, t.R, H)
        out_NXH[:, t.rows].add_(torch.bmm(p, v[t.b, :, t.keys], out=part))
    return out_NXH, sum_NX1


def _row_maximum(scores: Scores, T: int, window: int | None, padding: list[int] | None) -> Tensor:
    """[N, X, 1]: each row's largest visible score."""
    N, X, _ = scores.q_NXH.shape
    P, S = scores.Kp_NPH.shape[1], scores.k.shape[2]
    largest_NX = scores.q_NXH.new_full((N, X), float("-inf"))
    for heads, cols, n_rows in persistent_tiles(X, N, P, scores.tile):
        for q_t, largest_t in zip(
            scores.q_NXH[heads].split(n_rows, 1), largest_NX[heads].split(n_rows, 1), strict=True
        ):
            largest = scores.persistent(q_t, scores.KpT_NHP[heads, :, cols]).amax(-1)
            if scores.c_N is not None:
                largest += scores.c_N[heads, None]
            torch.maximum(largest_t, largest, out=largest_t)
    for t in content_tiles(X // T, T, S, N, window, padding):
        s = scores.content(t)
        ones = torch.ones(1, t.R, t.K, dtype=torch.bool, device=s.device)
        hidden = t.hide_(ones).logical_not_()
        largest_t = largest_NX[:, t.rows]
        torch.maximum(largest_t, s.masked_fill_(hidden, float("-inf")).amax(-1), out=largest_t)
    return largest_NX.unsqueeze(-1)
