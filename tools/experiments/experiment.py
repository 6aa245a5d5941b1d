"""An experiment: which runs, each with its config.

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

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from allattn.config import Config, ConfigError, load_config, validate

HERE = Path(__file__).resolve().parent
# what may be given, and as what
KNOWN = {"claim": str, "report": str, "test": bool, "seeds": list, "runs": list}
KEYS = {
    "name": str, "config": str, "stages": int, "after": str, "seeds": list, "set": list,
    "group": str, "label": str, "share": (int, float),
}  # fmt: skip


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
        run = self.config.run
        begun = [path for path in (run.init_structure, run.init_from) if path is not None]
        within = {Path(path).name for path in begun if Path(path).parent == Path(run.dir)}
        return within | ({self.after} - {None})

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.config.run.seed

    @property
    def label(self) -> str:
        """For tables and plots; runs that differ by their seed have the same."""
        return self.entry.get("label", self.entry["name"])

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
            if missing := sorted(run.needs - runs.keys()):
                raise ConfigError(f"{path}: run {run.name}: no run {missing[0]} before it")
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
    if not isinstance(data, dict) or not {"claim", "report", "runs"} <= data.keys() <= KNOWN.keys():
        raise ConfigError(f"{path}: needs claim, report and runs, and may have seeds and test")
    _check_types(str(path), data, KNOWN)
    for i, entry in enumerate(data["runs"]):
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: runs: a list of {{name: .., config: ..}}")
        name = entry.get("name", f"number {i + 1}")
        if not {"name", "config"} <= entry.keys() or entry.keys() - KEYS.keys():
            unknown = sorted(entry.keys() - KEYS.keys())
            raise ConfigError(f"{path}: run {name}: needs name and config; unknown {unknown}")
        _check_types(f"{path}: run {name}", entry, KEYS)
        if not 0 < entry.get("share", 1) <= 1:
            raise ConfigError(f"{path}: run {name}: share: above 0, at most 1")
        if not all(isinstance(text, str) for text in entry.get("set", [])):
            raise ConfigError(f"{path}: run {name}: set: a list of key=value")
    return data


def _check_types(where: str, given: dict[str, Any], known: dict[str, Any]) -> None:
    for key, value in given.items():
        if not isinstance(value, known[key]) or (
            isinstance(value, bool) and known[key] is not bool
        ):
            kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
            kind = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{where}: {key}: {value!r} is not a {kind}")
        if value in ("", []):
            raise ConfigError(f"{where}: {key}: empty")
    for seed in given.get("seeds", []):
        if not isinstance(seed, int):
            raise ConfigError(f"{where}: seeds: {seed!r} is not a number")


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
