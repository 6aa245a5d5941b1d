"""The text that the analyses look at: a fixed sample of a split, whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from allattn.data.lanes import Lanes
from allattn.pruning.importance import Stream

N_LANES = 8  # where lanes begin decides what memory a token has, so this may not depend on speed


@dataclass
class Sample:
    """The first segments of lanes spread evenly over a split.

    Attributes:
        lanes: how the split is cut.
        n_segments: read of each lane, from its beginning, with memory from one to the next.
    """

    lanes: Lanes
    n_segments: int

    @property
    def n_tokens(self) -> int:
        """Predictions in the sample."""
        return self.lanes.n_lanes * self.n_segments * self.lanes.seq_len

    def streams(
        self, batch_size: int, on_tokens: Callable[[int], object] = lambda n: None
    ) -> Iterator[Stream]:
        """Consecutive segments of up to batch_size lanes: ids and targets, int64 [B, T].

        Args:
            batch_size: lanes side by side; together the streams give every lane once.
            on_tokens: called with the number of tokens after each segment, for progress.
        """
        for first in range(0, self.lanes.n_lanes, batch_size):
            last = min(first + batch_size, self.lanes.n_lanes)
            yield self._stream(first, last, on_tokens)

    def _stream(self, first: int, last: int, on_tokens: Callable[[int], object]) -> Stream:
        for k in range(self.n_segments):
            ids_BT, targets_BT = self.lanes.batch(k, first, last)
            yield ids_BT, targets_BT
            on_tokens(ids_BT.numel())


def take_sample(tokens: np.ndarray, seq_len: int, n_tokens: int) -> Sample:
    """About n_tokens of a split in whole segments; all of it where it has fewer.

    Args:
        tokens: ids of the split, [tokens].
        seq_len: tokens a segment.
        n_tokens: how many predictions to look at.

    Raises:
        ValueError: less than one segment of text.
    """
    n_lanes = max(1, min(N_LANES, (len(tokens) - 1) // seq_len, n_tokens // seq_len))
    lanes = Lanes(tokens, n_lanes, seq_len)
    return Sample(lanes, max(1, min(lanes.n_segments, n_tokens // (n_lanes * seq_len))))
