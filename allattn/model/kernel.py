"""`fused_cpu.cpp`, compiled for this machine on first use, and its two passes as functions.

The library is plain C without a PyTorch header: it compiles in seconds, and one build serves every
PyTorch. Shapes: as in `fused.py`.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from allattn.model.build import SECONDS, build

DTYPES = (torch.float32, torch.bfloat16)


class _Shape(ctypes.Structure):
    """As in `fused_cpu.cpp`."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("B", "T", "S", "N", "H", "P", "window")),
        ("padding", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("b_parts", "t_parts", "threads")),
        *((name, ctypes.c_long) for name in ("q_b", "q_t", "q_n", "k_b", "k_n", "k_s")),
        *((name, ctypes.c_long) for name in ("r_n", "r_s", "kp_n", "kp_p", "kp_h", "vp_n", "vp_p")),
        *((name, ctypes.c_long) for name in ("g_b", "g_t", "g_n", "dk_part", "dk_b", "dk_n")),
        *((name, ctypes.c_long) for name in ("dk_s", "half", "dkv_half")),
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "k", "v", "r", "u", "w", "Kp", "Vp", "c", "out")
        ),
        *((name, ctypes.c_void_p) for name in ("rest", "lse", "grad", "dq", "dk", "dv", "dr")),
        *((name, ctypes.c_void_p) for name in ("du", "dw", "dKp", "dVp", "dc")),
    ]


class Kernel:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError where it is not what it should be."""
        library = ctypes.CDLL(str(path))
        self._forward, self._backward = library.forward, library.backward
        for function in (self._forward, self._backward):
            function.argtypes, function.restype = [ctypes.POINTER(_Shape)], None

    def forward(
        self,
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
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """heads_BTNH, what rounding it to bfloat16 lost, and log2 of the rows' sums, [N, B, T].

        q, kv and r are float32 or bfloat16, the others float32; c may be None.
        """
        B, T, N, _ = q.shape
        out = q.new_empty(q.shape)
        rest = None if q.dtype == torch.float32 else torch.empty_like(out)
        lse_NBT = torch.empty(N, B, T)
        shape, _keep = _shape(q, kv, r, u, w, Kp, Vp, c, window, padding)
        shape.out, shape.lse = out.data_ptr(), lse_NBT.data_ptr()
        shape.rest = None if rest is None else rest.data_ptr()
        self._forward(shape)
        return out, rest, lse_NBT

    def backward(
        self,
        grad: Tensor,
        out: Tensor,
        rest: Tensor | None,
        lse_NBT: Tensor,
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
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, kv, r, u, w, Kp, Vp, c; kv's laid out as one projection gives it."""
        (B, _, N, H), S, P = q.shape, kv.shape[3], Kp.shape[1]
        shape, _keep = _shape(q, kv, r, u, w, Kp, Vp, c, window, padding)
        parts = shape.b_parts * shape.t_parts
        grad = _last_dense(grad.to(q.dtype))
        shape.g_b, shape.g_t, shape.g_n, _ = grad.stride()
        dq = q.new_empty(q.shape)
        dkv_dtype = q.dtype if shape.t_parts == 1 else torch.float32
        dkv = torch.empty(shape.t_parts, B, S, 2, N, H, dtype=dkv_dtype)
        shape.dkv_half = dkv.dtype == torch.bfloat16
        shape.dk_part, shape.dk_b, shape.dk_s, _, shape.dk_n, _ = dkv.stride()
        dr, du, dw = (torch.empty(parts, *x, N, H) for x in ((S,), (), ()))
        dKp, dVp = torch.empty(parts, N, P, H), torch.empty(parts, N, P, H)
        dc = torch.empty(parts, N)
        shape.grad, shape.out, shape.lse = grad.data_ptr(), out.data_ptr(), lse_NBT.data_ptr()
        shape.rest = None if rest is None else rest.data_ptr()
        shape.dq, shape.dk, shape.dv = dq.data_ptr(), dkv.data_ptr(), dkv[:, :, :, 1].data_ptr()
        shape.dr, shape.du, shape.dw = dr.data_ptr(), du.data_ptr(), dw.data_ptr()
        shape.dKp, shape.dVp = dKp.data_ptr(), dVp.data_ptr()
        shape.dc = None if c is None else dc.data_ptr()
        self._backward(shape)
        dkv, dr, du, dw, dKp, dVp, dc = (
            x[0] if x.shape[0] == 1 else x.sum(0) for x in (dkv, dr, du, dw, dKp, dVp, dc)
        )
        dkv = dkv.to(q.dtype).permute(2, 0, 3, 1, 4)
        dc = None if c is None else dc
        return dq, dkv, dr.transpose(0, 1).to(r.dtype), du, dw, dKp, dVp, dc


def _last_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(
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
) -> tuple[_Shape, list[object]]:
    """What the library is told of the operands, and what must live as long as that is in use."""
    q, kv, r, Vp = (_last_dense(x) for x in (q, kv, r, Vp))
    u, w = u.contiguous(), w.contiguous()
    c = None if c is None else c.contiguous()
    B, T, N, H = q.shape
    S, threads = kv.shape[3], torch.get_num_threads()
    hidden = None if padding is None else (ctypes.c_long * B)(*padding)
    # As many items for every thread. Cutting the batch costs copies of some gradients, cutting
    # sequences of more.
    parts = threads // math.gcd(N, threads)
    b_parts = min(parts, B)
    t_parts = min(-(-parts // b_parts), T)
    shape = _Shape(
        *(B, T, S, N, H, Kp.shape[1], -1 if window is None else window),
        None if hidden is None else ctypes.addressof(hidden),
        *(b_parts, t_parts, threads),
        *q.stride()[:3],
        *(kv.stride(1), kv.stride(2), kv.stride(3)),
        *r.stride()[:2],
        *Kp.stride(),
        *Vp.stride()[:2],
        half=q.dtype == torch.bfloat16,
        q=q.data_ptr(),
        k=kv[0].data_ptr(),
        v=kv[1].data_ptr(),
        r=r.data_ptr(),
        u=u.data_ptr(),
        w=w.data_ptr(),
        Kp=Kp.data_ptr(),
        Vp=Vp.data_ptr(),
        c=None if c is None else c.data_ptr(),
    )
    return shape, [q, kv, r, u, w, Vp, c, hidden]


@cache
def load() -> tuple[Kernel | None, str]:
    """The kernel, or None, and the reason in words; built and tried once a process."""
    try:
        kernel = Kernel(build(Kernel))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return None, f"no compiled kernel: {_in_a_line(error)}"
    wrong = _self_check(kernel)
    return (None, f"no compiled kernel: {wrong}") if wrong else (kernel, "compiled kernel")


def what_is_wrong(path: Path) -> str | None:
    """Why a compiled library cannot be used, in one line; None where it can be."""
    try:
        return _self_check(Kernel(path))
    except (OSError, AttributeError) as error:
        return _in_a_line(error)


def _in_a_line(error: Exception) -> str:
    """What a person can act on."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if "error" in line]
        return f"the compiler failed: {(lines or ['no message'])[0].strip()}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the compiler took more than {SECONDS} s"
    return str(error).splitlines()[0]


def _self_check(kernel: Kernel) -> str | None:
    """What is wrong with it, by comparison with the equation in float64; None: nothing."""
    generator = torch.Generator().manual_seed(0)
    B, T, M, N, H, P = 2, 15, 7, 3, 5, 19
    S = M + T

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    operands = [random(B, T, N, H), random(2, B, N, S, H), random(N, S, H)]
    operands += [random(N, H), random(N, H), random(N, P, H), random(N, P, H)]
    operands += [random(N)]
    grad = random(B, T, N, H)
    with torch.enable_grad():
        exact = [x.double().requires_grad_() for x in operands]
        wanted = equation(*exact)
        grads = torch.autograd.grad(wanted, exact, grad.double())
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        rounded = [x.to(dtype) for x in operands[:3]] + operands[3:]
        out, rest, lse = kernel.forward(*rounded, None, None)
        actual = kernel.backward(grad, out, rest, lse, *rounded, None, None)
        for a, b in zip([out, *actual], [wanted.detach(), *grads], strict=True):
            error = float((a.double() - b).norm() / b.norm())
            if not error < limit:
                return f"its self-check fails: an error of {error:.2g} in {dtype}"
    return None


def equation(
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
    """heads_BTNH by the letter, position by position: what the kernel is compared with."""
    k, v = kv_2BNSH
    T, S = q_BTNH.shape[1], k.shape[2]
    q_BNTH = q_BTNH.transpose(1, 2)
    i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
    r_NTSH = r_NSH[:, (S - 1 - (i - j)).clamp(max=S - 1)]
    content = (q_BNTH + u_NH[:, None]) @ k.transpose(2, 3)
    position = torch.einsum("bnth,ntsh->bnts", q_BNTH + w_NH[:, None], r_NTSH)
    hidden = j > i if window is None else (j > i) | (j < i - window)
    if padding is not None:
        hidden = hidden | (j < torch.tensor(padding)[:, None, None, None])
    scores = (content + position).masked_fill(hidden, float("-inf"))
    scale = q_BTNH.shape[3] ** -0.5
    persistent = q_BNTH @ Kp_NPH.transpose(1, 2) * scale
    if c_N is not None:
        persistent = persistent + c_N[:, None, None]
    weights = torch.cat([scores * scale, persistent], -1).softmax(-1)
    return (weights[..., :S] @ v + weights[..., S:] @ Vp_NPH).transpose(1, 2)
