"""The log of a search, from its runs: settings, training loss and valid perplexity as they went.

    python tools/experiments/dense/collect.py RUNS [NAME=NOTE ..] > search.jsonl

A line for each folder of RUNS with logged training losses, best valid loss first; a note says what
a run's config does not show.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import yaml

WINDOW = 200  # steps that a training loss is the mean of


def summary(folder: Path, note: str) -> dict[str, Any] | None:
    """A run's line; None before its first logged loss."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    train = {row["step"]: row["loss"] for row in rows if row.get("split") == "train"}
    valid = {row["step"]: row["loss"] for row in rows if row.get("split") == "valid"}
    if not train:
        return None
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    losses = {}
    for end in range(WINDOW, max(train) + 1, WINDOW):
        if window := [loss for step, loss in train.items() if end - WINDOW < step <= end]:
            losses[end] = round(statistics.fmean(window), 4)
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


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder of the runs' folders")
    parser.add_argument("notes", nargs="*", metavar="NAME=NOTE")
    args = parser.parse_args()
    notes = dict(text.partition("=")[::2] for text in args.notes)
    folders = [path.parent for path in args.runs.glob("*/metrics.jsonl")]
    found = [summary(folder, notes.get(folder.name, "")) for folder in folders]
    for row in sorted(
        filter(None, found), key=lambda row: min(row["valid_loss"].values(), default=math.inf)
    ):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
