"""Train, or resume, what is missing of an experiment's runs, each a process of its own."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from experiment import HERE, Experiment, Run

from allattn.config import Config, ConfigError, load_config, save_config
from allattn.data.lanes import Corpus
from allattn.training.state import checkpoints_of, read_json, write_json


def check_same(experiment: Experiment) -> None:
    """Runs that have begun were begun with the settings and the corpus that they have here.

    Raises:
        ConfigError: a run of the same name is another one.
    """
    for run in experiment.runs:
        path, folder = experiment.runs_dir / f"{run.name}.yaml", experiment.path(run)
        if not path.exists() or not folder.exists():
            continue
        old, new = _flat(load_config(path)), _flat(run.config)
        places = {"run.dir", "data.dir"}  # they may have moved
        other = [k for k in sorted(old | new) if k not in places and old.get(k) != new.get(k)]
        note = experiment.runs_dir / f"{run.name}.json"
        known = read_json(note).get("corpus") if note.exists() else None
        if known not in (None, corpus_id(run.config)):
            other.append("the corpus in data.dir")
        if other:
            raise ConfigError(
                f"{path}: a run of this name has another config ({', '.join(other)}); give other "
                f"--runs, or remove that file and {folder}"
            )


def corpus_id(config: Config) -> dict[str, str]:
    """What tells a corpus from others: the beginning of the hash of each split."""
    return {name: split["sha256"][:12] for name, split in Corpus(config.data.dir).splits.items()}


def train_missing(experiment: Experiment, jobs: int = 1) -> list[str]:
    """Train, or go on with, every run that is not finished; names of those that failed.

    Each is a process of its own. Beside its folder are its config, its log, and in `NAME.json` its
    seconds, added up over restarts, and the circumstances of the last of them.

    Args:
        experiment: whose runs.
        jobs: runs at a time; they share the cores, unless OMP_NUM_THREADS says what each gets.

    Raises:
        ConfigError: a folder lost what a run goes on from.
        KeyboardInterrupt: Ctrl-C or SIGTERM, after the runs in progress saved and stopped.
    """
    experiment.runs_dir.mkdir(parents=True, exist_ok=True)
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
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops as Ctrl-C does
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
                print(f"{number[run.name]} {run.name}: failed: {_reason(log)}", file=sys.stderr)
    finally:  # Ctrl-C, or an error: none trains on behind the caller's back
        for _, process, _ in running:
            process.terminate()  # not SIGINT: what was begun in the background ignores that
        for run, process, started in running:
            process.wait()
            _note(experiment, run, time.time() - started, environment)
        signal.signal(signal.SIGTERM, before)
    return failed


def _reason(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("allattn: error")]
    return f"{log}: {(errors or lines or ['nothing'])[-1]}"


def _flat(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, part in asdict(config).items()
        for key, value in (part if isinstance(part, dict) else dict(enumerate(part))).items()
    }


def _start(experiment: Experiment, run: Run, environment: dict[str, str]) -> subprocess.Popen:
    if run.after is not None:
        fork(experiment.runs_dir / run.after, experiment.path(run))
    config, log = (experiment.runs_dir / f"{run.name}{end}" for end in (".yaml", ".log"))
    save_config(run.config, config)
    command = [sys.executable, "-m", "allattn", "train", str(config), "--resume"]
    with log.open("a", encoding="utf-8") as output:
        # a session of its own: a terminal's Ctrl-C is passed on by us, as a wish to save and stop
        return subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _note(experiment: Experiment, run: Run, seconds: float, environment: dict[str, str]) -> None:
    path = experiment.runs_dir / f"{run.name}.json"
    known = read_json(path)["seconds"] if path.exists() else 0.0
    threads = environment.get("OMP_NUM_THREADS")
    corpus = corpus_id(run.config)
    new = {"seconds": known + seconds, "threads": threads, "corpus": corpus, **circumstances()}
    write_json(path, new)


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
