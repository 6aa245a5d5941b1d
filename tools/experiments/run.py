"""Train or resume all runs of an experiment, then write what came of them.

    python tools/experiments/run.py claim1_figure --data data/wikitext-2-sp4000
    python tools/experiments/run.py claim1_figure --smoke       # a few steps of everything
    python tools/experiments/run.py claim1_figure --seeds 1 2   # instead of the experiment's own
    python tools/experiments/run.py claim1_figure --jobs 2      # two runs at a time
    python tools/experiments/run.py claim1_figure --list        # runs, steps, sizes; no training

Finished runs are not trained again: stop it whenever you like. Experiments share their runs: one of
the same name is the same run. It writes `results.json`, `table.md` and `plot.png` into the
experiment's folder; with `--smoke`, `--seeds` or settings, or where that folder has results of
other runs, into `results_NAME` beside the runs. Exit status 1 if a run failed. The data of all of
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
from runner import check_same, train_missing

from allattn.config import ConfigError, with_vocabulary
from allattn.data.lanes import Corpus
from allattn.data.lock import alone
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
        check_same(experiment)
        if args.list:
            describe(experiment)
            return 0
        failed: list[str] = []
        if not args.report:
            with alone(runs_dir):
                failed = train_missing(experiment, args.jobs)
        own = not (args.smoke or args.overrides or args.seeds)
        print(write_report(experiment, own))
    except (ConfigError, OSError, ValueError) as error:
        print(f"experiments: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("experiments: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 1 if failed else 0


def write_report(experiment: Experiment, own: bool) -> str:
    """Results, table and plot of what is trained.

    Args:
        experiment: whose.
        own: with the settings and seeds of its file: for its folder, unless results there would be
            lost; else for a folder beside the runs.

    Returns:
        The table, and where it is.

    Raises:
        ValueError: nothing is trained, or a run is damaged.
    """
    found = results(experiment)
    if not found["runs"]:
        raise ValueError(f"{experiment.runs_dir}: nothing is trained yet")
    target = experiment.folder
    if not own or loses(target / "results.json", found):
        target = experiment.runs_dir / f"results_{target.name}"
        target.mkdir(exist_ok=True)
    table = REPORTS[experiment.report](dataclasses.replace(experiment, folder=target), found)
    write_json(target / "results.json", found)
    note = "A smoke test: no result.\n\n" if experiment.smoke else ""
    (target / "table.md").write_text(f"# {experiment.claim}\n\n{note}{table}", encoding="utf-8")
    return f"{table}\nwritten to {target}"


def loses(path: Path, found: dict[str, Any]) -> bool:
    """Whether a file has results of runs that these have not, or have of another corpus."""
    if not path.exists():
        return False
    old, new = (
        {(row["name"], row["seed"]): row["circumstances"].get("corpus") for row in part["runs"]}
        for part in (read_json(path), found)
    )
    return not old.keys() <= new.keys() or any(
        corpus not in (None, new[run]) for run, corpus in old.items()
    )


def describe(experiment: Experiment) -> None:
    """A line a run; its steps beyond those of the run that it goes on from."""
    steps = {run.name: run.steps for run in experiment.runs}
    for run in experiment.runs:
        model = run.config.model
        model = with_vocabulary(model, Corpus(run.config.data.dir).vocab_size, run.config.data.dir)
        parts = count_parameters(model)
        size = sum(parts.values()) - parts["vocabulary"]
        own = run.steps - steps.get(run.after, 0)
        after = f" after {run.after}" if run.after else ""
        first = f"{size:,}" if run.config.run.init_structure is None else "another's"
        done = "finished" if experiment.finished(run) else "to do"
        print(f"{run.name:36} {own:6} steps{after:22} {first:>10} parameters at first  {done}")


if __name__ == "__main__":
    sys.exit(main())
