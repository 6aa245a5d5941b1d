"""Whitespace words as tokens, with the vocabulary of Transformer-XL's word-level corpora."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np

from allattn.data.base import EOS, UNK, VOCAB_FILE, Tokenizer, check_text

_UNK_NAMES = (UNK, "<UNK>")  # the second in vocabulary files of the One Billion Word corpus


class WordTokenizer(Tokenizer):
    """Whitespace words and `<eos>` for each line end; unknown words become `<unk>`.

    Decoding joins words by one space, so only text already written that way comes back unchanged.
    """

    kind = "word"

    def __init__(self, words: Sequence[str]) -> None:
        """Take a vocabulary, in which a word's place is its id; `<eos>` and `<unk>` are needed."""
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}
        unk = next((name for name in _UNK_NAMES if name in self.ids), None)
        if len(self.ids) != len(self.words) or EOS not in self.ids or unk is None:
            raise ValueError(f"a word vocabulary must hold each word once, and {EOS} and {UNK}")
        for word in self.words:
            if word.split() != [word]:
                raise ValueError(f"{word!r} is empty or holds whitespace: not a word")
        self.vocab_size = len(self.words)
        self.eos_id = self.ids[EOS]
        self.unk_id = self.ids[unk]

    @classmethod
    def build(
        cls, blocks: Iterable[str], *, min_count: int = 1, max_vocab: int | None = None
    ) -> "WordTokenizer":
        """Learn the vocabulary of a text; see `from_counts`.

        Args:
            blocks: the text in order, cut after a newline or between two words.
            min_count: as in `from_counts`.
            max_vocab: as in `from_counts`.
        """
        check_limits(min_count, max_vocab)
        counts: Counter[str] = Counter()
        for block in blocks:
            check_text(block)
            counts.update(block.split())
        return cls.from_counts(counts, min_count=min_count, max_vocab=max_vocab)

    @classmethod
    def from_counts(
        cls, counts: Counter[str], *, min_count: int = 1, max_vocab: int | None = None
    ) -> "WordTokenizer":
        """The vocabulary of counted words: `<eos>`, then words by falling count.

        The rules of Transformer-XL's word-level corpora: `<eos>` is a special symbol, so it has
        id 0 whatever its count; ties go by first appearance, case is kept. `<unk>` has its place
        by count like any word, or the last one if the text has none.

        Args:
            counts: words in the order of their first appearance.
            min_count: leave out words rarer than this (never `<eos>` and `<unk>`); at least 1.
            max_vocab: keep at most so many types, `<eos>` and `<unk>` included; at least 2.
        """
        check_limits(min_count, max_vocab)
        # sorted() is stable, also reversed, and a Counter keeps the order of first appearance
        ranked = sorted(counts, key=counts.__getitem__, reverse=True)
        kept = [word for word in ranked if counts[word] >= min_count and word not in (EOS, UNK)]
        chosen = {UNK, *kept[: None if max_vocab is None else max_vocab - 2]}
        words = [EOS, *(word for word in ranked if word in chosen)]
        return cls(words if UNK in counts else [*words, UNK])

    @classmethod
    def from_file(cls, path: str | Path) -> "WordTokenizer":
        """Read a vocabulary of one word a line, ids by line; what follows a word is ignored.

        `<eos>` and `<unk>` (or `<UNK>`) are added at the end where the file lacks them.

        Raises:
            ValueError: not UTF-8, empty, an empty line, or a word twice.
        """
        path = Path(path)
        words: dict[str, int] = {}
        try:
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not UTF-8 text; one word a line is needed") from None
        for number, line in enumerate(lines, 1):
            word, *_ = line.split() or [""]
            if not word or word in words:
                wrong = f"{word!r} is there twice" if word else "no word"
                raise ValueError(f"{path}, line {number}: {wrong}; one word a line is needed")
            words[word] = number
        added = [] if EOS in words else [EOS]
        added += [] if any(name in words for name in _UNK_NAMES) else [UNK]
        return cls([*words, *added])

    def _encode(self, text: str) -> list[int]:
        # a line end becomes a word of its own, so that the whole text is split at once
        return list(map(self.ids.get, _split(text), repeat(self.unk_id)))

    def encode_array(self, text: str, dtype: np.dtype) -> np.ndarray:
        """As `encode`, into an array, without a list of numbers between."""
        found = _split(text)
        return np.fromiter(map(self.ids.get, found, repeat(self.unk_id)), dtype, len(found))

    def _decode(self, ids: list[int]) -> str:
        return "\n".join(" ".join(self.words[i] for i in line) for line in self._lines(ids))

    def names(self) -> list[str]:
        """The words."""
        return self.words

    def _content(self) -> dict[str, bytes]:
        return {VOCAB_FILE: "".join(word + "\n" for word in self.words).encode("utf-8")}


def check_limits(min_count: int, max_vocab: int | None) -> None:
    """ValueError where the limits of a vocabulary make no sense."""
    if min_count < 1 or (max_vocab is not None and max_vocab < 2):
        wrong = f"not {min_count} and {max_vocab}"
        raise ValueError(f"min_count must be at least 1, max_vocab at least 2, {wrong}")


def _split(text: str) -> list[str]:
    return text.replace("\n", f" {EOS} ").split()
