"""What a run says while it runs: metrics.jsonl, TensorBoard, a progress bar or plain lines."""

from __future__ import annotations

import json
import math
import sys
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
        self._write(line)
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
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to a step: a resumed run writes the later ones again."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line that a kill cut short
    path.write_text("".join(kept), encoding="utf-8")
