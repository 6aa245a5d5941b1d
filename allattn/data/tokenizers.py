"""Turn text into token ids and back: bytes, whitespace words, or sentencepiece pieces.

Every tokenizer has one id for the end of a line (`eos_id`), so that a corpus of any tokenizer has
the same line structure and word-level perplexities compare.
"""

import hashlib
import io
import json
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

EOS = "<eos>"
UNK = "<unk>"
TOKENIZER_FILE = "tokenizer.json"
VOCAB_FILE = "vocab.txt"
MODEL_FILE = "tokenizer.model"

# sentencepiece writes a space as U+2581, so it cannot tell the two apart: we encode the character
# itself as its three UTF-8 bytes. Its trainer would skip lines with its markers U+2585 and NUL.
_SPACE_MARK = "\u2581"
_NOT_FOR_TRAINING = re.compile("[\u2581\u2585\0]")
_TRAINING_CHUNK = 1024  # characters; its trainer skips lines over max_sentence_length bytes
_SAMPLE_BYTES = 16 << 20
_MOST_PIECES = 1_000_000  # the trainer would spend its time on anything


def _check_unicode(text: str) -> None:
    """Raises ValueError naming the line when `text` has no UTF-8 form (a lone surrogate)."""
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
            ValueError: a lone surrogate in the text; the message names the line.
        """
        _check_unicode(text)
        return self._encode(text)

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
        folder = Path(dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._content().items():
            (folder / name).write_bytes(content)
        (folder / TOKENIZER_FILE).write_text(json.dumps(self.describe(), indent=2) + "\n")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: 256 ids, the newline byte (10) is the line end."""

    kind = "byte"
    vocab_size = 256
    eos_id = 10

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def _content(self) -> dict[str, bytes]:
        return {}


class WordTokenizer(Tokenizer):
    """Whitespace words and `<eos>` for each line end; unknown words become `<unk>`.

    Decoding joins words by one space, so only text already written that way comes back unchanged.
    """

    kind = "word"

    def __init__(self, words: Sequence[str]) -> None:
        """Take a vocabulary, in which a word's place is its id; `<eos>` and `<unk>` are needed."""
        self.words = list(words)
        self.ids = {word: i for i, word in enumerate(self.words)}
        if len(self.ids) != len(self.words) or not {EOS, UNK} <= self.ids.keys():
            raise ValueError(f"a word vocabulary must hold each word once, and {EOS} and {UNK}")
        for word in self.words:
            if word.split() != [word]:
                raise ValueError(f"{word!r} is empty or holds whitespace: not a word")
        self.vocab_size = len(self.words)
        self.eos_id = self.ids[EOS]
        self.unk_id = self.ids[UNK]

    @classmethod
    def build(
        cls, blocks: Iterable[str], *, min_count: int = 1, max_vocab: int | None = None
    ) -> "WordTokenizer":
        """Learn the vocabulary of a text, ids by falling count and ties by first appearance.

        As Transformer-XL's `Vocab` with `add_eos`: `<eos>` is a type like any other, counted once a
        line. `<unk>` has its place by count too, or the last one if the text has none.

        Args:
            blocks: the text in order, cut after a newline or between two words.
            min_count: leave out words rarer than this (never `<eos>` and `<unk>`); at least 1.
            max_vocab: keep at most so many types, `<eos>` and `<unk>` included; at least 2.
        """
        if min_count < 1 or (max_vocab is not None and max_vocab < 2):
            wrong = f"not {min_count} and {max_vocab}"
            raise ValueError(f"min_count must be at least 1, max_vocab at least 2, {wrong}")
        counts: Counter[str] = Counter()
        for block in blocks:
            _check_unicode(block)
            *lines, rest = block.split("\n")
            for line in lines:
                counts.update(line.split())
                counts[EOS] += 1
            counts.update(rest.split())
        # sorted() is stable, also reversed, and a Counter keeps the order of first appearance
        ranked = sorted(counts, key=counts.__getitem__, reverse=True)
        kept = [word for word in ranked if counts[word] >= min_count and word not in (EOS, UNK)]
        chosen = {EOS, UNK, *kept[: None if max_vocab is None else max_vocab - 2]}
        words = [word for word in ranked if word in chosen]
        return cls(words + [special for special in (EOS, UNK) if special not in counts])

    def _encode(self, text: str) -> list[int]:
        get, unk, eos = self.ids.get, self.unk_id, self.eos_id
        ids: list[int] = []
        for number, line in enumerate(text.split("\n")):
            if number:
                ids.append(eos)
            ids.extend([get(word, unk) for word in line.split()])
        return ids

    def _decode(self, ids: list[int]) -> str:
        return "\n".join(" ".join(self.words[i] for i in line) for line in self._lines(ids))

    def _content(self) -> dict[str, bytes]:
        return {VOCAB_FILE: "".join(word + "\n" for word in self.words).encode("utf-8")}


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model that loses nothing: no normalization, and bytes where no piece fits.

    The line end is the model's own `</s>` piece; lines are encoded one by one.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        """Take a serialized model with `</s>` and byte_fallback; ValueError for anything else."""
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ValueError("not a sentencepiece model") from None
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        mark = [self._processor.piece_to_id(f"<0x{b:02X}>") for b in _SPACE_MARK.encode("utf-8")]
        if self.eos_id < 0 or not all(self._processor.is_byte(i) for i in mark):
            raise ValueError("a sentencepiece model must have an end piece and byte_fallback")
        self._mark_ids = mark

    @classmethod
    def train(
        cls,
        blocks: Iterable[str],
        *,
        vocab_size: int,
        model_type: str = "unigram",
        total_bytes: int = 0,
        sample_bytes: int = _SAMPLE_BYTES,
        seed: int = 1,
    ) -> "SentencePieceTokenizer":
        """Train on a seeded sample of a text; the same text and arguments give the same model.

        Args:
            blocks: the text.
            vocab_size: number of pieces, the 256 bytes, `<unk>` and `</s>` included.
            model_type: "unigram" or "bpe".
            total_bytes: size of the text; 0 takes all of it.
            sample_bytes: what exceeds this is left out at random: it bounds the trainer's memory.
            seed: of the sample.

        Raises:
            ValueError: a size that the text cannot fill, or below that of its characters (the
                message names the possible one); an unknown model_type; no text.
        """
        if model_type not in ("unigram", "bpe"):
            raise ValueError(f"model_type must be unigram or bpe, not {model_type!r}")
        if not 2 <= vocab_size <= _MOST_PIECES:
            raise ValueError(f"vocab_size must be from 2 to {_MOST_PIECES}, not {vocab_size}")
        model = io.BytesIO()
        # a list: older sentencepiece takes an error of the iterator for the end of the text
        sample = list(_sample(blocks, total_bytes, sample_bytes, seed))
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample),
                model_writer=model,
                vocab_size=vocab_size,
                model_type=model_type,
                byte_fallback=True,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                max_sentence_length=8 * _TRAINING_CHUNK,
                num_threads=4,  # fixed: float sums of the trainer depend on it
                minloglevel=9,
                **{"unk_id": 0, "eos_id": 1, "bos_id": -1, "pad_id": -1},
            )
        except RuntimeError as error:
            raise ValueError(_explain(str(error), vocab_size, model_type)) from None
        return cls(model.getvalue())

    def _encode(self, text: str) -> list[int]:
        separators = {"\n": [self.eos_id], _SPACE_MARK: self._mark_ids}
        first, *others = re.split(f"([\n{_SPACE_MARK}])", text)
        ids: list[int] = self._processor.encode(first)
        encoded = self._processor.encode(others[1::2])
        for separator, part in zip(others[::2], encoded, strict=True):
            ids += separators[separator]
            ids += part
        return ids

    def _decode(self, ids: list[int]) -> str:
        return "\n".join(self._processor.decode(self._lines(ids)))

    def _content(self) -> dict[str, bytes]:
        return {MODEL_FILE: self.model}


def _sample(blocks: Iterable[str], total: int, wanted: int, seed: int) -> Iterator[str]:
    """Short pieces of the text, each taken with probability wanted / total (in bytes)."""
    draw = random.Random(seed).random
    share = 1.0 if total <= wanted else wanted / total
    for block in blocks:
        _check_unicode(block)
        for line in _NOT_FOR_TRAINING.sub("\n", block).split("\n"):
            for start in range(0, len(line), _TRAINING_CHUNK):
                if share == 1.0 or draw() < share:
                    yield line[start : start + _TRAINING_CHUNK]


def _explain(message: str, vocab_size: int, model_type: str) -> str:
    """One line from what sentencepiece's trainer says."""
    size = f"vocab_size {vocab_size} is too"
    if found := re.search(r"value <= (\d+)", message):
        return f"{size} large for {model_type} on this text; the largest possible is {found[1]}"
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"{size} small for the characters of this text; the smallest possible is {found[1]}"
    if "sentences_.empty()" in message:
        return "the text has nothing to train a sentencepiece vocabulary on; give it more text"
    return "sentencepiece could not be trained: " + " ".join(message.split())


def load_tokenizer(dir: str | Path) -> Tokenizer:
    """Load what `Tokenizer.save` wrote.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or of an unknown kind.
    """
    path = Path(dir) / TOKENIZER_FILE
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
            raise ValueError(f"its fingerprint is not the one in {TOKENIZER_FILE}; copy both anew")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return tokenizer


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; it is saved with the corpus or the model")
    return path.read_bytes()
