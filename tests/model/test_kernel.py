"""The compiled kernel: shapes that test_fused.py is too small for, and its build."""

import os
import pwd
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from killed import HANG

from allattn.model import build, kernel

NOBODY = 65534
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


# Where builds are kept


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """`environment(HOME=...)`: only these variables say where the cache is; the paths are made."""
    for name in ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def give(**variables: Path) -> Path:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return temporary / f"allattn-{os.geteuid()}"

    return give


def test_the_cache_is_the_users(environment, tmp_path):
    environment(HOME=tmp_path / "home")
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "allattn"
    environment(XDG_CACHE_HOME=tmp_path / "xdg")
    assert build.cache_folder() == tmp_path / "xdg" / "allattn"
    environment(TORCH_EXTENSIONS_DIR=tmp_path / "torch")
    assert build.cache_folder() == tmp_path / "torch" / "allattn"
    package = Path(build.__file__).parents[1]
    assert all(package.parent not in folder.parents for folder in build._folders())


def test_without_a_home(environment, monkeypatch):
    """HOME is unset, and the system does not know the user either, as in some containers."""
    temporary = environment()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # raises KeyError, as it does there
    assert build.cache_folder() == temporary


def test_with_a_home_that_cannot_be_written(environment, tmp_path):
    home, temporary = tmp_path / "home", environment(HOME=tmp_path / "home").parent
    cache = home / ".cache" / "allattn"
    for place in (home, cache):  # nothing is there yet; a cache was made and is read-only now
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o555)
        with nobody(tmp_path) as uid:
            assert build.cache_folder() == temporary / f"allattn-{uid}"
        place.chmod(0o755)
    environment(HOME=tmp_path / "file")
    (tmp_path / "file").write_text("no folder")
    assert build.cache_folder() == temporary / f"allattn-{os.geteuid()}"


def test_what_was_built_is_used_where_nothing_more_can_be_written(environment, tmp_path):
    cache = tmp_path / "home" / ".cache" / "allattn"
    cache.mkdir(parents=True)
    environment(HOME=tmp_path / "home")
    built = cache / build._file_name()
    built.touch()
    cache.chmod(0o555)
    with nobody(tmp_path, owns=cache):
        assert build.find_built() == built and build.cache_folder() == cache
    cache.chmod(0o755)


@contextmanager
def nobody(folder: Path, owns: Path | None = None):
    """Without the rights of root, who may write anywhere; gives the id of the user that it is."""
    (folder / "tmp").chmod(0o777)
    if os.geteuid() != 0:
        yield os.geteuid()
        return
    for path in (folder, *folder.parents):
        if path.stat().st_mode & 0o001 == 0:
            path.chmod(path.stat().st_mode | 0o011)
    if owns is not None:
        os.chown(owns, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        yield NOBODY
    finally:
        os.seteuid(0)


def test_a_cache_of_another_user_is_not_run(environment, tmp_path):
    home = tmp_path / "home" / ".cache" / "allattn"
    home.mkdir(parents=True)
    (home / build._file_name()).write_text("what somebody else built")
    temporary = environment(HOME=tmp_path / "home")
    assert build.find_built() is not None
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(home, NOBODY, -1)
    assert build.find_built() is None and build.cache_folder() == temporary
