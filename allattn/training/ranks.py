"""The processes of a run: who we are among them, what they share, and noticing that one is gone."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor

BEAT, SILENCE = 2.0, 30.0  # seconds between signs of life; without one for so long a rank is gone


@dataclass
class World:
    """Who we are among the ranks."""

    rank: int
    size: int
    device: torch.device
    deepspeed: bool
    watch: PeerWatch | None = None

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(values)
        return values

    def gather_lanes(self, lanes: Tensor) -> Tensor:
        """Concatenate every rank's lanes, in rank order."""
        if self.size == 1:
            return lanes
        parts = [torch.empty_like(lanes) for _ in range(self.size)]
        torch.distributed.all_gather(parts, lanes.contiguous())
        return torch.cat(parts)

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            torch.distributed.barrier()

    def is_lost_connection(self, error: RuntimeError) -> bool:
        """Whether an error is a collective's that another rank did not take part in."""
        if self.size == 1:
            return False
        signs = ("gloo", "NCCL", "onnection", "Broken pipe", "imed out")
        text = str(error)
        return isinstance(error, torch.distributed.DistError) or any(s in text for s in signs)

    def close(self) -> None:
        """Leave the process group."""
        if self.watch is not None:
            self.watch.leave()
        if self.deepspeed:
            torch.distributed.destroy_process_group()


class PeerWatch(threading.Thread):
    """Ends this process, with a word, when another rank died: collectives may wait for ever then.

    Every rank counts up a key of its own in the process group's store; one that stands still was
    killed, or its machine is gone.
    """

    def __init__(self, rank: int, size: int):
        """Start watching the other ranks of the default process group."""
        super().__init__(daemon=True)
        self.rank, self.peers = rank, [r for r in range(size) if r != rank]
        self.store = torch.distributed.distributed_c10d._get_default_store()
        self.left = threading.Event()
        self.start()

    def leave(self) -> None:
        """This rank ends in good order: the others must not miss it."""
        self.left.set()
        self.join()
        try:
            self.store.set(_key(self.rank), "left")
        except RuntimeError:
            return  # the rank that holds the store has left before: nobody is there to miss us

    def run(self) -> None:
        """Until `leave`."""
        last: dict[int, tuple[str, float]] = {}
        failures = beats = 0
        while not self.left.wait(BEAT):
            beats += 1
            try:
                self.store.set(_key(self.rank), str(beats))
                now = time.monotonic()
                for peer in self.peers:
                    seen = ""
                    if self.store.check([_key(peer)]):
                        seen = self.store.get(_key(peer)).decode()
                    if peer not in last or last[peer][0] != seen:
                        last[peer] = (seen, now)
                    elif seen not in ("", "left") and now - last[peer][1] > SILENCE:
                        self._end(f"rank {peer} gave no sign of life for {SILENCE:.0f} s")
                failures = 0
            except RuntimeError:
                failures += 1
                if failures * BEAT >= 10 and not self.left.is_set():
                    self._end("rank 0, or the connection to it, is gone")

    def _end(self, why: str) -> None:
        print(
            f"allattn: error: rank {self.rank} ends: {why}; continue from the newest checkpoint "
            "with --resume",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _key(rank: int) -> str:
    return f"allattn/alive/{rank}"
