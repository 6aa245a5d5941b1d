"""What a run says while it runs: metrics.jsonl, TensorBoard, a progress bar or plain lines."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from allattn.config import Config
from allattn.moments import reached
from allattn.training.board import Board
from allattn.training.pictures import head_map
from allattn.training.watch import Look


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
        """Open the files of a run that is at `step`; lines and pictures of later steps go."""
        self.active, self.bar = active, None
        if not active:
            return
        self.path, self.pictures = run_dir / "metrics.jsonl", run_dir / "pictures"
        if self.path.exists():
            _drop_lines_after(self.path, step)
        for picture in self.pictures.glob("head_map_*.png"):
            if picture.stem[len("head_map_") :] > f"{step:08d}":
                picture.unlink(missing_ok=True)
        self.file = self.path.open("a", encoding="utf-8")
        if sys.stderr.isatty():
            self.bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True)
        self.board = Board(run_dir / "tensorboard", step, self.say)

    def begin(self, config: Config, stages: list[dict[str, Any]], step: int) -> None:
        """A run begins or goes on; `stages` as from `stage_table`."""
        if self.active:
            self.board.begin(config, stages, step)

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
        self.board.train(line, open_by_layer)
        text = f"loss {line['loss']:.4f}  ppl {line['ppl']:.2f}  heads {line['heads_open']}"
        if self.bar is not None:
            self.bar.set_description(f"{line['stage']}  {text}", refresh=False)
        else:
            self.say(
                f"step {line['step']:>6}  {line['stage']}  {text}  "
                f"{line['tokens_per_second']:.0f} tokens/s"
            )

    def evaluation(self, line: dict[str, Any], look: Look) -> None:
        """Log a perplexity on a split, and what else was seen then."""
        if not self.active:
            return
        self._write(line)
        title = f"step {line['step']}, {line['stage']}: {line['heads_open']} heads open"
        picture = head_map(look.p_open, title)
        self._save_picture(f"head_map_{line['step']:08d}.png", picture)
        self.board.evaluation(line, look, picture)
        self.say(
            f"step {line['step']:>6}  {line['stage']}  {line['split']} ppl {line['ppl']:.3f}  "
            f"heads {line['heads_open']}"
        )

    def event(self, line: dict[str, Any], text: str) -> None:
        """Log something that happens once (a removal, a stage)."""
        if self.active:
            self._write(line)
            self.board.text(line["event"], text, line["step"])
            self.say(f"step {line['step']:>6}  {line['stage']}  {text}")

    def flush(self) -> None:
        """Everything said so far is on disk."""
        if self.active:
            self.file.flush()
            self.board.flush()

    def close(self) -> None:
        """Close the files."""
        if self.active:
            self.file.close()
            self.board.close()
        if self.bar is not None:
            self.bar.close()

    def _save_picture(self, name: str, picture: np.ndarray) -> None:
        path = self.pictures / name
        try:
            self.pictures.mkdir(exist_ok=True)
            Image.fromarray(picture).save(path)
        except OSError as error:  # as for a line below
            self.say(f"warning: {path}: not written ({error.strerror})")

    def _write(self, line: dict[str, Any]) -> None:
        # strict JSON has no NaN: readers other than Python's would stumble
        try:
            self.file.write(json.dumps(_finite(line)) + "\n")
            self.file.flush()
        except OSError as error:  # a full disk must not end a run that may go on without this line
            self.say(f"warning: {self.path}: a line is lost ({error.strerror})")


def _finite(value: Any) -> Any:
    """None in place of every number, however deep inside, that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    reached("resume:lines")
    os.replace(partial, path)  # killed in between, all lines are still there
