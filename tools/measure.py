"""What the benchmarks share: timing in turn, this machine's rate, peak memory, tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def device() -> torch.device:
    """The accelerator, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """For the record."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads ({torch.backends.cpu.get_cpu_capability()})"


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of a call, its kernels included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turn(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each variant; a warm-up, then a b c, a b c, ..."""
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            times[name].append(seconds(run))
    return {name: statistics.median(t) for name, t in times.items()}


def matmul_peak(dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product, the best of several."""
    n = 8192 if torch.cuda.is_available() else 2048
    a, b = (torch.randn(n, n, device=device(), dtype=dtype) for _ in range(2))
    out = torch.empty(n, n, device=device(), dtype=dtype)
    best = min(seconds(lambda: torch.mm(a, b, out=out)) for _ in range(12))
    return 2 * n**3 / best


def zipf_tokens(vocab_size: int, shape: tuple[int, int]) -> torch.Tensor:
    """Ids as frequent as words: an adaptive softmax is no cheaper or dearer than on text."""
    weights = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=generator)
    return drawn.view(shape)


def peak_resident_mb() -> float:
    """Of this process so far; not getrusage, which starts with its parent's figure."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        return "" if value is None else str(value)

    lines = [list(rows[0])] + [[cell(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines
    )
