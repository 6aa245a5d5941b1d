"""A run's folder: one writer at a time, and only a run that fits what is in it goes on there."""

from __future__ import annotations

import dataclasses
import fcntl
from pathlib import Path
from typing import IO, Any

from allattn.config import Config, ConfigError
from allattn.data.lanes import Corpus


def check_resumable(folder: Path, meta: dict[str, Any], config: Config, corpus: Corpus) -> None:
    """A run goes on with the model, data and lanes that it began with."""
    saved = meta["config"]
    now = dataclasses.asdict(config)
    pairs = [(f"model.{k}", saved["model"].get(k), v) for k, v in now["model"].items()]
    pairs += [
        (f"train.{k}", saved["train"].get(k), now["train"][k]) for k in ("batch_size", "optimizer")
    ]
    # runs from before there was a shift began without one
    pairs += [("data.shift", saved["data"].get("shift", False), config.data.shift)]
    pairs += [("run.seed", saved["run"].get("seed"), config.run.seed)]
    for i, stage in enumerate(saved["stages"][: max(meta["stage"], 0) + 1]):
        wanted = now["stages"][i] if i < len(now["stages"]) else {}
        pairs += _pairs(f"stages[{i}]", stage, wanted)
    for key, then, wanted in pairs:
        if then != wanted and key != "model.attention":
            raise ConfigError(
                f"{key}: {wanted!r}, but the run in {folder.parent.parent} began with {then!r}; "
                "resume with that, or start another run.name (add a stage to train for longer)"
            )
    if meta["tokenizer"] != corpus.tokenizer.fingerprint():
        raise ConfigError(f"data.dir: {corpus.dir} has another tokenizer than the run began with")
    if meta["corpus"] != corpus.splits["train"]["sha256"]:
        raise ConfigError(f"data.dir: {corpus.dir} has another text than the run began with")


def _pairs(key: str, then: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """(path, value then, value now) of every leaf."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        return [(key, then, now)]
    both = [*then, *(k for k in now if k not in then)]
    return [row for k in both for row in _pairs(f"{key}.{k}", then.get(k), now.get(k))]


def make_folder(run_dir: Path) -> IO[str]:
    """Make a run's folder and hold it, as `lock_folder` does.

    Raises:
        ConfigError: another process made it meanwhile.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    try:
        run_dir.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"{run_dir}: another process has just begun this run; choose another run.name"
        ) from None
    return lock_folder(run_dir)


def lock_folder(run_dir: Path) -> IO[str]:
    """Hold a run's folder; the lock goes with the process, however it ends.

    Raises:
        ConfigError: another process is writing there.
    """
    lock = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"{run_dir}: another process is writing to this run; wait for it, or choose another "
            "run.name"
        ) from None
    return lock
