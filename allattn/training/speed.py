"""How fast a run trains, against what its machine can do, and how much memory it takes."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from allattn.training.ranks import World


class Speedometer:
    """Tokens a second of training alone, and what share of this machine's rate that is.

    Attributes:
        peak: FLOP/s of matrix products, of all ranks together, each measured beside the others.
    """

    def __init__(self, world: World, dtype: torch.dtype):
        """Measure the machine (all ranks must call it), in the precision of the run's products."""
        self.world = world
        rate = torch.tensor(matmul_rate(world.device, dtype), device=world.device)
        self.peak = float(world.sum(rate))
        self.start()

    def start(self) -> None:
        """Count from here."""
        self.began, self.tokens = time.perf_counter(), 0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what happens within: evaluation, not training."""
        started = time.perf_counter()
        yield
        self.began += time.perf_counter() - started

    def read(self, flops: int) -> dict[str, float]:
        """Speed since the start, for the log; starts again.

        Args:
            flops: of one token's forward pass; forward and backward count as three of them.
        """
        speed = self.tokens / (time.perf_counter() - self.began)
        self.start()
        return {
            "tokens_per_second": speed,
            "mfu": 3 * flops * speed / self.peak,
            "peak_memory_mb": peak_memory_mb(self.world.device),
        }


@functools.cache
def matmul_rate(device: torch.device, dtype: torch.dtype, budget: float = 0.06) -> float:
    """FLOP/s of a large square matrix product, the best of several; measured once a process.

    Args:
        device: where.
        dtype: of the factors.
        budget: seconds to repeat it in, after a warm-up (one at least).
    """
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.full((n, n), 0.5, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty(n, n, device=device, dtype=dtype)

    def seconds() -> float:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    seconds()
    times = [seconds()]
    while sum(times) < budget:
        times.append(seconds())
    return 2 * n**3 / min(times)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MB: resident, or allocated on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path("/proc/self/status")
    if status.exists():
        # not getrusage: its figure starts with that of the process which started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
