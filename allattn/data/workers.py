"""Do something with every block of a text, in order, in this process or in several."""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from allattn.data.base import Tokenizer
from allattn.data.sources import Block, Text, read_blocks

Work = Callable[[Any, Block], Any]
_state: Any = None  # in a worker: what the work needs besides the block


def count_words(_: None, block: Block) -> Counter[str]:
    """Words of a block, in the order of their first appearance."""
    return Counter(block.text().split())


def encode(tokenizer: Tokenizer, block: Block) -> tuple[bytes, dict[str, int]]:
    """The ids of a block, as the file holds them, and its counts."""
    text = block.text()
    ids = tokenizer.encode_array(text, id_type(tokenizer.vocab_size))
    lines = text.count("\n")
    words = len(text.split())
    counts = {"tokens": len(ids), "words": words + lines}  # a line end counts as a word
    return ids.tobytes(), counts | {"lines": lines, "bytes": len(block.data)}


def id_type(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned type that holds every id."""
    smallest: np.dtype = np.min_scalar_type(vocab_size - 1).newbyteorder("<")
    return smallest


class Crew:
    """So many processes, with the state that their work needs; a context manager."""

    def __init__(self, workers: int, state: Any = None) -> None:
        """With one worker, everything happens in this process."""
        self.workers, self.state = workers, state
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Crew":
        if self.workers > 1:
            # not fork: threads of torch and sentencepiece do not survive it
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.workers, context, _begin, (self.state,))
        return self

    def __exit__(self, *error: Any) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def over(self, work: Work, texts: Sequence[Text], what: str) -> Iterator[tuple[Text, Any]]:
        """Each text with `work(state, block)` of each of its blocks, in order.

        Raises:
            ValueError: what is wrong with a text.
            RuntimeError: a worker died.
        """
        waiting: deque[tuple[Text, int, Future[Any]]] = deque()
        with progress(texts, what) as bar:
            for text in texts:
                for block in read_blocks(text):
                    size = len(block.data)
                    if self.pool is None:
                        yield text, work(self.state, block)
                        bar.update(size)
                        continue
                    waiting.append((text, size, self._submit(work, block)))
                    # more waiting would only fill memory
                    while len(waiting) > 2 * self.workers:
                        yield self._first(waiting, bar)
            while waiting:
                yield self._first(waiting, bar)

    def _submit(self, work: Work, block: Block) -> Future[Any]:
        assert self.pool is not None, "with one worker nothing is handed out"
        try:
            with _ctrl_c_later():  # this may start a process
                return self.pool.submit(_do, work, block)
        except BrokenProcessPool:
            raise RuntimeError(_DIED) from None

    def _first(
        self, waiting: deque[tuple[Text, int, Future[Any]]], bar: "tqdm[NoReturn]"
    ) -> tuple[Text, Any]:
        text, size, future = waiting.popleft()
        try:
            result = future.result()
        except BrokenProcessPool:
            raise RuntimeError(_DIED) from None
        bar.update(size)
        return text, result


_DIED = "a worker process died, of too little memory perhaps; try again with fewer --workers"


def progress(texts: Sequence[Text], what: str) -> "tqdm[NoReturn]":
    """A bar on a terminal, nothing elsewhere; without an end where sizes are not known."""
    sizes = [text.plain_size() for text in texts]
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None)


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Keep Ctrl-C until the end: one that meets a process being started leaves it half fed.

    Processes started meanwhile inherit the mask, so Ctrl-C is for us alone, and we end our crew.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _begin(state: Any) -> None:
    global _state
    _state = state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End with a parent that was killed: nobody else would."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os._exit(1)


def _do(work: Work, block: Block) -> Any:
    return work(_state, block)
