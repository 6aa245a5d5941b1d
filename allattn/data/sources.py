"""Find and read texts: plain, compressed, in archives, or in a column of rows.

Whatever its form, a text is read in blocks of about 2 MiB, so memory does not grow with it.
"""

import glob
import gzip
import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from allattn.data.base import HF_TOKENIZER_FILE, TOKENIZER_FILE, check_text
from allattn.data.checksum import sha256

PLAIN = (".txt", ".text", ".tokens", ".raw", ".md")
ROWS = (".jsonl", ".ndjson", ".parquet")
PACKED = (".gz", ".xz")
_BLOCK = 2 << 20  # bytes of text handled together
_LONG_LINE = 4 << 20  # a longer line is handled in parts, cut at spaces
_LONGEST_WORD = 64 << 20


@dataclass(frozen=True)
class Text:
    """A text: a file, or a member of a `.zip`.

    Attributes:
        path: the file.
        member: name in the archive.
        column: of `.jsonl` and `.parquet`: where the text is.
    """

    path: Path
    member: str | None = None
    column: str = "text"

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"

    @property
    def ending(self) -> str:
        """The ending that says what is inside: `.jsonl` for `a.jsonl.gz`."""
        return _ending(self.member or self.path.name)

    @property
    def is_rows(self) -> bool:
        """Whether it is rows with a text column."""
        return self.ending in ROWS

    def plain_size(self) -> int | None:
        """Bytes of the text where they are known without reading it."""
        if self.member is not None or self.is_rows or self.path.suffix in PACKED:
            return None
        return self.path.stat().st_size


@dataclass(frozen=True)
class Block:
    """Whole lines of a text (parts, of lines over 4 MiB), and the number of the first."""

    where: str
    line: int
    data: bytes

    def text(self) -> str:
        """The text.

        Raises:
            ValueError: not UTF-8, or with a NUL; names the file and line.
        """
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.data.count(b"\n", 0, error.start)
            wrong = f"byte 0x{self.data[error.start]:02X} is not UTF-8"
            raise ValueError(
                f"{self.where}, line {line}: {wrong}; convert the file to UTF-8"
            ) from None
        if (place := self.data.find(b"\0")) >= 0:
            line = self.line + self.data.count(b"\n", 0, place)
            wrong = "a NUL (U+0000) is no text"
            raise ValueError(f"{self.where}, line {line}: {wrong}; remove it, or convert the file")
        return text


def find_texts(paths: Sequence[str | Path], split: str, column: str = "text") -> list[Text]:
    """The texts that files, folders, globs and archives name, in order.

    A folder gives the files in it, at any depth, that end like texts, sorted by path.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: not a file, empty, or a folder or archive without a text.
    """
    found: list[Text] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if _is_text(p, path)]
            if not inside:
                raise ValueError(f"{path}: no text in this folder; {_known()}")
            names = inside
        elif path.exists():
            names = [path]
        elif glob.has_magic(str(path)):
            names = [p for p in map(Path, sorted(glob.glob(str(path), recursive=True)))]
            names = [p for p in names if p.is_file()]
            if not names:
                raise FileNotFoundError(f"{path}: no such file (given for {split})")
        else:
            raise FileNotFoundError(f"{path}: no such file (given for {split})")
        for name in names:
            found += _texts_of(name, split, column)
    return found


def _texts_of(path: Path, split: str, column: str) -> list[Text]:
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file; {split} needs text files")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: empty; {split} needs text")
    if path.suffix != ".zip":
        return [Text(path, column=column)]
    members = [Text(path, name, column) for name in sorted(members_of(path))]
    members = [text for text in members if text.ending in (*PLAIN, ".jsonl", ".ndjson")]
    if not members:
        raise ValueError(f"{path}: no text in this archive; {_known()}")
    return members


def members_of(path: Path) -> list[str]:
    """Names of the files in an archive; ValueError where it is damaged."""
    with _undamaged(str(path)), zipfile.ZipFile(path) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
    return [n for n in names if not n.startswith("__MACOSX") and "/." not in f"/{n}"]


def _known() -> str:
    return f"known endings: {' '.join((*PLAIN, *ROWS, '.zip'))}, and with {' or '.join(PACKED)}"


def _ending(name: str) -> str:
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def _is_text(path: Path, folder: Path) -> bool:
    """Whether to take a file of a folder: nothing hidden, nothing `prepare` or `export` wrote."""
    if any(part.startswith(".") for part in path.relative_to(folder).parts) or not path.is_file():
        return False
    if any((path.parent / name).exists() for name in (TOKENIZER_FILE, HF_TOKENIZER_FILE)):
        return False
    return path.suffix == ".zip" or _ending(path.name) in PLAIN + ROWS


def describe(split: str, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """What `data.json` says of the sources of a split."""
    digests = {path: sha256(path) for path in {text.path for text in texts}}
    found = []
    for text in texts:
        size, digest = text.path.stat().st_size, digests[text.path]
        entry = {"split": split, "path": str(text.path), "bytes": size, "sha256": digest}
        if text.member is not None:
            entry["member"] = text.member
        if text.is_rows:
            entry["column"] = text.column
        found.append(entry)
    return found


def read_blocks(text: Text) -> Iterator[Block]:
    """Read a text in blocks of about 2 MiB, cut after a newline.

    Only a line over 4 MiB is cut elsewhere, before a space: no word and no sentencepiece crosses a
    cut. A last line without a newline gets one.

    Raises:
        ValueError: a damaged file, or 64 MiB without a newline or space; names the file and line.
    """
    where, line, rest = str(text), 1, b""
    for data in _rows(text) if text.is_rows else _chunks(text):
        rest += data
        cut = rest.rfind(b"\n") + 1
        if not cut and len(rest) > _LONG_LINE:
            cut = max(rest.rfind(b" "), 0)
            if not cut and len(rest) > _LONGEST_WORD:
                wrong = f"{_LONGEST_WORD >> 20} MiB without a space"
                raise ValueError(f"{where}, line {line}: {wrong}; break it into lines")
        if cut:
            yield Block(where, line, rest[:cut])
            line += rest.count(b"\n", 0, cut)
            rest = rest[cut:]
    if rest:
        yield Block(where, line, rest + b"\n")


class _undamaged:
    """Turns what decompressors raise into one line with the file's name."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        damaged = (gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile, zlib.error, EOFError)
        locked = isinstance(error, RuntimeError) and "encrypted" in str(error)
        if isinstance(error, damaged) or locked:
            wrong = "encrypted" if locked else "damaged, or not what its ending says"
            raise ValueError(f"{self.where}: {wrong}; get the file anew, or unpack it") from None


def _open(text: Text) -> IO[bytes] | gzip.GzipFile:
    if text.member is not None:
        opened: Any = zipfile.ZipFile(text.path).open(text.member)
        name = text.member
    else:
        opened, name = text.path.open("rb"), text.path.name
    if name.endswith(".gz"):
        return gzip.open(opened)
    return lzma.open(opened) if name.endswith(".xz") else opened


def _chunks(text: Text) -> Iterator[bytes]:
    with _undamaged(str(text)), _open(text) as file:
        while data := file.read(_BLOCK):
            yield data


def _rows(text: Text) -> Iterator[bytes]:
    """The rows' texts with a line end each, some at a time."""
    pending: list[bytes] = []
    size = 0
    for number, row in enumerate(_parquet(text) if text.ending == ".parquet" else _json(text), 1):
        if not isinstance(row, str):
            wrong = f"{text.column!r} is no text but {type(row).__name__}"
            raise ValueError(f"{text}, row {number}: {wrong}; name another --text-column")
        try:
            check_text(row)
        except ValueError as error:
            raise ValueError(f"{text}, row {number}: {error}") from None
        data = row.encode("utf-8")
        pending.append(data if data.endswith(b"\n") else data + b"\n")
        size += len(data)
        if size >= _BLOCK:
            yield b"".join(pending)
            pending, size = [], 0
    yield b"".join(pending)


def _json(text: Text) -> Iterator[Any]:
    with _undamaged(str(text)), _open(text) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:  # also not UTF-8
                raise ValueError(f"{text}, line {number}: no JSON object; one a line") from None
            if not isinstance(row, dict) or text.column not in row:
                raise _no_column(f"{text}, line {number}", text.column, row)
            yield row[text.column]


def _parquet(text: Text) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(
            f"{text}: reading .parquet needs an extra: pip install 'allattn[parquet]'"
        ) from None
    try:
        file = ParquetFile(text.path)
        if text.column not in file.schema_arrow.names:
            raise _no_column(str(text), text.column, dict.fromkeys(file.schema_arrow.names))
        for batch in file.iter_batches(batch_size=4096, columns=[text.column]):
            yield from batch.column(0).to_pylist()
    except ArrowException:
        raise ValueError(f"{text}: damaged, or no parquet file; get the file anew") from None


def _no_column(where: str, column: str, row: Any) -> ValueError:
    there = ", ".join(map(str, row)) if isinstance(row, dict) else "no columns"
    return ValueError(f"{where}: no column {column!r} but {there}; name one with --text-column")
