"""WikiText: where its files are, in every form that it is handed around in, and its counts."""

from pathlib import Path
from typing import Any

from allattn.data.sources import Text, members_of

SPLITS = ("train", "valid", "test")
# words and line ends by split, and word types, of the tokenised variants
COUNTS = {
    "wikitext-2": ({"train": 2_088_628, "valid": 217_646, "test": 245_569}, 33_278),
    "wikitext-103": ({"train": 103_227_021, "valid": 217_646, "test": 245_569}, 267_735),
}
_WANTED = "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (or the three as .raw)"
_ROW_NAMES = {"train": "train", "valid": "validation", "test": "test"}


def find(dataset: str, source: str | Path | None) -> tuple[dict[str, list[Text]], bool]:
    """The texts by split, and whether they are the tokenised variant, whose counts are known.

    Args:
        dataset: a key of `COUNTS`.
        source: the folder with `wiki.*.tokens` or `wiki.*.raw` (also `.gz`, `.xz`) or with
            `train-*.parquet` and so on, the folder above it, or the `.zip` that holds it.

    Raises:
        FileNotFoundError: not all three splits are there.
        ValueError: no source given, or a damaged archive.
    """
    if source is None:
        raise ValueError(f"{dataset} needs a source: the folder that holds {_WANTED}")
    source = Path(source)
    if source.is_file() and source.suffix == ".zip":
        names = {Path(name).name: name for name in members_of(source)}
        for ending in ("tokens", "raw"):
            wanted = {split: f"wiki.{split}.{ending}" for split in SPLITS}
            if names.keys() >= set(wanted.values()):
                files = {split: [Text(source, names[name])] for split, name in wanted.items()}
                return files, ending == "tokens"
    inside = (f"{dataset}{middle}" for middle in ("", "-raw", "-v1", "-raw-v1"))
    for folder in (source, *(source / name for name in inside)):
        for ending in ("tokens", "raw"):
            for packed in ("", ".gz", ".xz"):
                paths = {s: folder / f"wiki.{s}.{ending}{packed}" for s in SPLITS}
                if all(path.is_file() for path in paths.values()):
                    return {s: [Text(path)] for s, path in paths.items()}, ending == "tokens"
        rows = {s: sorted(folder.glob(f"{name}-*.parquet")) for s, name in _ROW_NAMES.items()}
        if all(rows.values()):
            files = {split: [Text(path) for path in paths] for split, paths in rows.items()}
            return files, "raw" not in folder.name
    raise FileNotFoundError(f"{source}: the folder of {dataset} must hold {_WANTED}")


def check_counts(
    dataset: str,
    options: dict[str, Any],
    files: dict[str, list[Text]],
    splits: dict[str, Any],
    types: int,
) -> None:
    """ValueError unless a tokenised WikiText has its known counts."""
    words, known_types = COUNTS[dataset]
    hint = "get the complete file, or pass accept_counts=True (--accept-counts)"
    for split, (text, *_) in files.items():
        count = splits[split]["words"]
        if count != words[split]:
            wrong = f"{count:,} words and line ends, but {dataset} has {words[split]:,}"
            raise ValueError(f"{text}: {wrong}; {hint}")
    whole = {"tokenizer": "word", "min_count": 1, "max_vocab": None}
    if whole.items() <= options.items() and types != known_types:
        text = files["train"][0]
        raise ValueError(f"{text}: {types:,} types, but {dataset} has {known_types:,}; {hint}")


def download(dataset: str) -> Path:
    """Fetch the tokenised variant into the cache of `huggingface_hub`; returns its folder.

    Raises:
        ValueError: the extra is not installed, or there is no network.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        wrong = "downloading needs an extra: pip install 'allattn[download]'"
        raise ValueError(f"{dataset}: {wrong}, or name the files' folder with --source") from None
    name = f"{dataset}-v1"
    try:
        got = snapshot_download(
            "Salesforce/wikitext", repo_type="dataset", allow_patterns=f"{name}/*"
        )
    except Exception as error:  # whatever its layers raise, to the user it is one thing
        wrong = f"cannot be downloaded ({type(error).__name__}); is there a network?"
        raise ValueError(f"{dataset}: {wrong} Else name its folder with --source") from None
    return Path(got) / name
