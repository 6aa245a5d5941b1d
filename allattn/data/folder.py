"""A folder that is made aside and appears under its name only when it is whole."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from allattn.moments import reached

# Beside `out`, and hidden: the folder that is made, what `out` was before, and the file that its
# maker holds locked. All three names end with the same token.
_PARTIAL, _OLD, _LOCK = "partial", "old", "lock"


@contextmanager
def made_aside(out: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A hidden folder beside `out`, and what puts it in place; gone if it was not put there.

    Raises:
        ValueError: there is no folder to make it in.
    """
    token = secrets.token_hex(4)
    work, old = _beside(out, _PARTIAL, token), _beside(out, _OLD, token)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{out.parent}: not a folder; choose another place for it") from None
    lock = _hold(_beside(out, _LOCK, token))
    try:
        work.mkdir()
        yield work, lambda: _put_in_place(work, out, old)
    except BaseException:  # also Ctrl-C: nothing half made stays behind
        shutil.rmtree(work, ignore_errors=True)
        raise
    finally:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


def mend(out: Path) -> None:
    """Clear up after processes that were killed while they made `out`.

    What they had renamed before they had something new in its place gets its name back. A lock
    tells them from processes that are at work.
    """
    for path in out.parent.glob(f".{_escaped(out.name)}.{_LOCK}-*"):
        with contextlib.suppress(OSError), path.open() as lock:  # its maker is at work, or is done
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            token = path.name.rpartition("-")[2]
            old = _beside(out, _OLD, token)
            if old.exists() and not out.exists():
                os.rename(old, out)
            for left in (_beside(out, _PARTIAL, token), old):
                shutil.rmtree(left, ignore_errors=True)
            path.unlink()


def _beside(out: Path, purpose: str, token: str) -> Path:
    return out.parent / f".{out.name}.{purpose}-{token}"


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _hold(path: Path) -> IO[str]:
    while True:
        lock = path.open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink:
            return lock
        lock.close()  # somebody cleared it up before it was locked


def _put_in_place(work: Path, out: Path, old: Path) -> None:
    """Rename the finished folder to its name; a corpus already there goes only after that."""
    reached("prepare:whole")
    if not out.exists():
        os.rename(work, out)
        reached("prepare:placed")
        return
    os.rename(out, old)
    try:
        reached("prepare:aside")
        os.rename(work, out)
    except BaseException:
        os.rename(old, out)
        raise
    reached("prepare:placed")
    shutil.rmtree(old)
