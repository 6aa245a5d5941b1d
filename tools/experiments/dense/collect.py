"""The log of a search, from its runs: settings, training loss and valid perplexity as they went.

    python tools/experiments/dense/collect.py RUNS [NAME=NOTE ..] > search.jsonl

A line for each folder of RUNS that has metrics, best valid loss first; a note says what a run's
config does not show.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

WINDOW = 200  # steps that a training loss is the mean of


def summary(folder: Path, note: str) -> dict[str, Any]:
    """A run's line."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    train = {row["step"]: row["loss"] for row in rows if row.get("split") == "train"}
    valid = {row["step"]: row["loss"] for row in rows if row.get("split") == "valid"}
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    losses = {
        end: round(statistics.fmean(x for s, x in train.items() if end - WINDOW < s <= end), 4)
        for end in range(WINDOW, max(train) + 1, WINDOW)
    }
    return {
        "run": folder.name,
        "note": note,
        "steps": sum(stage["steps"] for stage in config["stages"]),
        "valid_loss": {step: round(loss, 4) for step, loss in valid.items()},
        "valid_ppl": {step: round(math.exp(loss), 2) for step, loss in valid.items()},
        "train_loss": losses,
        "model": config["model"],
        "train": config["train"],
        "stages": config["stages"],
    }


def main(runs: Path, notes: dict[str, str]) -> None:
    """Print the lines."""
    folders = [path.parent for path in runs.glob("*/metrics.jsonl")]
    found = [summary(folder, notes.get(folder.name, "")) for folder in folders]
    for row in sorted(found, key=lambda row: min(row["valid_loss"].values(), default=math.inf)):
        print(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(text.split("=", 1) for text in sys.argv[2:]))
