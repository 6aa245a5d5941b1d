"""Prepare a corpus: text files in, a folder of memory-mapped token ids out.

Memory does not grow with the text, and the folder appears under its name only when it is whole.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from allattn.data import wikitext
from allattn.data.checksum import sha256
from allattn.data.folder import made_aside, mend
from allattn.data.lanes import DATA_FILE, FORMAT_VERSION, Corpus
from allattn.data.sources import Text, describe, find_texts, read_blocks
from allattn.data.tokenizers import (
    MODEL_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    WordTokenizer,
    read_tokenizer,
)
from allattn.data.words import check_limits
from allattn.data.workers import Crew, count_words, encode, id_type, progress
from allattn.moments import reached

TINY = Path(__file__).resolve().parent.parent / "corpora" / "tiny"
LOCAL = "local"  # the dataset name of one's own files
DEFAULT_PIECES = 4000  # a size that also the tiny corpus can fill
_WORTH_WORKERS = 32 << 20  # bytes of text from which on starting processes pays
_USES = {
    "byte": (),
    "word": ("min_count", "max_vocab", "count_all"),
    "sentencepiece": ("vocab_size", "model_type"),
}
_DEFAULTS = {
    "min_count": 1, "max_vocab": None, "count_all": False, "vocab_size": None,
    "model_type": "unigram",
}  # fmt: skip

Texts = dict[str, list[Text]]


def prepare(
    *,
    out: str | Path,
    dataset: str | None = None,
    source: str | Path | None = None,
    train: Sequence[str | Path] = (),
    valid: Sequence[str | Path] = (),
    test: Sequence[str | Path] = (),
    tokenizer: str | None = None,
    tokenizer_from: str | Path | None = None,
    vocab_size: int | None = None,
    model_type: str = "unigram",
    min_count: int = 1,
    max_vocab: int | None = None,
    count_all: bool = False,
    text_column: str = "text",
    workers: int | None = 1,
    download: bool = False,
    overwrite: bool = False,
    accept_counts: bool = False,
) -> dict[str, Any]:
    """Write `train.bin`, `valid.bin`, `test.bin`, the tokenizer and `data.json` into `out`.

    The same call on unchanged sources does nothing, and says so on stderr.

    Args:
        out: the folder to make.
        dataset: "tiny", "wikitext-2" or "wikitext-103"; None takes the files of train, valid, test.
        source: for WikiText, where its files are; see `wikitext.find`.
        train: files, folders, globs or archives, joined in order; the tokenizer learns from them.
        valid: likewise; may be absent.
        test: likewise; may be absent.
        tokenizer: "word" (the default), "sentencepiece" or "byte".
        tokenizer_from: take an existing one: a prepared corpus or an export, a sentencepiece
            `.model`, or a vocabulary file of one word a line.
        vocab_size: pieces of a sentencepiece vocabulary (default 4000).
        model_type: sentencepiece only: "unigram" or "bpe".
        min_count: word only: rarer words become `<unk>`.
        max_vocab: word only: the most types to keep, `<eos>` and `<unk>` included.
        count_all: word only: count the words of valid and test too.
        text_column: of `.jsonl` and `.parquet` rows.
        workers: processes; the result does not depend on them. None: all cores if it is worth it.
            With more than one, a script has to call this under `if __name__ == "__main__":`.
        download: fetch WikiText through `huggingface_hub`.
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
    given = None if tokenizer_from is None else read_tokenizer(tokenizer_from)
    limits = {"min_count": min_count, "max_vocab": max_vocab, "count_all": count_all}
    asked = {"vocab_size": vocab_size, "model_type": model_type, **limits}
    options = _options(tokenizer, asked, given)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if download:
        source = _download(dataset, source)
    splits_of = {"train": train, "valid": valid, "test": test}
    texts, known = _texts(dataset, source, splits_of, text_column)
    sources = [entry for split, some in texts.items() for entry in describe(split, some)]
    if workers is None:
        size = sum({entry["path"]: entry["bytes"] for entry in sources}.values())
        workers = (os.cpu_count() or 1) if size >= _WORTH_WORKERS else 1
    mend(out)
    if _holds_corpus(out) and not overwrite:
        if info := _same_corpus(out, dataset, options, sources):
            print(f"{out}: already prepared from these sources; nothing to do", file=sys.stderr)
            return info
        raise ValueError(
            f"{out}: holds another or a damaged prepared corpus{_changed(out, sources)}; choose "
            "another folder, or replace it with overwrite=True (--overwrite)"
        )
    with made_aside(out) as (work, put_in_place):
        built = _build(options, given, texts, workers)
        with Crew(workers, built) as crew:
            splits = {split: _write(crew, split, some, work) for split, some in texts.items()}
        reached("prepare:ids")
        if known and not accept_counts:
            assert dataset is not None, "only of a dataset they are known"
            wikitext.check_counts(dataset, options, texts, splits, built.vocab_size)
        built.save(work)
        info = {
            "format_version": FORMAT_VERSION,
            "dataset": dataset or LOCAL,
            "dtype": id_type(built.vocab_size).name,
            "vocab_size": built.vocab_size,
            "tokenizer": built.describe(),
            "options": options,
            "splits": splits,
            "sources": sources,
        }
        (work / DATA_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        put_in_place()
    return info


def _options(
    tokenizer: str | None, asked: dict[str, Any], given: Tokenizer | None
) -> dict[str, Any]:
    """The options that shape the corpus; ValueError for one that the tokenizer has not."""
    if given is not None:
        for name, default in _DEFAULTS.items():
            if asked[name] != default:
                raise ValueError(f"{name}: a tokenizer from elsewhere is as it is; leave it out")
        if tokenizer not in (None, given.kind):
            raise ValueError(f"tokenizer {tokenizer}, but tokenizer_from names one of {given.kind}")
        return {"tokenizer": given.kind, "fingerprint": given.fingerprint()}
    tokenizer = tokenizer or "word"
    if tokenizer not in _USES:
        raise ValueError(f"tokenizer {tokenizer!r} is unknown; known are {', '.join(_USES)}")
    for kind, names in _USES.items():
        for name in names:
            if kind != tokenizer and asked[name] != _DEFAULTS[name]:
                hint = "; use max_vocab" if (tokenizer, name) == ("word", "vocab_size") else ""
                raise ValueError(f"{name} is an option of tokenizer {kind}, not {tokenizer}{hint}")
    options = {"tokenizer": tokenizer} | {name: asked[name] for name in _USES[tokenizer]}
    if tokenizer == "sentencepiece" and options["vocab_size"] is None:
        options["vocab_size"] = DEFAULT_PIECES
    return options


def _texts(
    dataset: str | None, source: str | Path | None, local: dict[str, Any], column: str
) -> tuple[Texts, bool]:
    """The texts of each split that there is, and whether their counts are known."""
    local = {k: [v] if isinstance(v, str | Path) else list(v) for k, v in local.items()}
    if dataset is not None and any(local.values()):
        raise ValueError("give a dataset or files for train, valid and test, not both")
    if source is not None and dataset not in wikitext.COUNTS:
        raise ValueError(f"source belongs to the datasets {' and '.join(wikitext.COUNTS)} only")
    if dataset is None:
        if not local["train"]:
            raise ValueError("nothing to prepare: give a dataset, or at least one train file")
        found = {k: find_texts(paths, k, column) for k, paths in local.items() if paths}
        return found, False
    if dataset == "tiny":
        return {split: [Text(TINY / f"{split}.txt")] for split in wikitext.SPLITS}, False
    if dataset not in wikitext.COUNTS:
        raise ValueError(f"dataset {dataset!r} is unknown; known: tiny, wikitext-2, wikitext-103")
    return wikitext.find(dataset, source)


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
        contents = [[_content(s) for s in of] for of in (found["sources"], sources)]
        whole = all(sha256(out / f"{s}.bin") == v["sha256"] for s, v in corpus.splits.items())
        same = (found["dataset"], found["options"]) == (dataset or LOCAL, options)
        if same and whole and contents[0] == contents[1] and corpus.tokenizer:
            return found
    except (ValueError, FileNotFoundError, KeyError, TypeError):
        pass  # damaged
    return None


def _content(source: dict[str, Any]) -> tuple[Any, ...]:
    """What decides the text that a source gives; not where it is."""
    return tuple(source.get(key) for key in ("split", "sha256", "member", "column"))


def _changed(out: Path, sources: list[dict[str, Any]]) -> str:
    """Names the first source that is not what it was when `out` was made, if there is one."""
    try:
        before = {s["path"]: s["sha256"] for s in Corpus(out).info["sources"]}
    except (ValueError, FileNotFoundError, KeyError, TypeError):
        return ""
    changed = [s["path"] for s in sources if before.get(s["path"], s["sha256"]) != s["sha256"]]
    return f" ({changed[0]} has changed since)" if changed else ""


def _download(dataset: str | None, source: str | Path | None) -> Path:
    if dataset not in wikitext.COUNTS or source is not None:
        wrong = f"download is for the datasets {' and '.join(wikitext.COUNTS)}, without a source"
        raise ValueError(wrong)
    return wikitext.download(dataset)


def _build(
    options: dict[str, Any], given: Tokenizer | None, texts: Texts, workers: int
) -> Tokenizer:
    """Learn the tokenizer from the train texts, where none was given."""
    kind, arguments = options["tokenizer"], {k: v for k, v in options.items() if k != "tokenizer"}
    if given is not None:
        return given
    if kind == "byte":
        return ByteTokenizer()
    if kind == "word":
        whole = arguments.pop("count_all", False)
        check_limits(**arguments)
        counted = texts["train"] if not whole else [t for ts in texts.values() for t in ts]
        counts: Counter[str] = Counter()
        with Crew(workers) as crew:
            for _, words in crew.over(count_words, counted, "vocabulary"):
                counts.update(words)
                reached("prepare:vocabulary")
        return WordTokenizer.from_counts(counts, **arguments)
    found = [text.plain_size() for text in texts["train"]]
    sizes = [size for size in found if size is not None]
    if len(sizes) < len(found):  # it has to be read to be measured
        sizes = [len(block.data) for text in texts["train"] for block in read_blocks(text)]
    blocks = _decoded(texts["train"])
    return SentencePieceTokenizer.train(blocks, total_bytes=sum(sizes), **arguments)


def _decoded(texts: list[Text]) -> Iterator[str]:
    with progress(texts, "vocabulary") as bar:
        for text in texts:
            words = False
            for block in read_blocks(text):
                yield (decoded := block.text())
                reached("prepare:vocabulary")
                words = words or not decoded.isspace()
                bar.update(len(block.data))
            if not words:
                raise _no_words(text)


def _no_words(text: Text) -> ValueError:
    return ValueError(f"{text}: no words in it; a corpus needs text")


def _write(crew: Crew, split: str, texts: list[Text], folder: Path) -> dict[str, Any]:
    """Write the ids of a split; returns its counts and the sha256 of the file."""
    counts = dict.fromkeys(("tokens", "words", "lines", "bytes"), 0)
    without = dict.fromkeys(texts)  # no words in them yet
    digest = hashlib.sha256()
    with (folder / f"{split}.bin").open("wb") as file:
        for text, (ids, found) in crew.over(encode, texts, split):
            file.write(ids)
            reached("prepare:block")
            digest.update(ids)
            for key, n in found.items():
                counts[key] += n
            if found["words"] > found["lines"]:
                without.pop(text, None)
    if without:
        raise _no_words(next(iter(without)))
    return counts | {"sha256": digest.hexdigest()}
