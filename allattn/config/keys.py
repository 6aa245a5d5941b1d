"""How a key of a config is documented: what it means, its unit, and which values are allowed.

A key is a field of a dataclass in `schema.py` or `stages.py`. Its documentation lies in the field's
metadata. `checks.py` reads the allowed values there in order to enforce them, and
`tools/config_reference.py` reads all of it to write the reference in `configs/README.md`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
COUNTS = {2: "two", 3: "three", 4: "four"}


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a key may have; infinity and NaN are never among them.

    Attributes:
        low: the smallest number, or None where there is no bound.
        high: the largest number, or None where there is no bound.
        above: whether `low` itself is too small.
        below: whether `high` itself is too large.
        count: how many numbers are needed, where the key is a list.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    count: int | None = None

    def holds(self, value: Any) -> bool:
        """Return whether a value, or every number of a list of the right length, is allowed."""
        if self.count is None:
            return self._holds_one(value)
        return len(value) == self.count and all(map(self._holds_one, value))

    def _holds_one(self, number: float) -> bool:
        if not math.isfinite(number):
            return False
        if self.low is not None and (number < self.low or (self.above and number == self.low)):
            return False
        return self.high is None or number < self.high or (number == self.high and not self.below)

    def words(self, noun: str = "number") -> str:
        """Return the range in words, for example "a number from 0 to 1".

        Args:
            noun: what one of the numbers is, for example "share".
        """
        if self.low is None:
            bounds = "" if self.high is None else f" up to {self.high}"
        elif self.high is None:
            bounds = f" above {self.low}" if self.above else f" of {self.low} or more"
        elif self.above and self.below:
            bounds = f" between {self.low} and {self.high}, both excluded"
        else:
            bounds = f" from {self.low} to {'just below ' if self.below else ''}{self.high}"
        if self.count is not None:
            return f"{COUNTS[self.count]} {noun}s{bounds}"
        if self.low is not None and self.high is None and not self.above:
            return f"{self.low} or more"
        return f"a {noun}{bounds}"


AT_LEAST_0 = Range(low=0)
AT_LEAST_1 = Range(low=1)
SHARE = Range(low=0, high=1)
NOT_ALL = Range(low=0, high=1, below=True)


@dataclasses.dataclass(frozen=True)
class Key:
    """The documentation of one key.

    Attributes:
        meaning: what the key does, in one or two sentences.
        unit: what a number counts or measures; empty where the key is no number.
        allowed: a range, the words to choose from, or a sentence where neither says it all.
        type: the type in words, where the annotation does not say it.
    """

    meaning: str
    unit: str = ""
    allowed: Range | tuple[str, ...] | str = ""
    type: str = ""


def key(
    default: T,
    meaning: str,
    *,
    unit: str = "",
    allowed: Range | tuple[str, ...] | str = "",
    type: str = "",
) -> T:
    """Return a dataclass field that has a default value and documents itself.

    The arguments are those of `Key`. For a type checker the field is its default value.
    """
    documented = Key(meaning, unit, allowed, type)
    result: T = dataclasses.field(default=default, metadata={"key": documented})
    return result


def made_key(
    make: Callable[[], T],
    meaning: str,
    *,
    unit: str = "",
    allowed: Range | tuple[str, ...] | str = "",
    type: str = "",
) -> T:
    """Return a field as `key` does, for a default that every config needs a copy of its own of."""
    documented = Key(meaning, unit, allowed, type)
    result: T = dataclasses.field(default_factory=make, metadata={"key": documented})
    return result


def documentation(field: dataclasses.Field[Any]) -> Key | None:
    """Return what `key` or `made_key` said about a field; None where it is a section."""
    found: Key | None = field.metadata.get("key")
    return found
