"""Read a prepared corpus: memory-mapped tokens, and the lanes that a batch takes from them."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allattn.data.tokenizers import Tokenizer, load_tokenizer

DATA_FILE = "data.json"
FORMAT_VERSION = 1
_CHUNK = 1 << 18  # tokens looked at together when ids are checked
_SHIFT = 0x5817  # sets these draws apart from others of the same seed


class Corpus:
    """A folder written by `allattn prepare`.

    Attributes:
        dir: the folder.
        info: the content of its `data.json`.
        vocab_size: number of token ids.
        splits: by split name, its tokens, words, lines, bytes and sha256.
    """

    def __init__(self, dir: str | Path) -> None:
        """Read `data.json` and check the size of every split's file.

        Raises:
            FileNotFoundError: no prepared corpus there, or a file of it is missing.
            ValueError: `data.json` is damaged or of another format, or a file has a wrong size.
        """
        self.dir = Path(dir)
        path = self.dir / DATA_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such file; run `{prepare_command(self.dir)}` first"
            )
        try:
            self.info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = self.info["format_version"]
            if version != FORMAT_VERSION:
                raise ValueError(
                    f"{path}: format_version {version}, but this program reads {FORMAT_VERSION}; "
                    "prepare the corpus again"
                )
            self.vocab_size: int = self.info["vocab_size"]
            self.splits: dict[str, dict[str, Any]] = self.info["splits"]
            self._dtype = np.dtype(self.info["dtype"]).newbyteorder("<")
            sizes = {name: split["tokens"] for name, split in self.splits.items()}
            self._fingerprint: str = self.info["tokenizer"]["fingerprint"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path}: damaged or not written by `allattn prepare`; prepare the corpus again"
            ) from None
        for name, tokens in sizes.items():
            self._check_size(self.dir / f"{name}.bin", tokens)
        self._maps: dict[str, np.memmap] = {}

    def _check_size(self, path: Path, tokens: int) -> None:
        expected = tokens * self._dtype.itemsize
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; prepare the corpus again")
        if path.stat().st_size != expected:
            raise ValueError(
                f"{path}: {path.stat().st_size} bytes instead of the {expected} that "
                f"{DATA_FILE} announces; prepare the corpus again"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The corpus's tokenizer.

        Raises:
            FileNotFoundError, ValueError: its files are missing or not those of the corpus.
        """
        tokenizer = load_tokenizer(self.dir)
        if tokenizer.fingerprint() != self._fingerprint:
            raise ValueError(
                f"{self.dir}: the tokenizer there is not the one that {DATA_FILE} names; "
                "prepare the corpus again"
            )
        return tokenizer

    def tokens(self, split: str) -> np.memmap:
        """Token ids of a split, [tokens], memory-mapped and read-only.

        The first call for a split reads through it once to check the ids, unless its type cannot
        hold a wrong one.

        Raises:
            ValueError: no such split, or an id that is not below `vocab_size`.
        """
        if split not in self.splits:
            raise ValueError(f"{self.dir}: no split {split!r}; it has {', '.join(self.splits)}")
        if split not in self._maps:
            path = self.dir / f"{split}.bin"
            tokens = np.memmap(path, dtype=self._dtype, mode="r")
            if self.vocab_size <= np.iinfo(self._dtype).max:
                self._check_ids(path)
            self._maps[split] = tokens
        return self._maps[split]

    def _check_ids(self, path: Path) -> None:
        # read, not mapped: a page fault for every 4 KiB would take several times as long
        buffer = np.empty(_CHUNK, dtype=self._dtype)
        with path.open("rb") as file:
            while size := file.readinto(buffer.data):
                highest = int(buffer[: size // self._dtype.itemsize].max())
                if highest >= self.vocab_size:
                    raise ValueError(
                        f"{path}: token id {highest} in a vocabulary of {self.vocab_size}; "
                        "prepare the corpus again"
                    )


def prepare_command(folder: Path) -> str:
    """The command that would make a corpus, as far as the folder's name tells of which text."""
    texts = {
        "tiny": "--dataset tiny",
        "wikitext-2": "--dataset wikitext-2 --source FOLDER",
        "wikitext-103": "--dataset wikitext-103 --source FOLDER",
    }.get(folder.name, "--train FILE --valid FILE")
    return f"allattn prepare {texts} --out {folder}"


class Lanes:
    """A token stream cut into contiguous lanes, each read segment by segment.

    Lane l holds the tokens from l * lane_len on. Which segment a step reads depends on the step
    alone, so data order needs no state, and a rank or micro-batch takes its share of the lanes.
    With a shift, each pass starts up to seq_len - 1 tokens later, drawn from the seed and the
    pass's number: segments are then cut at other places in every pass.

    Attributes:
        lane_len: tokens in a lane that serve as inputs.
        n_segments: whole segments in a lane; the steps of one pass.
    """

    def __init__(
        self, tokens: np.ndarray, n_lanes: int, seq_len: int, shift_seed: int | None = None
    ) -> None:
        """Plan the lanes; `tokens` [tokens] is not copied.

        Args:
            tokens: token ids of one split, any integer type.
            n_lanes: lanes of the global batch.
            seq_len: tokens in a segment.
            shift_seed: start each pass at an offset drawn from this; None starts at the first
                token.

        Raises:
            ValueError: too few tokens for a segment in each lane, or a size below 1.
        """
        if n_lanes < 1 or seq_len < 1:
            raise ValueError(f"lanes ({n_lanes}) and seq_len ({seq_len}) must be at least 1")
        spare = 0 if shift_seed is None else seq_len - 1  # so that the last lane can start late
        needed = n_lanes * seq_len + 1 + spare
        if len(tokens) < needed:
            shifted = " with data.shift" if spare else ""
            raise ValueError(
                f"{len(tokens)} tokens are too few for {n_lanes} lanes of seq_len {seq_len}"
                f"{shifted}: at least {needed} are needed; lower the batch size or seq_len"
            )
        self.n_lanes = n_lanes
        self.seq_len = seq_len
        self.lane_len = (len(tokens) - 1 - spare) // n_lanes
        self.n_segments = self.lane_len // seq_len
        self._tokens = tokens
        self._shift_seed = shift_seed

    def first_token(self, step: int) -> int:
        """Where in each lane the segment of a step begins."""
        number, segment = divmod(step, self.n_segments)
        first = segment * self.seq_len
        if self._shift_seed is not None:
            drawn = np.random.SeedSequence([_SHIFT, self._shift_seed, number]).generate_state(1)
            first += int(drawn[0]) % self.seq_len
        return first

    def batch(self, step: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of lanes `first` to `last` (excluded) at a step.

        Args:
            step: optimiser step, from 0; segment `step % n_segments` of each lane is read.
            first: first lane.
            last: one past the last lane.

        Returns:
            Inputs and targets, int64 [last - first, seq_len]; targets are the next tokens.
        """
        assert step >= 0 and 0 <= first < last <= self.n_lanes, (step, first, last, self.n_lanes)
        offset = self.first_token(step)
        starts = [lane * self.lane_len + offset for lane in range(first, last)]
        rows = [self._tokens[start : start + self.seq_len + 1] for start in starts]
        both = torch.from_numpy(np.stack(rows).astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def starts_pass(self, step: int) -> bool:
        """Whether the step reads the first segment of its lanes: memory must be emptied before."""
        return step % self.n_segments == 0
