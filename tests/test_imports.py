"""DESIGN section 9: who may import whom, read from the source without running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import allattn

PACKAGE = Path(allattn.__file__).parent
MAY_IMPORT = {
    # by package: the others that it may import (itself always)
    "config": set(),
    "model": {"config"},
    "pruning": {"config", "model"},
    "data": {"config"},
    "training": {"config", "model", "pruning", "data"},
    "inference": {"config", "model", "pruning", "data", "training.state"},
    "analysis": {"config", "model", "pruning", "data"},
    "machine": {"config", "model", "training.speed"},
    "api": {"config", "model", "pruning", "data", "training", "inference", "analysis"},
    "corpora": set(),
}
FREE = {"cli", "__main__", "__init__"}  # they put everything together
GROUND = "moments"  # every package may import it, and it imports none


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    found = set()
    package = ["allattn", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))


def test_the_files_are_found():
    assert len(FILES) > 20
    assert {part_of(path) for path in FILES} - FREE <= MAY_IMPORT.keys() | {GROUND}
    trainer = imports(PACKAGE / "training" / "trainer.py")
    assert {"allattn.config", "torch"} <= trainer


@every_file
def test_who_imports_whom(path):
    part = part_of(path)
    if part in FREE:
        return
    allowed = {GROUND} if part == GROUND else MAY_IMPORT[part] | {part, GROUND}
    modules = {str(p.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for p in FILES}
    for name in imports(path):
        inside = name.removeprefix("allattn.")
        if inside == name or inside not in modules:
            continue
        ours = any(inside == a or inside.startswith(f"{a}.") for a in allowed)
        assert ours, f"{part} imports {inside}"


@every_file
def test_the_engine_alone_imports_deepspeed(path):
    uses = {name.split(".")[0] for name in imports(path)} & {"deepspeed"}
    assert not uses or path == PACKAGE / "training" / "engine.py"


def test_the_engine_imports_deepspeed_late():
    """One process starts without it."""
    tree = ast.parse((PACKAGE / "training" / "engine.py").read_text(encoding="utf-8"))
    top = {alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names}
    top |= {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert not any(name.startswith("deepspeed") for name in top)


@every_file
def test_tools_and_tests_are_never_imported(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"tools", "tests", "oracles", "conftest"}


@every_file
def test_nothing_unpickles(path):
    names = {name for name in imports(path)}
    assert not {name.split(".")[0] for name in names} & {"pickle", "dill", "joblib", "cloudpickle"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            assert (called.value.id, called.attr) not in {("torch", "load"), ("torch", "save")}


def test_schedules_need_no_torch():
    """Nor does the configuration, so `--help` and wrong configs answer at once."""
    for path in (
        "pruning/schedule.py",
        "config/__init__.py",
        "config/schema.py",
        "config/checks.py",
        "cli/__init__.py",
        "cli/arguments.py",
        "cli/commands.py",
        "cli/completion.py",
        "api/__init__.py",
        "api/arguments.py",
        "api/runs.py",
        "api/models.py",
        "api/use.py",
        "api/analysis.py",
        "config/shipped.py",
        "machine/versions.py",
        "machine/doctor.py",
        "__init__.py",
    ):
        tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
        top = {alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names}
        top |= {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in top} & {"torch", "deepspeed", "numpy"}, path


def test_what_is_imported_without_torch():
    """Also by way of what a module imports, which the source of one file does not show."""
    code = (
        "import sys, allattn.cli.arguments, allattn.machine.doctor; "
        "import allattn.api.analysis, allattn.api.models, allattn.api.runs, allattn.api.use; "
        "allattn.cli.build_parser(); allattn.load_config('tiny'); allattn.configs(); "
        "allattn.train, allattn.evaluate, allattn.doctor; "
        "print(sorted({'torch', 'deepspeed', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@every_file
def test_names_of_files_say_what_is_in_them(path):
    assert path.stem not in ("utils", "util", "helpers", "misc")


def test_every_public_name_is_there():
    for name in allattn.__all__:
        assert getattr(allattn, name) is not None
    assert set(allattn.__all__) <= set(dir(allattn))
    assert allattn.__all__ == sorted(allattn.__all__)
    assert set(allattn.__all__) == set(allattn._EXPORTS)
    with pytest.raises(AttributeError, match="no_such_name"):
        allattn.no_such_name  # noqa: B018
