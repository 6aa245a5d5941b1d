"""Runs of an experiment: what they are, training or resuming what is missing, what came of them.

An experiment is a folder with an `experiment.yaml`:

    claim: what the papers say
    report: size | heads | bars | removable | time      (`report.py` makes table and plot)
    test: true                                          (the result is on the test split, not valid)
    seeds: [1]                                          (of runs that name none)
    runs:
      - {name: dense, config: all_attention.yaml}
      - {name: trunk, config: all_attention_pruned.yaml, stages: 1}
      - {name: half, config: all_attention_pruned.yaml, after: trunk, seeds: [1, 2],
         set: ["stages[1].prune.keep=0.5"]}

`stages: n` trains the first n stages alone. `after: RUN` goes on from where that run of the same
seed ended, bit for bit as if it had begun itself: the stages done must be the same, so a dense
stage that many runs share is trained once. `{RUNS}` in a setting is the folder of the runs,
`{SEED}` the seed. A run whose
`run.init_structure` is another one waits for it too. `group` and `label` are for tables and plots;
in the report `size` runs of one `share` stand in one row.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from allattn.config import Config, ConfigError, load_config, save_config, validate
from allattn.inference.evaluate import evaluate_source
from allattn.inference.load import Source, open_source
from allattn.model.transformer import count_parameters, flops_per_token
from allattn.training.state import checkpoints_of, read_json, write_json

HERE = Path(__file__).resolve().parent
KNOWN = {"claim", "report", "test", "seeds", "runs"}
KEYS = {"name", "config", "stages", "after", "seeds", "set", "group", "label", "share"}


@dataclass
class Run:
    """One run of an experiment.

    Attributes:
        name: of its folder: the entry's name and the seed.
        entry: as in `experiment.yaml`.
        config: resolved, with its own stages.
        after: the run whose last checkpoint it goes on from.
    """

    name: str
    entry: dict[str, Any]
    config: Config
    after: str | None = None

    @property
    def needs(self) -> set[str]:
        """Names of runs that must be finished before it begins."""
        structure = self.config.run.init_structure
        return {self.after, Path(structure).name if structure else None} - {None}

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.config.run.seed

    @property
    def steps(self) -> int:
        """Of all stages, those of `after` included."""
        return sum(stage.steps for stage in self.config.stages)


@dataclass
class Experiment:
    """A folder's `experiment.yaml`, resolved.

    Attributes:
        folder: where it is.
        claim: in words.
        report: which of `report.py`'s reports.
        runs: in the order of training.
        runs_dir: where the runs' folders are.
        test: the result is on the test split, not on valid.
        smoke: only a few steps: shows that the command works, and nothing else.
    """

    folder: Path
    claim: str
    report: str
    runs: list[Run]
    runs_dir: Path
    test: bool = False
    smoke: bool = False

    def path(self, run: Run) -> Path:
        """A run's folder."""
        return self.runs_dir / run.name

    def finished(self, run: Run) -> bool:
        """Whether it wrote its final model."""
        return (self.path(run) / "final" / "config.json").exists()


def load_experiment(
    folder: Path, runs_dir: Path, overrides: list[str], seeds: list[int] | None, smoke: bool
) -> Experiment:
    """Read and check an experiment; nothing starts before all of its configs are valid.

    Args:
        folder: of `experiment.yaml`.
        runs_dir: for the runs.
        overrides: for every run, before its own.
        seeds: instead of those of the file.
        smoke: a few steps a stage.

    Raises:
        ConfigError: naming the entry and what is wrong with it.
    """
    path = folder / "experiment.yaml"
    data = _read(path)
    runs: dict[str, Run] = {}
    for entry in data["runs"]:
        for seed in seeds or entry.get("seeds") or data.get("seeds", [1]):
            run = _run(path, entry, seed, runs_dir, overrides, smoke)
            if run.name in runs:
                raise ConfigError(f"{path}: two runs are named {run.name}")
            if run.after is not None and run.after not in runs:
                raise ConfigError(f"{path}: run {run.name}: no run {run.after} before it")
            runs[run.name] = run
    test = data.get("test", False)
    return Experiment(
        folder, data["claim"], data["report"], list(runs.values()), runs_dir, test, smoke
    )


def _read(path: Path) -> dict[str, Any]:
    """An experiment.yaml, its shape checked."""
    if not path.is_file():
        known = ", ".join(sorted(x.parent.name for x in HERE.glob("*/experiment.yaml")))
        raise ConfigError(f"{path}: no such experiment; there are {known}")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not {"claim", "report", "runs"} <= data.keys() <= KNOWN:
        raise ConfigError(f"{path}: needs claim, report and runs, and may have seeds and test")
    if not isinstance(data["runs"], list) or not all(isinstance(x, dict) for x in data["runs"]):
        raise ConfigError(f"{path}: runs: a list of {{name: .., config: ..}}")
    for entry in data["runs"]:
        if not {"name", "config"} <= entry.keys() or entry.keys() - KEYS:
            name, unknown = entry.get("name"), sorted(entry.keys() - KEYS)
            raise ConfigError(f"{path}: run {name}: needs name and config; unknown {unknown}")
        for key in ("seeds", "set"):
            if not isinstance(entry.get(key, []), list):
                raise ConfigError(f"{path}: run {entry['name']}: {key}: a list")
    if not isinstance(data.get("seeds", []), list):
        raise ConfigError(f"{path}: seeds: a list")
    return data


def _run(
    path: Path, entry: dict[str, Any], seed: int, runs_dir: Path, overrides: list[str], smoke: bool
) -> Run:
    name = f"{entry['name']}-s{seed}"
    own = [
        text.replace("{RUNS}", str(runs_dir)).replace("{SEED}", str(seed))
        for text in entry.get("set", [])
    ]
    own += [f"run.name={name}", f"run.dir={runs_dir}", f"run.seed={seed}"]
    try:
        config = load_config(path.parent / entry["config"], [*overrides, *own])
    except ConfigError as error:
        raise ConfigError(f"{path}: run {name}: {error}") from None
    stages = entry.get("stages", len(config.stages))
    if stages not in range(1, len(config.stages) + 1):
        raise ConfigError(f"{path}: run {name}: stages: 1 to {len(config.stages)}, not {stages}")
    config.stages = config.stages[:stages]
    if smoke:
        shrink(config)
        validate(config)
    after = f"{entry['after']}-s{seed}" if "after" in entry else None
    return Run(name, entry, config, after)


def shrink(config: Config) -> None:
    """A run of a few steps, of the same parts."""
    config.train.batch_size = 2
    config.train.eval_every = config.train.save_every = 4
    config.train.log_every = 2
    for stage in config.stages:
        stage.steps, stage.lr.warmup_steps = 8, min(stage.lr.warmup_steps, 2)
        if stage.prune is None:
            continue
        stage.prune.warmup_steps = min(stage.prune.warmup_steps, 4)
        if stage.prune.method == "importance":
            stage.prune.batches = 1
        stage.prune.every = 4 if stage.prune.every else None
        if isinstance(stage.prune.remove, dict):
            stage.prune.remove, stage.prune.patience = {"every": 2}, 1


def train_missing(experiment: Experiment, jobs: int = 1) -> list[str]:
    """Train, or go on with, every run that is not finished; names of those that failed.

    Each is a process of its own. Beside its folder are its config, its log, and in `NAME.json` its
    seconds, added up over restarts, and the circumstances of the last of them.

    Args:
        experiment: whose runs.
        jobs: runs at a time; they share the cores, unless OMP_NUM_THREADS says what each gets.

    Raises:
        ConfigError: a folder holds a run of another config, or lost what a run goes on from.
        KeyboardInterrupt: after the runs in progress were told to stop, and did.
    """
    experiment.runs_dir.mkdir(parents=True, exist_ok=True)
    for run in experiment.runs:
        _check_same(experiment.runs_dir / f"{run.name}.yaml", run.config)
    environment = dict(os.environ)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    number = {run.name: f"[{i}/{len(experiment.runs)}]" for i, run in enumerate(experiment.runs, 1)}
    done, failed, waiting = set(), [], []
    for run in experiment.runs:
        if experiment.finished(run):
            print(f"{number[run.name]} {run.name}: finished before", file=sys.stderr)
            done.add(run.name)
        else:
            waiting.append(run)
    running: list[tuple[Run, subprocess.Popen, float]] = []
    try:
        while waiting or running:
            for run in list(waiting):
                if run.needs & set(failed):
                    print(f"{number[run.name]} {run.name}: left out", file=sys.stderr)
                    waiting.remove(run)
                    failed.append(run.name)
                elif run.needs <= done and len(running) < jobs:
                    waiting.remove(run)
                    print(f"{number[run.name]} {run.name}: {run.steps} steps", file=sys.stderr)
                    running.append((run, _start(experiment, run, environment), time.time()))
            time.sleep(0.2)
            for run, process, started in list(running):
                if process.poll() is None:
                    continue
                running.remove((run, process, started))
                _note(experiment, run, time.time() - started, environment)
                if process.returncode == 0:
                    done.add(run.name)
                    continue
                failed.append(run.name)
                log = experiment.runs_dir / f"{run.name}.log"
                last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
                print(f"{number[run.name]} {run.name}: failed: {log}: {last}", file=sys.stderr)
    finally:  # Ctrl-C, or an error: none trains on behind the caller's back
        for _, process, _ in running:
            process.send_signal(signal.SIGINT)
        for run, process, started in running:
            process.wait()
            _note(experiment, run, time.time() - started, environment)
    return failed


def _check_same(path: Path, config: Config) -> None:
    if not path.exists() or (known := load_config(path)) == config:
        return
    old, new = asdict(known), asdict(config)
    other = [
        f"{section}.{key}" if isinstance(value, dict) else section
        for section, value in old.items()
        for key in (value if isinstance(value, dict) else [section])
        if (value[key] != new[section][key] if isinstance(value, dict) else value != new[section])
    ]
    raise ConfigError(
        f"{path}: a run of this name has another config ({', '.join(other)}); give other --runs"
    )


def _start(experiment: Experiment, run: Run, environment: dict[str, str]) -> subprocess.Popen:
    if run.after is not None:
        fork(experiment.runs_dir / run.after, experiment.path(run))
    config, log = (experiment.runs_dir / f"{run.name}{end}" for end in (".yaml", ".log"))
    save_config(run.config, config)
    command = [sys.executable, "-m", "allattn", "train", str(config), "--resume"]
    with log.open("a", encoding="utf-8") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def _note(experiment: Experiment, run: Run, seconds: float, environment: dict[str, str]) -> None:
    path = experiment.runs_dir / f"{run.name}.json"
    known = read_json(path)["seconds"] if path.exists() else 0.0
    threads = environment.get("OMP_NUM_THREADS")
    write_json(path, {"seconds": known + seconds, "threads": threads, **circumstances()})


def fork(source: Path, target: Path) -> None:
    """A run's folder that begins where another one ended; one that has begun is left alone."""
    if target.exists():
        return
    if not (checkpoints := checkpoints_of(source)):
        raise ConfigError(f"{source}: no checkpoint to go on from; remove it to train it again")
    last = checkpoints[-1]
    partial = target.with_name(target.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    shutil.copytree(last, partial / "checkpoints" / last.name)
    shutil.copy(source / "metrics.jsonl", partial / "metrics.jsonl")
    partial.rename(target)


def results(experiment: Experiment) -> dict[str, Any]:
    """What came of the finished runs, and under which circumstances each was trained.

    `valid_ppl` is that of the run's own last evaluation.
    """
    rows = []
    for run in experiment.runs:
        if not experiment.finished(run):
            continue
        folder = experiment.path(run)
        source = open_source(folder)
        parts = count_parameters(source.config)
        note = experiment.runs_dir / f"{run.name}.json"
        trained = read_json(note) if note.exists() else {"seconds": None}
        curve = [
            [line["step"], round(line["ppl"], 3)]
            for line in metrics(folder)
            if line.get("split") == "valid"
        ]
        test = _test(folder, source, run) if experiment.test and "group" in run.entry else {}
        rows.append({
            "name": run.entry["name"],
            "group": run.entry.get("group", ""),
            "label": run.entry.get("label", run.entry["name"]),
            "share": run.entry.get("share"),
            "seed": run.seed,
            "steps": run.steps,
            "train_tokens": run.steps * run.config.train.batch_size * run.config.model.seq_len,
            # of this run alone: what it shares with `after` is counted there
            "wall_seconds": trained.pop("seconds"),
            "after": run.after,
            "train_seconds": round(train_seconds(run, folder), 1),
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
        })  # fmt: skip
    return {
        "claim": experiment.claim,
        "smoke": experiment.smoke,
        "runs": rows,
        "missing": [run.name for run in experiment.runs if not experiment.finished(run)],
    }


def _test(folder: Path, source: Source, run: Run) -> dict[str, Any]:
    """A run's evaluation on the test split, made once and kept beside it, in `test.json`."""
    kept = folder / "test.json"
    if not kept.exists():
        print(f"{run.name}: test split", file=sys.stderr)
        write_json(kept, evaluate_source(source, source.corpus(run.config.data.dir), "test"))
    return read_json(kept)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def train_seconds(run: Run, folder: Path) -> float:
    """Time in optimiser steps, from the logged throughput: evaluation and saving left out."""
    size = run.config.train.batch_size * run.config.model.seq_len
    lines = [x for x in metrics(folder) if x.get("split") == "train"]
    done = [0, *(x["step"] for x in lines)]
    return sum(
        (line["step"] - before) * size / line["tokens_per_second"]
        for before, line in zip(done, lines, strict=False)
    )


def circumstances() -> dict[str, Any]:
    """Machine, commit, date: of a run as it ends."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux: what Python knows will do
    git = ["git", "-C", str(HERE)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    status = subprocess.run(
        [*git, "status", "--porcelain", "--", "allattn"], capture_output=True, text=True
    ).stdout
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit.strip() or None,
        "package_changed_since": bool(status.strip()),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
