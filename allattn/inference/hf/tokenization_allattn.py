"""`AllattnTokenizer`: an allattn tokenizer with the interface of transformers; the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from allattn.data.base import MODEL_FILE, VOCAB_FILE
from allattn.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer


def _check_model(folder: Path, inner: Tokenizer) -> None:
    """Refuse a tokenizer that is not the one of the model beside it.

    Raises:
        ValueError: naming both.
    """
    path = folder / "config.json"
    if folder.name and path.is_file():
        expected = json.loads(path.read_text(encoding="utf-8")).get("tokenizer")
        if expected not in (None, inner.fingerprint()):
            raise ValueError(
                f"{folder}: its tokenizer is not the one that the model in {path.name} was trained "
                "with; export it again"
            )


class AllattnTokenizer(PreTrainedTokenizer):
    """Words, sentencepiece pieces or bytes.

    A newline is the end token, and the end token a newline. It is the padding too, on the left:
    with `skip_special_tokens`, line ends at the very beginning are taken for padding and left out,
    all others are text.
    """

    vocab_files_names = {"vocab_file": VOCAB_FILE, "model_file": MODEL_FILE}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self,
        kind: str = "byte",
        fingerprint: str | None = None,
        vocab_file: str | None = None,
        model_file: str | None = None,
        **kwargs: Any,
    ):
        """Open the tokenizer that the files beside define.

        Args:
            kind: `word`, `sentencepiece` or `byte`.
            fingerprint: of what decides its ids, see `Tokenizer.fingerprint`.
            vocab_file: of words.
            model_file: of sentencepiece.
            **kwargs: as in transformers.

        Raises:
            ValueError, FileNotFoundError: not the files of this tokenizer.
        """
        self.inner: Tokenizer = ByteTokenizer()
        if kind != "byte":
            file = vocab_file if kind == "word" else model_file or vocab_file
            if file is None:
                wanted = VOCAB_FILE if kind == "word" else MODEL_FILE
                raise ValueError(f"{wanted}: missing; a {kind} tokenizer is made of it")
            self.inner = load_tokenizer(Path(file).parent)
        if fingerprint is not None and self.inner.fingerprint() != fingerprint:
            raise ValueError(f"not the {kind} tokenizer of fingerprint {fingerprint}")
        _check_model(Path(model_file or vocab_file or "").parent, self.inner)
        self._names = self.inner.names()
        self._ids = {name: i for i, name in enumerate(self._names)}
        end = self._names[self.inner.eos_id]
        for name in ("eos_token", "pad_token"):
            kwargs.setdefault(name, end)
        kwargs.setdefault("padding_side", "left")
        kwargs["clean_up_tokenization_spaces"] = False
        super().__init__(kind=kind, fingerprint=fingerprint or self.inner.fingerprint(), **kwargs)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.inner.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Ids by name."""
        return dict(self._ids)

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **kwargs: Any
    ) -> list[str]:
        """Names of the tokens; nothing in a text is a command, so it is not searched for any."""
        return [self._names[i] for i in self.inner.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens."""
        return self.inner.decode([self._ids[token] for token in tokens])

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            start = next((i for i, x in enumerate(ids) if x != self.inner.eos_id), len(ids))
            ids = ids[start:]
        return self.inner.decode(ids)

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Write the files that define it."""
        if filename_prefix:
            raise ValueError("filename_prefix: the names of the tokenizer's files are fixed")
        return tuple(str(path) for path in self.inner.save_content(save_directory))
