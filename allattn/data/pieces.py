"""Pieces of words as tokens: sentencepiece models, trained here or elsewhere."""

import io
import random
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from allattn.data.base import MODEL_FILE, Tokenizer, check_text

# sentencepiece writes a space as U+2581, so it cannot tell the two apart: we encode the character
# itself as its three UTF-8 bytes. Its trainer would skip lines with its markers U+2585 and NUL.
_SPACE_MARK = "\u2581"
_NOT_FOR_TRAINING = re.compile("[\u2581\u2585\0]")
_TRAINING_CHUNK = 1024  # characters; its trainer skips lines over max_sentence_length bytes
_SAMPLE_BYTES = 16 << 20
_MOST_PIECES = 1_000_000  # the trainer would spend its time on anything


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model; the line end is its own `</s>` piece, lines are encoded one by one.

    One trained here loses nothing: no normalization, and bytes where no piece fits. One from
    elsewhere may normalize, or lack bytes: then decoding gives what it makes of the text.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        """Take a serialized model with an end piece (`</s>`); ValueError for anything else."""
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ValueError("not a sentencepiece model") from None
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        mark = [self._processor.piece_to_id(f"<0x{b:02X}>") for b in _SPACE_MARK.encode("utf-8")]
        if self.eos_id < 0:
            raise ValueError("a sentencepiece model must have an end piece (</s>): train with one")
        self.lossless = all(self._processor.is_byte(i) for i in mark)
        self._mark_ids = mark if self.lossless else [self._processor.unk_id()]

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
                unk_id=0,
                eos_id=1,
                bos_id=-1,
                pad_id=-1,
            )
        except RuntimeError as error:
            raise ValueError(_explain(str(error), vocab_size, model_type)) from None
        return cls(model.getvalue())

    def _encode(self, text: str) -> list[int]:
        separators = {"\n": [self.eos_id], _SPACE_MARK: self._mark_ids}
        first, *others = re.split(f"([\n{_SPACE_MARK}])", text)
        ids: list[int] = self._processor.encode(first)
        encoded = self._processor.encode(others[1::2], num_threads=1)
        for separator, part in zip(others[::2], encoded, strict=True):
            ids += separators[separator]
            ids += part
        return ids

    def _decode(self, ids: list[int]) -> str:
        return "\n".join(self._processor.decode(self._lines(ids)))

    def names(self) -> list[str]:
        """The pieces."""
        return self._processor.id_to_piece(list(range(self.vocab_size)))

    def _content(self) -> dict[str, bytes]:
        return {MODEL_FILE: self.model}


def _sample(blocks: Iterable[str], total: int, wanted: int, seed: int) -> Iterator[str]:
    """Short pieces of the text, each taken with probability wanted / total (in bytes)."""
    draw = random.Random(seed).random
    share = 1.0 if total <= wanted else wanted / total
    for block in blocks:
        check_text(block)
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
