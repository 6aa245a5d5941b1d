"""Table of a search from its runs: training loss against a base run, step by step.

    python tools/experiments/dense/collect.py RUNS BASE RUN.. > tools/experiments/dense/search.jsonl

Runs of one schedule see the same tokens in the same order, so their losses are compared in pairs,
100 steps at a time; a run may have been stopped early.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import yaml

WINDOW = 100


def losses(folder: Path) -> dict[int, float]:
    """Logged training losses by step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("split") == "train"]
    return {row["step"]: row["loss"] for row in rows}


def main(runs: Path, base: str, names: list[str]) -> None:
    """A line a run."""
    first = losses(runs / base)
    for name in [base, *names]:
        folder = runs / name
        own = losses(folder)
        gaps = {}
        for end in range(WINDOW, max(own) + 1, WINDOW):
            both = [own[s] - first[s] for s in own if s in first and end - WINDOW < s <= end]
            gaps[end] = round(statistics.fmean(both), 4)
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        row = {"run": name, "steps_seen": max(own), "gap": gaps, "model": config["model"]}
        row |= {"optimizer": config["train"]["optimizer"], "stages": config["stages"]}
        print(json.dumps(row | {"batch_size": config["train"]["batch_size"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
