"""What every tokenizer has, and the names of the files that define one."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import numpy as np

EOS = "<eos>"
UNK = "<unk>"
TOKENIZER_FILE = "tokenizer.json"
HF_TOKENIZER_FILE = "tokenizer_config.json"  # of an export: transformers reads it too
VOCAB_FILE = "vocab.txt"
MODEL_FILE = "tokenizer.model"


def check_text(text: str) -> None:
    """Raises ValueError naming the line where `text` holds a NUL or a lone surrogate.

    NUL is no text (a file with one is most likely binary or UTF-16), a lone surrogate has no UTF-8.
    """
    if (place := text.find("\0")) >= 0:
        line = text.count("\n", 0, place) + 1
        raise ValueError(f"line {line} holds a NUL (U+0000); remove it, or give text in UTF-8")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        wrong = f"a lone surrogate (U+{ord(text[error.start]):04X})"
        raise ValueError(f"line {line} holds {wrong}; remove it, or give valid UTF-8") from None


class Tokenizer(ABC):
    """What every tokenizer has."""

    kind: str  # "byte", "word" or "sentencepiece"
    vocab_size: int  # ids run from 0 to vocab_size - 1
    eos_id: int  # stands for the end of a line

    def encode(self, text: str) -> list[int]:
        """Ids of `text`: every newline becomes `eos_id`, and nothing is added at the end.

        Raises:
            ValueError: a NUL or a lone surrogate in the text; the message names the line.
        """
        check_text(text)
        return self._encode(text)

    def encode_array(self, text: str, dtype: np.dtype) -> np.ndarray:
        """As `encode`, into an array; for text that is known to be sound."""
        return np.array(self._encode(text), dtype=dtype)

    def encode_line(self, line: str) -> list[int]:
        """Ids of one line, given without its newline, and then `eos_id`."""
        return [*self.encode(line), self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` (list, array or tensor); `eos_id` becomes a newline.

        Bytes that are no UTF-8, as an untrained model may produce them, become U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        listed = ids.tolist() if hasattr(ids, "tolist") else [int(i) for i in ids]
        for wrong in (min(listed, default=0), max(listed, default=0)):
            if not 0 <= wrong < self.vocab_size:
                raise ValueError(f"token ids must be in 0..{self.vocab_size - 1}, not {wrong}")
        return self._decode(listed)

    def _lines(self, ids: list[int]) -> list[list[int]]:
        """Ids between the line ends."""
        lines: list[list[int]] = [[]]
        for i in ids:
            if i == self.eos_id:
                lines.append([])
            else:
                lines[-1].append(i)
        return lines

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @abstractmethod
    def _content(self) -> dict[str, bytes]:
        """The files, by name, that define this tokenizer besides `tokenizer.json`."""

    @abstractmethod
    def names(self) -> list[str]:
        """A name for every id, no two alike: the piece, the word, `<0x0A>` for a byte."""

    def fingerprint(self) -> str:
        """sha256 (hex) of all that decides which ids a text gets."""
        parts = [self.kind.encode(), *self._content().values()]
        return hashlib.sha256(b"\n".join(parts)).hexdigest()

    def describe(self) -> dict[str, str | int]:
        """What `tokenizer.json` holds."""
        sizes = {"vocab_size": self.vocab_size, "eos_id": self.eos_id}
        return {"kind": self.kind, **sizes, "fingerprint": self.fingerprint()}

    def save(self, dir: str | Path) -> None:
        """Write `tokenizer.json`, and `vocab.txt` or `tokenizer.model`, into the folder `dir`."""
        self.save_content(dir)
        path = Path(dir) / TOKENIZER_FILE
        path.write_text(json.dumps(self.describe(), indent=2) + "\n")

    def save_content(self, dir: str | Path) -> list[Path]:
        """Write `vocab.txt` or `tokenizer.model` alone; a byte tokenizer has neither."""
        folder = Path(dir)
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, content in self._content().items():
            (folder / name).write_bytes(content)
            written.append(folder / name)
        return written
