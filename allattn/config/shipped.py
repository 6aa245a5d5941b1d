"""Finds the configs that ship with allattn by their names."""

from __future__ import annotations

import difflib
from pathlib import Path, PurePath

from allattn.config.schema import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_file(name: str) -> Path | None:
    """Find a file or folder that ships beside the code, such as `configs`.

    In a wheel it lies in the package, in a checkout next to `pyproject.toml`.

    Returns:
        Its path, or None where this installation has none.
    """
    inside, beside = _PACKAGE / name, _PACKAGE.parent / name
    if inside.exists():
        return inside
    # site-packages may hold a file of that name which is somebody else's
    return beside if beside.exists() and (_PACKAGE.parent / "pyproject.toml").exists() else None


def shipped_configs() -> dict[str, Path]:
    """List the files of the configs that ship with allattn, by name."""
    folder = shipped_file("configs")
    return {} if folder is None else {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def configs() -> dict[str, str]:
    """List the configs that ship with allattn; a name can stand wherever a config file can.

    Returns:
        One line on each config, by name: the first comment line of its file.

    Raises:
        OSError: A config's file cannot be read.
    """
    found = {}
    for name, path in shipped_configs().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        found[name] = lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""
    return found


def config_text(name: str) -> str:
    """Read a config that ships with allattn as it is, to start one of your own from.

    Args:
        name: One of the names in `configs()`.

    Returns:
        The text of the file, comments included.

    Raises:
        ConfigError: No config has this name.
    """
    known = shipped_configs()
    if name not in known:
        raise ConfigError(_unknown(name, known))
    return known[name].read_text(encoding="utf-8")


def find_config(path: str | Path) -> Path:
    """Find the file that a user means by a path or by the name of a shipped config.

    Raises:
        ConfigError: Neither is there.
    """
    if not isinstance(path, str | PurePath) or not str(path):
        raise ConfigError(f"a config is a path or the name of a shipped one, not {path!r}")
    path = Path(path)
    if path.is_file():
        return path
    known = shipped_configs()
    if str(path) in known:
        return known[str(path)]
    if path.exists():
        return path  # a folder; reading it says what is wrong
    if path.name == str(path) and not path.suffix:
        raise ConfigError(_unknown(str(path), known))
    hint = f"; a config that ships with allattn is named {path.stem}" if path.stem in known else ""
    raise ConfigError(f"{path}: no such config file{hint}")


def _unknown(name: str, known: dict[str, Path]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"{name}: neither a config file nor the name of a config that ships with allattn; {hint}"
        f"known: {', '.join(known) or 'none'}"
    )
