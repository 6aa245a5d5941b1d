"""Holds what is installed against the bounds of allattn and the versions of its tests."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from allattn import __version__
from allattn.config.shipped import shipped_file
from allattn.machine.check import Check

CONSTRAINTS = "constraints.txt"
EXTRAS = {  # what each gives
    "parquet": "reading .parquet files in `prepare`",
    "download": "fetching WikiText with `prepare --download`",
    "hf": "loading exports with transformers",
    "onnx": "`export --format onnx`",
    "completion": "completion of commands in the shell with `allattn completion`",
}


def installed(name: str) -> str | None:
    """Look up the version of a distribution, without importing it; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tested_versions() -> dict[str, str] | None:
    """Read the exact versions that the test suite ran with; None where they do not ship."""
    path = shipped_file(CONSTRAINTS)
    if path is None:
        return None
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pinned = Requirement(text)
        if pinned.marker is None or pinned.marker.evaluate():
            found[canonicalize_name(pinned.name)] = str(pinned.specifier).removeprefix("==")
    return found


def check_versions() -> list[Check]:
    """Check Python, allattn, and each library that it needs or can use."""
    try:
        about = metadata.metadata("allattn")
    except metadata.PackageNotFoundError:
        todo = "install it: pip install ."
        text = f"{__version__}, on the path but not installed: its bounds are not known"
        return [_python(None), Check("allattn", "warning", text, todo)]
    checks = [_python(about["Requires-Python"]), Check("allattn", "ok", __version__)]
    tested = tested_versions()
    if tested is None:
        text = f"not known: there is no {CONSTRAINTS} in this installation"
        checks.append(Check("tested versions", "warning", text, "install allattn again"))
    needed = [Requirement(text) for text in metadata.requires("allattn") or []]
    checks += [_library(r, tested or {}) for r in needed if _belongs(r, "")]
    for extra in about.get_all("Provides-Extra") or []:
        if extra in EXTRAS:
            own = [r for r in needed if _belongs(r, extra) and not _belongs(r, "")]
            checks.append(_extra(extra, own, tested or {}))
    return checks


def _belongs(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _python(needed: str | None) -> Check:
    version = platform.python_version()
    text = f"{version} ({sys.executable})"
    if needed and not SpecifierSet(needed).contains(version, prereleases=True):
        return Check("Python", "error", text, f"use Python {needed}")
    return Check("Python", "ok", text)


def _library(requirement: Requirement, tested: dict[str, str]) -> Check:
    name, version = requirement.name, installed(requirement.name)
    wanted = f"pip install '{name}{requirement.specifier}'"
    if version is None:
        return Check(name, "error", "not installed", wanted)
    if not requirement.specifier.contains(version, prereleases=True):
        return Check(name, "error", f"{version}, but {requirement.specifier} is needed", wanted)
    known = tested.get(canonicalize_name(name))
    if known is None:
        return Check(name, "ok", version)
    if Version(known).public != Version(version).public:
        todo = f"if something fails: pip install '{name}=={known}'"
        return Check(name, "warning", f"{version}, tested with {known}", todo)
    return Check(name, "ok", f"{version}, as tested")


def _extra(extra: str, own: list[Requirement], tested: dict[str, str]) -> Check:
    """Check the libraries of an extra, without which nothing is wrong."""
    name, gives = f"extra {extra}", EXTRAS[extra]
    missing = [r.name for r in own if installed(r.name) is None]
    if missing:
        todo = f"pip install 'allattn[{extra}]'"
        return Check(name, "ok", f"not installed ({', '.join(missing)}); {todo} for {gives}")
    checks = [_library(requirement, tested) for requirement in own]
    wrong = [check for check in checks if check.status != "ok"]
    text = ", ".join(f"{check.name} {check.text}" for check in wrong or checks)
    # a library that this extra alone uses keeps nobody from training
    todo = "; ".join(check.todo for check in wrong)
    return Check(name, "warning" if wrong else "ok", f"{text}: {gives}", todo)
