"""The versions that `run.sh` installs with, as constraints for pip; standard library only.

    python tools/versions.py tested       constraints.txt: exact versions of everything, tested
    python tools/versions.py lowest       the lowest versions that pyproject.toml names
    python tools/versions.py latest       no constraint at all
    python tools/versions.py cpu-torch tested|lowest|latest    the build of PyTorch without CUDA

Where `pip` looks for packages is settled by its own configuration, here as everywhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODES = ("tested", "lowest", "latest")


def pyproject() -> dict[str, Any]:
    """pyproject.toml, read by the library that every Python with pip has."""
    try:
        import tomllib  # Python 3.11 and newer
    except ModuleNotFoundError:
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def lowest() -> list[str]:
    """`name==version` for every requirement of pyproject.toml, extras included."""
    project = pyproject()["project"]
    requirements = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        requirements += extra
    pins = set()
    for requirement in requirements:
        if requirement.startswith("allattn["):
            continue
        specifier, _, marker = requirement.partition(";")
        match = re.fullmatch(r"([\w.-]+)\s*>=\s*([\w.]+)(?:,.*)?", specifier.strip())
        if match is None:
            raise SystemExit(f"pyproject.toml: {requirement!r}: write name>=lowest_version")
        pins.add(f"{match[1]}=={match[2]}" + (f"; {marker.strip()}" if marker else ""))
    return sorted(pins)


def constraints(mode: str) -> list[str]:
    """The lines of a constraints file for this mode."""
    if mode == "tested":
        return (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return lowest() if mode == "lowest" else []


def cpu_torch(mode: str) -> str:
    """The requirement of a build of PyTorch without CUDA, such as `torch==2.13.0+cpu`.

    PyTorch marks such builds for Linux and Windows by `+cpu` at the end of the version. On a Mac
    every build is one.

    Raises:
        SystemExit: pip finds none of the right version.
    """
    if sys.platform == "darwin":
        return "torch"
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if shown.returncode:
        lines = [
            line for line in shown.stderr.splitlines() if "ERROR" in line or "No module" in line
        ]
        raise SystemExit(f"run.sh: pip cannot look for PyTorch: {' '.join(lines[-1:])}")
    offered = re.findall(r"\b(\d[\w.]*)\+cpu\b", shown.stdout)
    pinned = [m[1] for line in constraints(mode) if (m := re.match(r"torch==([\w.]+)", line))]
    for version in offered:  # the newest comes first
        if not pinned or version in pinned:
            return f"torch=={version}+cpu"
    wanted = f"torch {pinned[0]}+cpu" if pinned else "a version of torch that ends in +cpu"
    raise SystemExit(
        f"run.sh: pip finds no {wanted} (found: {', '.join(offered) or 'none'}); let "
        "PIP_EXTRA_INDEX_URL name the index of CPU builds that PyTorch's installation page gives, "
        "or PIP_FIND_LINKS a folder of them, or leave TORCH=cpu out"
    )


def main(arguments: list[str]) -> int:
    """Print what was asked for."""
    if len(arguments) == 2 and arguments[0] == "cpu-torch" and arguments[1] in MODES:
        print(cpu_torch(arguments[1]))
    elif len(arguments) == 1 and arguments[0] in MODES:
        print("\n".join(constraints(arguments[0])))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
