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


def check_sha256(folder: Path, expected: dict[str, str], *needed: str) -> None:
    """Refuse files that are not what was written; the needed ones have to be among them.

    Raises:
        ValueError: naming the first that is missing or differs.
    """
    for name in needed:
        if name not in expected:
            raise ValueError(f"{folder / name}: its sha256 is not in config.json; export it again")
    for name, digest in expected.items():
        path = folder / Path(name).name  # never outside the folder
        if not path.is_file():
            raise ValueError(f"{path}: missing")
        if sha256(path) != digest:
            raise ValueError(f"{path}: damaged: its sha256 is not the one that was written")
