"""Run a config over every combination of some values, one run after the other, and compare them.

    python tools/experiments/sweep.py configs/tiny.yaml --set stages[1].prune.keep=0.75,0.5,0.25 \\
        --set run.seed=1,2 --out runs/sweep

Each run is a process of its own, `allattn train ... --resume`, in the folder `--out`: a sweep that
was stopped goes on where it stopped, and finished runs are only compared again. A run that fails
leaves its log, the others go on. Values are separated by commas; a value with a comma of its own
goes in brackets: `stages[1].prune.temperature=[1,0.1],[2,0.1]`. Exit status 1 if a run failed.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from pathlib import Path

import allattn
from allattn.config import ConfigError, load_config
from allattn.inference.compare import table


def split_values(text: str) -> list[str]:
    """Comma-separated values; commas within brackets or braces belong to a value."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return values


def plan(settings: list[str]) -> dict[str, list[str]]:
    """Run names and their overrides, for every combination.

    Raises:
        ConfigError: a setting that is not key=value.
    """
    axes = []
    for setting in settings:
        key, equals, values = setting.partition("=")
        if not equals or not key or not values:
            raise ConfigError(f"--set {setting}: write key=value,value,..")
        axes.append([f"{key}={value}" for value in split_values(values)])
    runs: dict[str, list[str]] = {}
    for overrides in itertools.product(*axes):
        # keep_0.5-seed_1: the last part of each key tells runs apart
        pairs = [o.partition("=") for o in overrides]
        name = "-".join(f"{key.rpartition('.')[2]}_{value}" for key, _, value in pairs)
        name = re.sub(r"[^\w.+-]", "_", name)
        if name in runs:
            raise ConfigError(f"--set: two combinations would both be named {name}")
        runs[name] = list(overrides)
    return runs


def finished(folder: Path) -> bool:
    """Whether a run wrote its final model."""
    return (folder / "final" / "config.json").exists()


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, then compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="key=v1,v2,..")
    parser.add_argument("--out", required=True, metavar="DIR", help="the runs' folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run")
    args = parser.parse_intermixed_args(argv)
    out = Path(args.out)
    try:
        runs = plan(args.set)
        for name, overrides in runs.items():  # a wrong one is known before the first starts
            load_config(args.config, [*args.overrides, *overrides, f"run.name={name}"])
    except ConfigError as error:
        print(f"sweep: error: {error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    failed = []
    for i, (name, overrides) in enumerate(runs.items(), 1):
        if finished(out / name):
            print(f"[{i}/{len(runs)}] {name}: finished before", file=sys.stderr)
            continue
        print(f"[{i}/{len(runs)}] {name}: log in {out / (name + '.log')}", file=sys.stderr)
        command = [sys.executable, "-m", "allattn", "train", args.config, *args.overrides,
                   *overrides, f"run.dir={out}", f"run.name={name}", "--resume"]  # fmt: skip
        with (out / f"{name}.log").open("a", encoding="utf-8") as log:
            status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if status:
            failed.append(name)
            print(f"[{i}/{len(runs)}] {name}: failed, status {status}", file=sys.stderr)
    done = {name: out / name for name in runs if finished(out / name)}
    if done:
        print(table(allattn.compare(done, out / "compare", device="cpu")))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
