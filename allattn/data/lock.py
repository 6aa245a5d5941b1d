"""One process at a time writes to a place."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(place: Path) -> Iterator[None]:
    """Hold a place, by a lock file beside it; it goes with the process, however it ends.

    Args:
        place: a folder that is about to be written; it need not be there.

    Raises:
        ValueError: another process is writing there.
    """
    path = place.with_name(f".lock_{place.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = os.fstat(file.fileno()).st_nlink == 0  # its owner ended just now
        except OSError:
            gone = True
        if gone:
            raise ValueError(
                f"{place}: another process is writing there; wait for it, or choose another place"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
