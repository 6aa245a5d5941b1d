"""What came of an experiment's runs: sizes, curves, perplexities, seconds, circumstances."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiment import Experiment, Run

from allattn.analysis.survival import read_metrics
from allattn.inference.evaluate import evaluate_source
from allattn.inference.load import Source, open_source
from allattn.model.transformer import count_parameters, flops_per_token
from allattn.training.state import read_json, write_json


def results(experiment: Experiment) -> dict[str, Any]:
    """What came of the finished runs, and under which circumstances each was trained.

    `valid_ppl` is that of the run's own last evaluation.

    Raises:
        ValueError: a run lost or damaged a file.
    """
    rows = []
    for run in experiment.runs:
        if not experiment.finished(run):
            continue
        try:
            rows.append(_row(experiment, run))
        except (OSError, ValueError, LookupError) as error:
            raise ValueError(
                f"{experiment.path(run)}: lost or damaged ({error}); remove it to train it again"
            ) from None
    return {
        "claim": experiment.claim,
        "smoke": experiment.smoke,
        "runs": rows,
        "missing": [run.name for run in experiment.runs if not experiment.finished(run)],
    }


def _row(experiment: Experiment, run: Run) -> dict[str, Any]:
    folder = experiment.path(run)
    source = open_source(folder)
    parts = count_parameters(source.config)
    note = experiment.runs_dir / f"{run.name}.json"
    trained = read_json(note) if note.exists() else {"seconds": None}
    lines = read_metrics(folder / "metrics.jsonl")
    curve = [[x["step"], round(x["ppl"], 3)] for x in lines if x.get("split") == "valid"]
    if curve[-1][0] != run.steps:
        raise ValueError(f"metrics.jsonl: no evaluation of step {run.steps}")
    test = _test(folder, source, run) if experiment.test and "group" in run.entry else {}
    return {
        "name": run.entry["name"],
        "group": run.entry.get("group", ""),
        "label": run.label,
        "share": run.entry.get("share"),
        "seed": run.seed,
        "steps": run.steps,
        "train_tokens": run.steps * run.config.train.batch_size * run.config.model.seq_len,
        # of this run alone: what it shares with `after` is counted there
        "wall_seconds": trained.pop("seconds"),
        "after": run.after,
        "train_seconds": round(train_seconds(run, lines), 1),
        "settings": run.entry.get("set", []),
        "config": run.entry["config"],
        "heads": source.config.heads,
        "params": sum(parts.values()),
        "params_non_embedding": sum(parts.values()) - parts["vocabulary"],
        "flops_per_token": flops_per_token(source.config),
        "valid_curve": curve,
        "valid_ppl": curve[-1][1],
        "test_ppl": test.get("ppl"),
        "word_ppl": test.get("word_ppl"),
        "circumstances": trained,
    }


def _test(folder: Path, source: Source, run: Run) -> dict[str, Any]:
    """A run's evaluation on the test split, made once and kept beside it, in `test.json`."""
    kept = folder / "test.json"
    if not kept.exists():
        print(f"{run.name}: test split", file=sys.stderr)
        write_json(kept, evaluate_source(source, source.corpus(run.config.data.dir), "test"))
    return read_json(kept)


def train_seconds(run: Run, lines: list[dict[str, Any]]) -> float:
    """Time in optimiser steps, from the logged throughput: evaluation and saving left out."""
    size = run.config.train.batch_size * run.config.model.seq_len
    lines = [x for x in lines if x.get("split") == "train"]
    done = [0, *(x["step"] for x in lines)]
    return sum(
        (line["step"] - before) * size / line["tokens_per_second"]
        for before, line in zip(done, lines, strict=False)
    )
