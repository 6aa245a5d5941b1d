"""Checks of arguments that functions of the API share; each refusal names the argument."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from allattn.config import ArgumentError, Config, load_config


def at_least(name: str, value: float | None, low: float) -> None:
    """Refuse a number below `low`, and what is no number; None passes.

    Raises:
        ArgumentError: It is too small.
    """
    if value is not None and not value >= low:
        raise ArgumentError(name, f"{low} or more is needed, not {value}")


def one_of(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse a word that is none of the choices.

    Raises:
        ArgumentError: It is none of them.
    """
    if value not in choices:
        *most, last = choices
        raise ArgumentError(name, f"{', '.join(most)} or {last} is needed, not {value!r}")


def seed_of(name: str, value: int) -> None:
    """Refuse what PyTorch's generators do not take.

    Raises:
        ArgumentError: It is out of their range.
    """
    if not 0 <= value < 2**63:
        raise ArgumentError(name, f"a number from 0 to 2**63 - 1 is needed, not {value}")


def folder(name: str, value: str | Path) -> Path:
    """Turn the name of a folder to write into a path, and refuse an empty one.

    Raises:
        ArgumentError: It is empty.
    """
    if not str(value):
        raise ArgumentError(name, "a folder is needed")
    return Path(value)


def config_of(config: Config | str | Path) -> Config:
    """Return a config as it is, or load the one that a path or a name stands for.

    Raises:
        ConfigError: There is none, or it cannot be used.
    """
    return config if isinstance(config, Config) else load_config(config)
