"""What a run says while it runs: metrics.jsonl, TensorBoard, a progress bar or plain lines."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# metrics.jsonl key -> TensorBoard tag, for training lines
TRAIN_TAGS = {
    "loss": "train/loss",
    "ppl": "train/ppl",
    "lr": "train/lr",
    "gate_lr": "train/gate_lr",
    "grad_norm": "train/grad_norm",
    "tokens_per_second": "perf/tokens_per_second",
    "sparsity": "prune/sparsity",
    "penalty": "prune/penalty",
    "penalty_weight": "prune/penalty_weight",
    "penalty_weight_quadratic": "prune/penalty_weight_quadratic",
    "expected_heads": "prune/expected_heads",
    "target_heads": "prune/target_heads",
    "distill": "train/distill",
    "distill_weight": "train/distill_weight",
}


@dataclass
class SpikeDetector:
    """Tells a loss that leaps from one that wavers: four deviations above its running mean.

    Attributes:
        mean: of the losses so far, the last 20 or so weighing most.
        square: the same of their squares.
        seen: how many there were.
    """

    mean: float = 0.0
    square: float = 0.0
    seen: int = 0

    def rises(self, loss: float) -> bool:
        """Take a step's loss in; whether it is a spike."""
        deviation = math.sqrt(max(self.square - self.mean**2, 0.0))
        spike = self.seen >= 20 and loss > self.mean + max(4 * deviation, 0.3)
        if not spike:  # else the mean to compare with would rise with it
            self.seen += 1
            weight = max(1 / self.seen, 0.05)
            self.mean += weight * (loss - self.mean)
            self.square += weight * (loss**2 - self.square)
        return spike


class Monitor:
    """Writes for rank 0; on other ranks every method does nothing."""

    def __init__(self, run_dir: Path, step: int, total_steps: int, active: bool):
        """Open the files of a run that is at `step`; lines of later steps are dropped."""
        self.active, self.writer, self.bar = active, None, None
        if not active:
            return
        self.path = run_dir / "metrics.jsonl"
        if self.path.exists():
            _drop_lines_after(self.path, step)
        self.file = self.path.open("a", encoding="utf-8")
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        if sys.stderr.isatty():
            self.bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """One line for people, on stderr."""
        if self.active:
            if self.bar is not None:
                self.bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    def advance(self) -> None:
        """One step is done."""
        if self.bar is not None:
            self.bar.update()

    def train(self, line: dict[str, Any], open_by_layer: list[int]) -> None:
        """Log a training line."""
        if not self.active:
            return
        self._write(line | {"heads_by_layer": open_by_layer})
        for key, tag in TRAIN_TAGS.items():
            if key in line:
                self.writer.add_scalar(tag, line[key], line["step"])
        for i, n in enumerate(open_by_layer):
            self.writer.add_scalar(f"gates/layer_{i:02d}/open", n, line["step"])
        text = f"loss {line['loss']:.4f}  ppl {line['ppl']:.2f}  heads {line['heads_open']}"
        if self.bar is not None:
            self.bar.set_description(f"{line['stage']}  {text}", refresh=False)
        else:
            self.say(
                f"step {line['step']:>6}  {line['stage']}  {text}  "
                f"{line['tokens_per_second']:.0f} tokens/s"
            )

    def evaluation(self, line: dict[str, Any]) -> None:
        """Log a perplexity on a split."""
        if not self.active:
            return
        self._write(line)
        self.writer.add_scalar(f"{line['split']}/loss", line["loss"], line["step"])
        self.writer.add_scalar(f"{line['split']}/ppl", line["ppl"], line["step"])
        self.say(
            f"step {line['step']:>6}  {line['stage']}  {line['split']} ppl {line['ppl']:.3f}  "
            f"heads {line['heads_open']}"
        )

    def event(self, line: dict[str, Any], text: str) -> None:
        """Log something that happens once (a removal, a stage)."""
        if self.active:
            self._write(line)
            self.writer.add_text(line["event"], text, line["step"])
            self.say(f"step {line['step']:>6}  {line['stage']}  {text}")

    def flush(self) -> None:
        """Everything said so far is on disk."""
        if self.active:
            self.file.flush()
            self.writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self.active:
            self.file.close()
            self.writer.close()
        if self.bar is not None:
            self.bar.close()

    def _write(self, line: dict[str, Any]) -> None:
        # strict JSON has no NaN: readers other than Python's would stumble
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
        }
        try:
            self.file.write(json.dumps(clean) + "\n")
            self.file.flush()
        except OSError as error:  # a full disk must not end a run that may go on without this line
            self.say(f"warning: {self.path}: a line is lost ({error.strerror})")


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to a step: a resumed run writes the later ones again."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut short
    partial = path.with_name(f".partial_{path.name}")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)  # killed in between, all lines are still there
