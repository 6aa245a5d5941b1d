"""A whole run, as small as one can be, and what a run leaves behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

TINY_RUN = """
run: {name: run, dir: RUNS, seed: 3}
data: {dir: DATA}
model: {n_layers: 2, d_model: 16, n_heads: 4, n_persistent: 8, seq_len: 16, mem_len: 16,
        dropout: 0.0}
train: {batch_size: 4, eval_batch_size: 4, optimizer: {lr: 4.0e-3}, eval_every: 1000,
        save_every: 1000, log_every: 1}
stages:
  - {name: dense, steps: 4, lr: {schedule: linear, warmup_steps: 2, final: 0.5}}
  - name: prune
    steps: 6
    prune: {method: hard_concrete, keep: 0.5, gate_lr: 0.2, warmup_steps: 2, remove: end}
  - {name: tune, steps: 4, lr: {schedule: cosine}}
"""
STEPS, DENSE_END, PRUNE_END = 14, 4, 10  # of TINY_RUN
HEADS = 8

# Gates on the edge between open and closed, pushed by the loss alone: some close before the end
EDGE_GATES = [
    "stages[1].prune.keep=null", "stages[1].prune.penalty=0", "stages[1].prune.gate_init=-0.8",
]  # fmt: skip


@dataclass
class Run:
    """A run's folder, read."""

    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [line for line in self.lines if line.get("event") == name]

    def losses(self) -> dict[tuple[str, int], float]:
        """The loss of every step, by split and step."""
        return {(row["split"], row["step"]): row["loss"] for row in self.lines if "loss" in row}

    def checkpoint(self, step: int) -> Path:
        """A checkpoint's folder."""
        return self.folder / "checkpoints" / f"step_{step:08d}"

    def tensors(self, step: int, kind: str) -> dict[str, Tensor]:
        """`parameters`, `optimizer` or `memory` of a checkpoint."""
        return load_file(self.checkpoint(step) / f"{kind}.safetensors")

    def meta(self, step: int) -> dict[str, Any]:
        """meta.json of a checkpoint."""
        return json.loads((self.checkpoint(step) / "meta.json").read_text(encoding="utf-8"))

    def timeless(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what the clock decides."""
        clock = {"tokens_per_second", "mfu", "peak_memory_mb"}
        return [{k: v for k, v in row.items() if k not in clock} for row in self.lines]


def written_long_ago(run: Path) -> None:
    """TensorBoard reads event files in the order of their names, which begin with a second.

    A test goes on with a run within that second: the files that are there get an earlier one.
    """
    for path in (run / "tensorboard").glob("events.out.tfevents.*"):
        events, out, tfevents, second, *rest = path.name.split(".")
        earlier = f"{int(second) - 1_000_000:010d}"
        path.rename(path.with_name(".".join([events, out, tfevents, earlier, *rest])))


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Names, shapes and every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
