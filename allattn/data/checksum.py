"""The sha256 of a file: what tells a damaged or exchanged one."""

import hashlib
from pathlib import Path

_BLOCK = 2 << 20  # bytes


def sha256(path: Path) -> str:
    """Of a file's content, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_BLOCK):
            digest.update(data)
    return digest.hexdigest()
