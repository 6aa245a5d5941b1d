"""Compiles `fused_cpu.cpp` for this machine, once, into the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_name("fused_cpu.cpp")
SECONDS = 120  # a compiler that takes longer is stopped
_FLAGS = ["-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC"]


def _folders() -> list[Path]:
    """List where builds may be kept: the user's cache, then the temporary folder."""
    folders = []
    base = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    # the path keeps its ~ where HOME is not set and the system does not know this user
    base = base or os.path.expanduser("~/.cache")
    if not base.startswith("~"):
        folders.append(Path(base) / "allattn")
    with contextlib.suppress(FileNotFoundError):  # nothing that can be written is temporary
        folders.append(Path(tempfile.gettempdir()) / f"allattn-{os.geteuid()}")
    return folders


def _is_ours(folder: Path) -> bool:
    """Tell whether only this user writes there: what others put there is not run."""
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _writable_folder() -> Path:
    """Find the first of the folders in which a file can be made."""
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                if _is_ours(folder):
                    return folder
        except OSError:
            continue  # a read-only home, say
    raise OSError("no folder to build it in; set TORCH_EXTENSIONS_DIR to one that can be written")


def cache_folder() -> Path | None:
    """Say where the compiled kernel is, or would be; None if no folder can be written."""
    built = find_built()
    try:
        return built.parent if built else _writable_folder()
    except OSError:
        return None


def find_compiler() -> str:
    """Find a C++ compiler.

    Raises:
        OSError: There is none on the PATH.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        path = shutil.which(name)
        if path:
            return path
    raise OSError(f"no C++ compiler ({wanted or 'g++, c++, clang++'}) on the PATH")


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({x for x in lines if x.startswith(("model", "flags", "Features"))}))
    except OSError:
        return platform.machine() + platform.processor()


def _file_name() -> str:
    """Name a build of this source for this CPU."""
    what = "\n".join([SOURCE.read_text(encoding="utf-8"), *_FLAGS, _cpu()])
    return f"fused_cpu-{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"


def find_built() -> Path | None:
    """Find the library, where it was compiled for this source and CPU before."""
    name = _file_name()
    built = (folder / name for folder in _folders() if _is_ours(folder))
    return next((path for path in built if path.exists()), None)


def build(check: Callable[[Path], object]) -> Path:
    """Return the library's path; compile it first if there is none of this source for this CPU.

    Each build has a folder of its own, and its result is moved to its name in one step. So several
    processes may start at once (each builds, to the same result), and one that is killed leaves
    nothing that another would wait for or mistake for a whole library.

    Args:
        check: Loads a library; what it raises on is not kept.

    Raises:
        OSError, AttributeError, subprocess.SubprocessError: There is no compiler or no folder, or
            the compiler failed.
    """
    if built := find_built():
        return built
    folder = _writable_folder()
    path = folder / _file_name()
    compiler = find_compiler()
    print("allattn: compiling the attention kernel, once: about 10 s", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        compiled, linked = Path(own) / "fused_cpu.o", Path(own) / "fused_cpu.so"
        # linked without an OpenMP library: PyTorch's is loaded, and a second one would mean a
        # second set of threads that compete with the first
        for arguments in (
            [*_FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(linked)],
        ):
            subprocess.run(
                [compiler, *arguments],
                check=True,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                stdin=subprocess.DEVNULL,
            )
        check(linked)
        os.replace(linked, path)
    return path


def instructions() -> list[str]:
    """List the vector instructions that the compiler finds on this CPU and the kernel can use.

    Raises:
        OSError, subprocess.SubprocessError: There is no compiler, or it failed.
    """
    done = subprocess.run(
        [find_compiler(), "-march=native", "-dM", "-E", "-x", "c++", "-"],
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        input="",
    )
    defined = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("#define")}
    # as the source asks for them
    wide = ["AVX-512"] if "__AVX512F__" in defined else ["AVX"] if "__AVX__" in defined else []
    return wide + (["AMX"] if {"__AMX_BF16__", "__AVX512BF16__"} <= defined else [])
