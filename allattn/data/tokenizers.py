"""Turn text into token ids and back: bytes, whitespace words, or sentencepiece pieces.

Every tokenizer has one id for the end of a line (`eos_id`), so that a corpus of any tokenizer has
the same line structure and word-level perplexities compare.
"""

import json
from pathlib import Path

import numpy as np

from allattn.data.base import (
    EOS,
    HF_TOKENIZER_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    UNK,
    VOCAB_FILE,
    Tokenizer,
)
from allattn.data.pieces import SentencePieceTokenizer
from allattn.data.words import WordTokenizer

__all__ = [
    "EOS", "HF_TOKENIZER_FILE", "MODEL_FILE", "TOKENIZER_FILE", "UNK", "VOCAB_FILE",
    "ByteTokenizer", "SentencePieceTokenizer", "Tokenizer", "WordTokenizer", "load_tokenizer",
    "read_tokenizer",
]  # fmt: skip


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 ids, the newline byte (10) is the line end."""

    kind = "byte"
    vocab_size = 256
    eos_id = 10

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_array(self, text: str, dtype: np.dtype) -> np.ndarray:
        """As `encode`, into an array, without a list of numbers between."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(dtype)

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def names(self) -> list[str]:
        """`<0x00>` to `<0xFF>`."""
        return [f"<0x{byte:02X}>" for byte in range(256)]

    def _content(self) -> dict[str, bytes]:
        return {}


def read_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer from anywhere: a folder with `tokenizer.json`, a `.model`, a vocabulary file.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: damaged, or not a tokenizer; says what is wrong in one line.
    """
    path = Path(path)
    if path.is_dir():
        return load_tokenizer(path)
    if not path.is_file():
        wanted = "a prepared folder, a sentencepiece .model or one word a line is needed"
        raise FileNotFoundError(f"{path}: no such file; {wanted}")
    if path.suffix != ".model":
        return WordTokenizer.from_file(path)
    try:
        return SentencePieceTokenizer(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_tokenizer(dir: str | Path) -> Tokenizer:
    """Load what `Tokenizer.save` or `export` wrote.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or of an unknown kind.
    """
    path = Path(dir) / TOKENIZER_FILE
    if not path.exists() and (Path(dir) / HF_TOKENIZER_FILE).exists():
        path = Path(dir) / HF_TOKENIZER_FILE
    description = path.name
    try:
        described = json.loads(_read(path))
        kind = described["kind"]
        expected = described["fingerprint"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f'{path}: not a description with "kind" and "fingerprint"') from None
    try:
        if kind == "byte":
            tokenizer: Tokenizer = ByteTokenizer()
        elif kind == "word":
            words = _read(path := path.with_name(VOCAB_FILE)).decode("utf-8")
            tokenizer = WordTokenizer(words.removesuffix("\n").split("\n"))
        elif kind == "sentencepiece":
            tokenizer = SentencePieceTokenizer(_read(path := path.with_name(MODEL_FILE)))
        else:
            raise ValueError(f"unknown kind {kind!r}; known are byte, word and sentencepiece")
        if tokenizer.fingerprint() != expected:
            raise ValueError(f"its fingerprint is not the one in {description}; copy both anew")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tokenizer


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; it is saved with the corpus or the model")
    return path.read_bytes()
