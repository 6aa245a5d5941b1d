"""Train or resume all runs of an experiment, then write what came of them.

    python tools/experiments/run.py claim1_figure --data data/wikitext-2-sp4000
    python tools/experiments/run.py claim1_figure --smoke       # a few steps of everything
    python tools/experiments/run.py claim1_figure --seeds 1 2   # instead of the experiment's own
    python tools/experiments/run.py claim1_figure --jobs 2      # two runs at a time
    python tools/experiments/run.py claim1_figure --list        # runs, steps, sizes; no training

Finished runs are not trained again: stop it whenever you like. Experiments share their runs: one of
the same name is the same run. It writes `results.json`, `table.md` and `plot.png` into the
experiment's folder, or beside the runs where that has results of runs that this call has not, and
with `--smoke`. Exit status 1 if a run failed. The data of all of
them:

    allattn prepare --dataset wikitext-2 --source DIR --tokenizer sentencepiece --vocab-size 4000 \\
        --out data/wikitext-2-sp4000
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of measure.py
sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this is imported by a path

from experiment import HERE, Experiment, load_experiment
from outcome import results
from report import REPORTS
from runner import train_missing

from allattn.config import ConfigError, with_vocabulary
from allattn.data.lanes import Corpus
from allattn.model.transformer import count_parameters
from allattn.training.state import read_json, write_json


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", help="a folder's name here, or a path")
    parser.add_argument("--data", default="data/wikitext-2-sp4000", help="a prepared corpus")
    parser.add_argument("--runs", default="runs/experiments", help="where all runs' folders are")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the experiment's")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--smoke", action="store_true", help="a few steps a stage")
    parser.add_argument("--report", action="store_true", help="only of what is trained so far")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    args = parser.parse_intermixed_args(argv)
    folder = HERE / args.experiment if (HERE / args.experiment).is_dir() else Path(args.experiment)
    runs_dir = Path(args.runs) / f"smoke-{folder.name}" if args.smoke else Path(args.runs)
    overrides = [f"data.dir={args.data}", *args.overrides]
    if args.jobs < 1:
        parser.error(f"--jobs: {args.jobs} runs at a time; 1 or more")
    try:
        experiment = load_experiment(folder, runs_dir, overrides, args.seeds, args.smoke)
        if experiment.report not in REPORTS:
            raise ConfigError(f"{folder}: report: one of {', '.join(REPORTS)}")
        Corpus(args.data)  # before the first run starts
        if args.list:
            describe(experiment)
            return 0
        failed = [] if args.report else train_missing(experiment, args.jobs)
    except (ConfigError, OSError, ValueError) as error:
        print(f"experiments: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("experiments: stopped; the same command goes on", file=sys.stderr)
        return 130
    found = results(experiment)
    target = folder if not args.smoke and holds_all_of(folder / "results.json", found) else runs_dir
    experiment = dataclasses.replace(experiment, folder=target)
    table = REPORTS[experiment.report](experiment, found)
    write_json(target / "results.json", found)
    head = f"# {experiment.claim}\n\n" + ("A smoke test: no result.\n\n" if args.smoke else "")
    (target / "table.md").write_text(head + table, encoding="utf-8")
    print(f"{table}\nwritten to {target}")
    return 1 if failed else 0


def holds_all_of(path: Path, found: dict[str, Any]) -> bool:
    """Whether no run of the results in a file would be lost with it."""
    if not path.exists():
        return True
    old = {(row["name"], row["seed"]) for row in read_json(path)["runs"]}
    return old <= {(row["name"], row["seed"]) for row in found["runs"]}


def describe(experiment: Experiment) -> None:
    """A line a run."""
    for run in experiment.runs:
        model = run.config.model
        model = with_vocabulary(model, Corpus(run.config.data.dir).vocab_size, run.config.data.dir)
        parts = count_parameters(model)
        size = sum(parts.values()) - parts["vocabulary"]
        after = f" after {run.after}" if run.after else ""
        done = "finished" if experiment.finished(run) else "to do"
        print(f"{run.name:36} {run.steps:6} steps{after:20} {size:10,} parameters  {done}")


if __name__ == "__main__":
    sys.exit(main())
