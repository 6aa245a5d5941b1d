"""The modelling code that goes with an export: the package's own files, imports rewritten.

There is one implementation. What an export carries is a flat copy of the modules that the three
files of `hf/` need, made anew at every export, so that the model loads where allattn is not.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import allattn

ENTRIES = ("configuration_allattn", "modeling_allattn", "tokenization_allattn")
AUTO_MAP = {
    "AutoConfig": "configuration_allattn.AllattnConfig",
    "AutoModelForCausalLM": "modeling_allattn.AllattnForCausalLM",
}
TOKENIZER_MAP: dict[str, Any] = {
    "AutoTokenizer": ["tokenization_allattn.AllattnTokenizer", None],
}
_ROOT = Path(allattn.__file__).parent


def write_code(folder: Path) -> None:
    """Write the modules into an export."""
    for name, text in travelling_code().items():
        (folder / name).write_text(text, encoding="utf-8")


def travelling_code() -> dict[str, str]:
    """File name to source of every module that an export needs."""
    found: dict[str, tuple[str, str]] = {}  # file name to module and source
    for entry in ENTRIES:
        first = f"allattn.inference.hf.{entry}"
        needed = _needed(first)
        for module, source in needed.items():
            name = f"{_name(module)}.py"
            assert found.get(name, (module, ""))[0] == module, f"two modules would be {name}"
            if module == first:
                source += _naming(sorted(_name(other) for other in needed if other != first))
            if module == first or name not in found:
                found[name] = (module, source)
    return {name: source for name, (_, source) in sorted(found.items())}


def _needed(first: str) -> dict[str, str]:
    """A module and all that it imports from the package, rewritten."""
    found: dict[str, str] = {}
    waiting = [first]
    while waiting:
        module = waiting.pop()
        if module not in found:
            text = _path(module).read_text(encoding="utf-8")
            found[module], more = rewrite(text, module)
            waiting += more
    return found


def _naming(names: list[str]) -> str:
    """Imports that change nothing: transformers 4 copies what the first file names, no more."""
    lines = "".join(f"from .{name} import __name__ as _  # noqa\n" for name in names)
    return f"\n# So that transformers finds every file:\n{lines}"


def rewrite(source: str, module: str) -> tuple[str, list[str]]:
    """A module's source with relative imports for the package's, and the modules that it needs."""
    lines, needed = source.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("allattn."):
            continue
        assert node.module is not None, "it starts with allattn."
        at, old = node.lineno - 1, f"from {node.module} import "
        assert old in lines[at], f"{module}: {lines[at]}"
        if _path(node.module).name == "__init__.py":  # modules out of a package
            needed += [f"{node.module}.{alias.name}" for alias in node.names]
            lines[at] = lines[at].replace(old, "from . import ")
        else:
            needed.append(node.module)
            lines[at] = lines[at].replace(old, f"from .{_name(node.module)} import ")
    head = f"# Copied by `allattn export` from {module}; Apache-2.0. Change it there, not here.\n"
    return head + "".join(lines), needed


def _name(module: str) -> str:
    return module.rpartition(".")[2]


def _path(module: str) -> Path:
    """The file of a module of the package."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
