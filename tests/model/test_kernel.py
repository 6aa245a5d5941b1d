"""The compiled kernel: shapes that test_fused.py is too small for, and its build."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from killed import HANG

from allattn.model import kernel

SHAPES = [  # B, T, M, N, H, P, window, padding
    (2, 130, 100, 2, 32, 700, None, None),  # several tiles of queries and of vectors
    (1, 600, 100, 1, 16, 7, None, None),  # several of keys; one head of one sequence: it is cut
    (1, 700, 600, 2, 8, 0, 550, None),  # tiles that the window hides
    (3, 50, 33, 3, 64, 40, 30, [0, 5, 33]),
]


def operands(shape, scale=1.0):
    B, T, M, N, H, P, window, padding = shape
    q, grad = (torch.randn(B, T, N, H) for _ in range(2))
    kv = torch.randn(B, M + T, 2, N, H).permute(2, 0, 3, 1, 4)
    r = torch.randn(M + T, N, H).transpose(0, 1)
    rest = (torch.randn(N, H), torch.randn(N, H), torch.randn(N, P, H), torch.randn(N, P, H))
    bias = torch.randn(N) * scale
    return grad, [q * scale, kv, r, *rest, bias], window, padding


def loaded() -> kernel.Kernel:
    found, why = kernel.load()
    if found is None:
        pytest.skip(why)
    return found


def passes(grad, x, window, padding) -> list[torch.Tensor]:
    out, rest, lse = loaded().forward(*x, window, padding)
    return [out, *loaded().backward(grad, out, rest, lse, *x, window, padding)]


def in_float64(grad, x, window, padding) -> list[torch.Tensor]:
    exact = [a.double().requires_grad_() for a in x]
    out = kernel.equation(*exact, window, padding)
    return [out.detach(), *torch.autograd.grad(out, exact, grad.double(), allow_unused=True)]


def errors(actual, wanted) -> list[float]:
    pairs = [(a, b) for a, b in zip(actual, wanted, strict=True) if b is not None and b.numel()]
    # without persistent vectors their bias has no gradient at all
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_the_equation(shape, threads):
    torch.set_num_threads(threads)
    case = operands(shape)
    assert max(errors(passes(*case), in_float64(*case))) < 5e-6


def test_scores_in_the_hundreds_take_the_maxima():
    case = operands(SHAPES[3], scale=60.0)
    actual = passes(*case)
    assert all(torch.isfinite(x).all() for x in actual)
    # a score's own rounding, 500 * 6e-8, is the error of its exp
    assert max(errors(actual, in_float64(*case))) < 1e-3


def test_bfloat16_operands():
    grad, x, *mask = operands(SHAPES[0])
    rounded = [a.bfloat16() for a in x[:3]] + x[3:]
    grad = grad.bfloat16()
    assert max(errors(passes(grad, rounded, *mask), in_float64(grad, rounded, *mask))) < 0.02


def test_nan_is_not_hidden():
    grad, x, *mask = operands(SHAPES[0])
    x[0][1, 3, 1, 5] = float("nan")
    out = passes(grad, x, *mask)[0]
    assert out[1, 3, 1].isnan().all() and out.isnan().sum() == out.shape[-1]


def test_every_run_gives_the_same_bits():
    torch.set_num_threads(2)
    case = operands(SHAPES[1])
    first = passes(*case)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, passes(*case), strict=True))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache with nothing in it; `kernel.load` anew."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    yield tmp_path
    kernel.load.cache_clear()


def reason() -> str:
    kernel.load.cache_clear()
    found, why = kernel.load()
    assert found is None and "\n" not in why
    return why


def test_why_there_is_no_kernel(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in reason()
    failing = fresh / "failing"
    failing.write_text("#!/bin/sh\necho 'x.cpp:1: error: it is Monday' >&2\nexit 1\n")
    failing.chmod(0o700)
    monkeypatch.setenv("CXX", str(failing))
    assert "the compiler failed: x.cpp:1: error: it is Monday" in reason()
    failing.write_text('#!/bin/sh\nfor last; do :; done\necho junk > "$last"\n')
    assert "no compiled kernel" in reason()
    assert list((fresh / "allattn").iterdir()) == []  # nor is what was built there for the next


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    found = loaded()
    forward = found.forward

    def wrong(*args):
        out, *others = forward(*args)
        return out * 1.001, *others

    monkeypatch.setattr(found, "forward", wrong)
    assert "an error of 0.001" in kernel._self_check(found)


@pytest.mark.slow
def test_processes_that_start_at_once_and_one_that_was_killed(fresh):
    loaded()
    left = fresh / "allattn" / "tmp_killed"  # a killed build leaves its folder
    left.mkdir(parents=True)
    (left / "fused_cpu.so").write_text("half a libr")
    command = "from allattn.model import kernel; print(kernel.load()[1])"
    env = {**os.environ, "PYTHONPATH": str(Path(kernel.__file__).parents[2])}

    def start(_) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", command], env=env, capture_output=True, text=True, timeout=HANG
        )

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(start, range(2)))
    assert [run.stdout.strip() for run in runs] == ["compiled kernel"] * 2, runs
    assert len(list((fresh / "allattn").glob("*.so"))) == 1
    again = start(None)
    assert again.stdout.strip() == "compiled kernel" and "compiling" not in again.stderr
