"""pyproject.toml against what the package imports, and constraints.txt against pyproject.toml."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import allattn

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(allattn.__file__).parent
sys.path.insert(0, str(ROOT / "tools"))
import versions  # noqa: E402  (run.sh's own reader of pyproject.toml)

# Which module may import what an extra brings; every other import has to be a plain dependency
EXTRAS = {
    "transformers": "hf",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "pyarrow": "parquet",
    "huggingface-hub": "download",
    "shtab": "completion",
}
# Needed by what we import, not imported by us: torch.onnx.export does its work with onnxscript
INDIRECT = {"onnxscript"}
# Modules that are imported only when their extra is wanted, so they may import it at the top
HOME_OF_EXTRA = {"hf": "inference/hf/"}


def names_of(requirements: list[str]) -> set[str]:
    """Distribution names of requirement lines, our own extras left out."""
    names = {canonicalize_name(Requirement(line).name) for line in requirements}
    return names - {"allattn"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return versions.pyproject()["project"]


def imported() -> dict[str, set[tuple[Path, bool]]]:
    """Distribution -> (file, whether the import stands at the top of the file)."""
    owners = packages_distributions()
    found: dict[str, set[tuple[Path, bool]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            else:
                continue
            for module in modules:
                root = module.split(".")[0]
                if root in sys.stdlib_module_names or root in ("allattn", "__future__"):
                    continue
                names = {canonicalize_name(name) for name in owners.get(root, [root])}
                for name in names:
                    found.setdefault(name, set()).add((path, node in tree.body))
    return found


def test_every_import_is_declared(project):
    core = names_of(project["dependencies"])
    extras = {name: names_of(lines) for name, lines in project["optional-dependencies"].items()}
    for name, places in imported().items():
        files = sorted(str(path.relative_to(PACKAGE)) for path, _ in places)
        if name in core:
            continue
        assert name in EXTRAS, f"{files} import {name}, which pyproject.toml does not declare"
        extra = EXTRAS[name]
        assert name in extras[extra], f"{name} is missing from the extra {extra}"
        for path, at_top in places:
            relative = str(path.relative_to(PACKAGE))
            home = HOME_OF_EXTRA.get(extra)
            assert not at_top or (home and relative.startswith(home)), (
                f"{relative} imports {name} at its top, so the package needs the extra {extra}"
            )


def test_every_declared_dependency_is_imported(project):
    used = imported().keys()
    wanted = names_of(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        if extra != "dev":
            wanted |= names_of(lines)
    assert wanted - used == INDIRECT


def test_the_constraints_name_exact_versions_within_the_bounds(project):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, list[Requirement]] = {}
    for line in lines:
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        assert not pin.url and re.fullmatch(r"==[\w.]+", str(pin.specifier)), line
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    assert list(pins) == sorted(pins)
    declared = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        declared += extra
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        if name == "allattn":
            continue
        assert name in pins, f"constraints.txt has no version of {name}"
        for python in ("3.10", "3.11", "3.12", "3.13"):
            here = {"python_version": python}
            if requirement.marker and not requirement.marker.evaluate(here):
                continue
            fitting = [p for p in pins[name] if not p.marker or p.marker.evaluate(here)]
            assert len(fitting) == 1, (name, python)
            (version,) = [Version(s.version) for s in fitting[0].specifier]
            assert requirement.specifier.contains(version), (name, python)


def test_the_lowest_versions_are_those_of_pyproject():
    pins = versions.lowest()
    assert "torch==2.6" in pins and "deepspeed==0.19.8" in pins
    assert not any(re.search(r"[<>]|allattn", pin.split(";")[0]) for pin in pins)
    for pin in pins:
        Requirement(pin)


def test_no_registry_is_named():
    """pip's own configuration decides where packages come from."""
    for name in ("constraints.txt", "pyproject.toml", "run.sh", "tools/versions.py", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|index-url[= ]|--hash", text), name


@pytest.mark.parametrize("word", ["gpu", "CPU"])
def test_an_unknown_torch_is_refused_before_anything_is_touched(word):
    before = sorted(path.name for path in ROOT.glob(".venv*"))
    done = subprocess.run(
        ["bash", str(ROOT / "run.sh"), "setup"],
        env={**os.environ, "TORCH": word, "PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"run.sh: TORCH={word} is not known; write TORCH=cpu, or leave it out\n")
    assert sorted(path.name for path in ROOT.glob(".venv*")) == before


def test_an_old_python_is_refused_in_a_line(tmp_path):
    """run.sh asks the interpreter itself, so a stand-in that answers as Python 3.9 does."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\necho "3.9.2"\n', encoding="utf-8")
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "run.sh"), "setup"],
        env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("run.sh: Python 3.10 or newer is required (found 3.9.2)")
