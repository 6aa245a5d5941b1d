"""Describes one line of `allattn doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]
LEVELS: tuple[Status, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class Check:
    """Says what was looked at and how it is.

    Attributes:
        name: What was looked at.
        status: `ok`, `warning` (something is slower or missing) or `error` (training would fail).
        text: What was found.
        todo: What to do about it; empty where it is well.
        value: The figures, where there are some.
    """

    name: str
    status: Status
    text: str
    todo: str = ""
    value: dict[str, float] | None = None


def worst(checks: list[Check]) -> Status:
    """Return the most serious status among the checks."""
    return max((check.status for check in checks), key=LEVELS.index, default="ok")
