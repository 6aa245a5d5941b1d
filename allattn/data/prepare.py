"""Prepare a corpus: text files in, a folder of memory-mapped token ids out.

Memory does not grow with the text, and the folder appears under its name only when it is whole.
"""

import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from allattn.data.lanes import DATA_FILE, FORMAT_VERSION, Corpus
from allattn.data.tokenizers import (
    MODEL_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    WordTokenizer,
)

SPLITS = ("train", "valid", "test")
TINY = Path(__file__).resolve().parent.parent / "corpora" / "tiny"
LOCAL = "local"  # the dataset name of one's own files
# words and line ends by split, and word types, of the tokenised (`.tokens`) files
WIKITEXT_COUNTS = {
    "wikitext-2": ({"train": 2_088_628, "valid": 217_646, "test": 245_569}, 33_278),
    "wikitext-103": ({"train": 103_227_021, "valid": 217_646, "test": 245_569}, 267_735),
}
DEFAULT_PIECES = 4000  # a size that also the tiny corpus can fill

_BLOCK = 1 << 20  # bytes of text handled together
_LONG_LINE = 4 << 20  # a longer line is handled in parts, cut at spaces
_LONGEST_WORD = 64 << 20

Files = dict[str, list[Path]]


def prepare(
    *,
    out: str | Path,
    dataset: str | None = None,
    source: str | Path | None = None,
    train: Sequence[str | Path] = (),
    valid: Sequence[str | Path] = (),
    test: Sequence[str | Path] = (),
    tokenizer: str = "word",
    vocab_size: int | None = None,
    model_type: str = "unigram",
    min_count: int = 1,
    max_vocab: int | None = None,
    overwrite: bool = False,
    accept_counts: bool = False,
) -> dict[str, Any]:
    """Write `train.bin`, `valid.bin`, `test.bin`, the tokenizer and `data.json` into `out`.

    The same call on unchanged sources does nothing, and says so on stderr.

    Args:
        out: the folder to make.
        dataset: "tiny", "wikitext-2" or "wikitext-103"; None takes the files of train, valid, test.
        source: for WikiText, the folder with wiki.{train,valid,test}.tokens (or .raw).
        train: text files, joined in order; the tokenizer learns from them.
        valid: text files; may be absent.
        test: text files; may be absent.
        tokenizer: "word", "sentencepiece" or "byte".
        vocab_size: pieces of a sentencepiece vocabulary (default 4000).
        model_type: sentencepiece only: "unigram" or "bpe".
        min_count: word only: rarer words become `<unk>`.
        max_vocab: word only: the most types to keep, `<eos>` and `<unk>` included.
        overwrite: replace `out` if it is a prepared corpus, and only then.
        accept_counts: take a WikiText whose counts are not the known ones.

    Returns:
        The content of `data.json`.

    Raises:
        FileNotFoundError: a source file is missing.
        ValueError: options that do not fit together, a source that is not UTF-8 text with words in
            it, wrong WikiText counts, a vocabulary that the text cannot fill, `out` in use.
    """
    out = Path(os.path.realpath(out))  # renaming must not meet a link
    given = {"vocab_size": vocab_size, "model_type": model_type}
    options = _options(tokenizer, given | {"min_count": min_count, "max_vocab": max_vocab})
    files = _files(dataset, source, {"train": train, "valid": valid, "test": test})
    sources = [_source(split, path) for split, paths in files.items() for path in paths]
    if _holds_corpus(out) and not overwrite:
        if info := _same_corpus(out, dataset, options, sources):
            print(f"{out}: already prepared from these sources; nothing to do", file=sys.stderr)
            return info
        raise ValueError(
            f"{out}: holds another or a damaged prepared corpus; choose another folder, or replace "
            "it with overwrite=True (--overwrite)"
        )
    work = _new_sibling(out, "partial")
    try:
        work.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{out.parent}: not a folder; choose another place for it") from None
    try:
        built = _build(options, files["train"])
        splits = {split: _write(built, split, paths, work) for split, paths in files.items()}
        if dataset in WIKITEXT_COUNTS and not accept_counts:
            _check_counts(dataset, options, files, splits, built.vocab_size)
        built.save(work)
        info = {
            "format_version": FORMAT_VERSION,
            "dataset": dataset or LOCAL,
            "dtype": _dtype(built.vocab_size).name,
            "vocab_size": built.vocab_size,
            "tokenizer": built.describe(),
            "options": options,
            "splits": splits,
            "sources": sources,
        }
        (work / DATA_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        _put_in_place(work, out)
    except BaseException:  # also Ctrl-C: nothing half made stays behind
        shutil.rmtree(work, ignore_errors=True)
        raise
    return info


def _options(tokenizer: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options that shape the corpus; ValueError for one that the tokenizer has not."""
    uses = {"byte": {}, "word": {"min_count": 1, "max_vocab": None}}
    uses["sentencepiece"] = {"vocab_size": None, "model_type": "unigram"}
    if tokenizer not in uses:
        raise ValueError(f"tokenizer {tokenizer!r} is unknown; known are {', '.join(uses)}")
    for kind, defaults in uses.items():
        for name, default in defaults.items():
            if kind != tokenizer and given[name] != default:
                hint = "; use max_vocab" if (tokenizer, name) == ("word", "vocab_size") else ""
                raise ValueError(f"{name} is an option of tokenizer {kind}, not {tokenizer}{hint}")
    options = {"tokenizer": tokenizer} | {name: given[name] for name in uses[tokenizer]}
    if tokenizer == "sentencepiece" and options["vocab_size"] is None:
        options["vocab_size"] = DEFAULT_PIECES
    return options


def _files(dataset: str | None, source: str | Path | None, local: dict[str, Any]) -> Files:
    """The text files of each split that there is."""
    local = {k: [v] if isinstance(v, str | Path) else list(v) for k, v in local.items()}
    if dataset is not None and any(local.values()):
        raise ValueError("give a dataset or files for train, valid and test, not both")
    if source is not None and dataset not in WIKITEXT_COUNTS:
        raise ValueError(f"source belongs to the datasets {' and '.join(WIKITEXT_COUNTS)} only")
    if dataset is None:
        if not local["train"]:
            raise ValueError("nothing to prepare: give a dataset, or at least one train file")
        return {split: [Path(path) for path in paths] for split, paths in local.items() if paths}
    if dataset == "tiny":
        return {split: [TINY / f"{split}.txt"] for split in SPLITS}
    if dataset not in WIKITEXT_COUNTS:
        raise ValueError(f"dataset {dataset!r} is unknown; known: tiny, wikitext-2, wikitext-103")
    wanted = "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (or the three as .raw)"
    if source is None:
        raise ValueError(f"{dataset} needs a source: the folder that holds {wanted}")
    for ending in ("tokens", "raw"):
        files = {split: [Path(source) / f"wiki.{split}.{ending}"] for split in SPLITS}
        if all(path.is_file() for paths in files.values() for path in paths):
            return files
    raise FileNotFoundError(f"{source}: the folder of {dataset} must hold {wanted}")


def _source(split: str, path: Path) -> dict[str, Any]:
    """What `data.json` says of a source file."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file (given for {split})")
    if not path.is_file():
        raise ValueError(f"{path}: not a regular file; {split} needs text files")
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path}: empty; {split} needs text")
    return {"split": split, "path": str(path), "bytes": size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_BLOCK):
            digest.update(data)
    return digest.hexdigest()


def _holds_corpus(out: Path) -> bool:
    """Whether `out` holds a corpus, be it damaged; ValueError where something else is."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise ValueError(f"{out}: exists and is not a folder; choose another place for the corpus")
    names = {path.name for path in out.iterdir()}
    always = {DATA_FILE, TOKENIZER_FILE, "train.bin"}
    other = names - always - {VOCAB_FILE, MODEL_FILE, "valid.bin", "test.bin"}
    if names and (other or not always <= names):
        raise ValueError(
            f"{out}: holds what is no prepared corpus ({min(other or names)}) and will not be "
            "replaced; choose another folder"
        )
    return bool(names)


def _same_corpus(
    out: Path, dataset: str | None, options: dict[str, Any], sources: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The `data.json` of a whole corpus that the same call would make again, else None."""
    try:
        corpus = Corpus(out)
        found = corpus.info
        contents = [[(s["split"], s["sha256"]) for s in of] for of in (found["sources"], sources)]
        whole = all(_sha256(out / f"{s}.bin") == v["sha256"] for s, v in corpus.splits.items())
        same = (found["dataset"], found["options"]) == (dataset or LOCAL, options)
        if same and whole and contents[0] == contents[1] and corpus.tokenizer:
            return found
    except (ValueError, FileNotFoundError, KeyError, TypeError):
        pass  # damaged
    return None


def read_blocks(path: Path) -> Iterator[tuple[str, int]]:
    """Read a text file in blocks of about 1 MiB, cut after a newline.

    Only a line over 4 MiB is cut elsewhere, before a space: no word and no sentencepiece crosses a
    cut. A last line without a newline gets one.

    Yields:
        The text of a block and its size in UTF-8 bytes.

    Raises:
        ValueError: not UTF-8, or 64 MiB without a newline or space; names the file and line.
    """
    line = 1
    rest = b""
    with path.open("rb") as file:
        while data := file.read(_BLOCK):
            rest += data
            cut = rest.rfind(b"\n") + 1
            if not cut and len(rest) > _LONG_LINE:
                cut = max(rest.rfind(b" "), 0)
                if not cut and len(rest) > _LONGEST_WORD:
                    wrong = f"{_LONGEST_WORD >> 20} MiB without a space"
                    raise ValueError(f"{path}, line {line}: {wrong}; break it into lines")
            if cut:
                yield _decode(rest[:cut], path, line), cut
                line += rest.count(b"\n", 0, cut)
                rest = rest[cut:]
    if rest:
        yield _decode(rest, path, line) + "\n", len(rest) + 1


def _decode(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        wrong = f"byte 0x{data[error.start]:02X} is not UTF-8"
        raise ValueError(f"{path}, line {line}: {wrong}; convert the file to UTF-8") from None


def _progress(paths: list[Path], what: str) -> Iterator[tuple[str, int]]:
    """The blocks of several files, with a progress bar if stderr is a terminal."""
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        for path in paths:
            words = 0
            for text, size in read_blocks(path):
                words = words or len(text.split())
                yield text, size
                bar.update(size)
            if not words:
                raise ValueError(f"{path}: no words in it; a corpus needs text")


def _build(options: dict[str, Any], paths: list[Path]) -> Tokenizer:
    """Learn the tokenizer from the train files."""
    kind, arguments = options["tokenizer"], {k: v for k, v in options.items() if k != "tokenizer"}
    if kind == "byte":
        return ByteTokenizer()
    blocks = (text for text, _ in _progress(paths, "vocabulary"))
    if kind == "word":
        return WordTokenizer.build(blocks, **arguments)
    total = sum(path.stat().st_size for path in paths)
    return SentencePieceTokenizer.train(blocks, total_bytes=total, **arguments)


def _dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned type that holds every id."""
    return np.min_scalar_type(vocab_size - 1).newbyteorder("<")


def _write(tokenizer: Tokenizer, split: str, paths: list[Path], folder: Path) -> dict[str, Any]:
    """Write the ids of a split; returns its counts and the sha256 of the file."""
    dtype = _dtype(tokenizer.vocab_size)
    counts = dict.fromkeys(("tokens", "words", "lines", "bytes"), 0)
    path = folder / f"{split}.bin"
    with path.open("wb") as file:
        for text, size in _progress(paths, split):
            ids = np.array(tokenizer.encode(text), dtype=dtype)
            file.write(ids.tobytes())
            lines = text.count("\n")
            counts["tokens"] += len(ids)
            counts["words"] += len(text.split()) + lines  # a line end counts as a word
            counts["lines"] += lines
            counts["bytes"] += size
    return counts | {"sha256": _sha256(path)}


def _check_counts(
    dataset: str, options: dict[str, Any], files: Files, splits: dict[str, Any], types: int
) -> None:
    """ValueError unless tokenised WikiText files have their known counts."""
    words, known_types = WIKITEXT_COUNTS[dataset]
    hint = "get the complete file, or pass accept_counts=True (--accept-counts)"
    for split, (path,) in files.items():
        count = splits[split]["words"]
        if path.suffix == ".tokens" and count != words[split]:
            wrong = f"{count:,} words and line ends, but {dataset} has {words[split]:,}"
            raise ValueError(f"{path}: {wrong}; {hint}")
    whole = {"tokenizer": "word", "min_count": 1, "max_vocab": None}
    path = files["train"][0]
    if path.suffix == ".tokens" and options == whole and types != known_types:
        raise ValueError(f"{path}: {types:,} types, but {dataset} has {known_types:,}; {hint}")


def _new_sibling(out: Path, purpose: str) -> Path:
    return out.parent / f".{out.name}.{purpose}-{secrets.token_hex(4)}"


def _put_in_place(work: Path, out: Path) -> None:
    """Rename the finished folder to its name; a corpus already there goes only after that."""
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
