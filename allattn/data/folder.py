"""A folder that is made aside and appears under its name only when it is whole."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_LOCK = ".lock"


@contextmanager
def made_aside(out: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A hidden folder beside `out`, and what puts it in place; gone if it was not put there.

    What killed processes left is removed; a lock tells it from what others are at work on.

    Raises:
        ValueError: there is no folder to make it in.
    """
    for left in out.parent.glob(f".{_escaped(out.name)}.partial-*"):
        _remove_if_left(left)
    work = _new_sibling(out, "partial")
    try:
        work.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{out.parent}: not a folder; choose another place for it") from None
    lock: IO[str] | None = None
    try:
        lock = (work / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield work, lambda: _put_in_place(work, out)
    except BaseException:  # also Ctrl-C: nothing half made stays behind
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            lock.close()


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # somebody is at work there, or has just begun or finished


def _new_sibling(out: Path, purpose: str) -> Path:
    return out.parent / f".{out.name}.{purpose}-{secrets.token_hex(4)}"


def _put_in_place(work: Path, out: Path) -> None:
    """Rename the finished folder to its name; a corpus already there goes only after that."""
    (work / _LOCK).unlink()
    if not out.exists():
        os.rename(work, out)
        return
    old = _new_sibling(out, "old")
    os.rename(out, old)
    try:
        os.rename(work, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old)
