"""Read CoNLL-U, the file format of Universal Dependencies: words, their heads, their relations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = 10
_WORD = re.compile(r"[1-9][0-9]*")
_NOT_A_WORD = re.compile(r"[1-9][0-9]*-[1-9][0-9]*|(0|[1-9][0-9]*)\.[1-9][0-9]*")


@dataclass(frozen=True)
class Word:
    """One syntactic word.

    Attributes:
        form: as it is written.
        head: place of its head in the sentence, from 0; None for the root.
        relation: to its head, as in the file, subtype included (`nsubj:pass`).
    """

    form: str
    head: int | None
    relation: str


Sentence = list[Word]


def read_conllu(path: str | Path) -> list[Sentence]:
    """The sentences of a file.

    The words are the syntactic ones: of a multiword token (line `1-2`, "don't") its parts ("do",
    "n't") count and the token itself does not; empty nodes (`1.1`) are no words. A byte order mark,
    CRLF line ends, comments and a missing last blank line are all fine.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: not CoNLL-U; names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a CoNLL-U file is needed")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {number}: not UTF-8 text, which CoNLL-U has to be"
        ) from None
    sentences: list[Sentence] = []
    words: Sentence = []
    numbers: list[int] = []  # the lines of the words
    # not splitlines(): a form may hold what that takes for a line end
    for number, line in enumerate([*text.split("\n"), ""], 1):
        line = line.removesuffix("\r")
        try:
            if not line.strip():
                if words:
                    _check_heads(words, numbers)
                    sentences.append(words)
                words, numbers = [], []
            elif not line.startswith("#"):
                word = _read_word(line, len(words) + 1)
                if word is not None:
                    words.append(word)
                    numbers.append(number)
        except _BadHead as error:
            raise ValueError(f"{path}, line {error.number}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not sentences:
        raise ValueError(
            f"{path}: holds no sentence; a CoNLL-U file has lines of {_COLUMNS} columns"
        )
    return sentences


class _BadHead(ValueError):
    """A head that the sentence does not have: known only where the sentence ends."""

    def __init__(self, number: int, text: str):
        super().__init__(text)
        self.number = number


def _read_word(line: str, expected: int) -> Word | None:
    """A word line; None for the lines of multiword tokens and empty nodes."""
    columns = line.split("\t")
    if len(columns) != _COLUMNS:
        raise ValueError(f"{len(columns)} columns, not {_COLUMNS} with tabs between them")
    number, form, head, relation = columns[0], columns[1], columns[6], columns[7]
    if _NOT_A_WORD.fullmatch(number):
        return None
    if not _WORD.fullmatch(number):
        raise ValueError(f"{number!r} is no word number: 1, or 1-2, or 1.1 would be")
    if int(number) != expected:
        raise ValueError(f"word {number} where word {expected} of the sentence has to come")
    if not form.strip() or "\0" in form:
        raise ValueError(f"{form!r} is no word form; it must hold text, without NUL")
    if not head.isascii() or not head.isdecimal():
        raise ValueError(f"{head!r} is no head: the number of a word is, or 0 for the root")
    return Word(form, int(head) - 1 if int(head) else None, relation)


def _check_heads(words: Sentence, numbers: list[int]) -> None:
    for i, (word, number) in enumerate(zip(words, numbers, strict=True)):
        if word.head is not None and (word.head >= len(words) or word.head == i):
            wrong = "is the word itself" if word.head == i else f"of {len(words)} words"
            raise _BadHead(number, f"head {word.head + 1} {wrong}; another word's number, or 0")
    for i, number in enumerate(numbers):
        seen: set[int] = set()
        at: int | None = i
        while at is not None and at not in seen:
            seen.add(at)
            at = words[at].head
        if at == i:
            raise _BadHead(number, f"word {i + 1} hangs, over its heads, from itself; none may")
