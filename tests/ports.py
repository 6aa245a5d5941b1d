"""Ports for ranks that meet at one: nobody else takes a port between choosing it and using it."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

# Below what Linux and macOS give to programs that ask for any port
_PORTS = range(20_000, 30_000)
_held: list[IO[str]] = []  # the locks of this process's ports, until it ends


def port_of_ours() -> int:
    """A port that is free, and locked against all other tests on this machine."""
    folder = Path(tempfile.gettempdir()) / f"allattn-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    first = os.getpid() * 7 % len(_PORTS)  # processes that start together look in other places
    for port in [*_PORTS[first:], *_PORTS[:first]]:
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as test:
                test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                test.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise RuntimeError(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}")
