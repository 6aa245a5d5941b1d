"""What TensorBoard shows of a run. Nothing that goes wrong here ends the run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from allattn.config import Config, to_yaml
from allattn.training.watch import Look

# metrics.jsonl key -> tag, for training lines
TRAIN_TAGS = {
    "loss": "train/loss",
    "ppl": "train/ppl",
    "lr": "train/lr",
    "gate_lr": "train/gate_lr",
    "grad_norm": "train/grad_norm",
    "grad_norm_weights": "train/grad_norm_weights",
    "grad_norm_gates": "train/grad_norm_gates",
    "tokens_per_second": "perf/tokens_per_second",
    "mfu": "perf/mfu",
    "peak_memory_mb": "perf/peak_memory_mb",
    "sparsity": "prune/sparsity",
    "target_sparsity": "prune/target_sparsity",
    "penalty": "prune/penalty",
    "penalty_weight": "prune/penalty_weight",
    "penalty_weight_quadratic": "prune/penalty_weight_quadratic",
    "expected_heads": "prune/expected_heads",
    "target_heads": "prune/target_heads",
    "distill": "train/distill",
    "distill_weight": "train/distill_weight",
}
# and for evaluations
SIZE_TAGS = {"params_non_embedding": "size/params_non_embedding", "keep": "size/keep"}
# what a sweep's runs are sorted by: TensorBoard takes each tag's last value
RESULTS = ["valid/ppl", *SIZE_TAGS.values()]
# TensorBoard lists these first, and shows the first five of what it lists
VARIED = (".method", ".keep", ".keep_params", ".keep_flops", ".penalty", ".lr", "run.seed")
LAYOUT = {
    "pruning": {
        "sparsity: target and reached": [
            "Multiline",
            ["^prune/sparsity$", "^prune/target_sparsity$"],
        ],
        "open heads by layer": ["Multiline", ["^gates/layer_.*/open$"]],
        "attention to persistent vectors by layer": ["Multiline", ["^persistent/layer_.*"]],
    },
    "training": {
        "objective: cross-entropy, penalty, distillation": [
            "Multiline",
            ["^train/loss$", "^prune/penalty$", "^train/distill$"],
        ],
        "learning rates: weights, gates": ["Multiline", ["^train/lr$", "^train/gate_lr$"]],
        "gradient norms: weights, gates": [
            "Multiline",
            ["^train/grad_norm_weights$", "^train/grad_norm_gates$"],
        ],
    },
}


class Board:
    """TensorBoard's event files; where one cannot be written, it says so and leaves them out."""

    def __init__(self, folder: Path, step: int, say: Callable[[str], None]):
        """Open a new event file of a run that is at `step`; what is there of later steps goes.

        Args:
            folder: of the event files.
            step: steps done.
            say: tells people.
        """
        self.folder, self.say = folder, say
        self.writer: SummaryWriter | None = None
        self._open(step)

    def begin(self, config: Config, stages: list[dict[str, Any]], step: int) -> None:
        """What is known from the start: layout of the charts, config, stages, hyperparameters."""
        with self._writing() as writer:
            writer.add_custom_scalars(LAYOUT)
            writer.add_text("config", _code(to_yaml(config)), step)
            rows = [
                f"| {s['name']} | {s['first_step']} to {s['last_step']} | {s['what']} |"
                for s in stages
            ]
            table = ["| stage | steps | what |", "| --- | --- | --- |", *rows]
            writer.add_text("stages", "\n".join(table), step)
            for summary in _hparams_summaries(hyperparameters(config)):
                writer.file_writer.add_summary(summary)

    def train(self, line: dict[str, Any], open_by_layer: list[int]) -> None:
        """A training line, and how many heads of each layer are open."""
        with self._writing() as writer:
            for key, tag in TRAIN_TAGS.items():
                if key in line:
                    writer.add_scalar(tag, line[key], line["step"])
            for i, n in enumerate(open_by_layer):
                writer.add_scalar(f"gates/layer_{i:02d}/open", n, line["step"])

    def evaluation(self, line: dict[str, Any], look: Look, head_map: np.ndarray) -> None:
        """An evaluation: its line, what else was seen, and the map of the heads [H, W, 3]."""
        step = line["step"]
        if self.writer is None:  # there may be room again
            self._open(step)
        with self._writing() as writer:
            for key in ("loss", "ppl"):
                writer.add_scalar(f"{line['split']}/{key}", line[key], step)
            for key, tag in SIZE_TAGS.items():
                writer.add_scalar(tag, line[key], step)
            for i, share in enumerate(look.persistent_share):
                if share is not None:
                    writer.add_scalar(f"persistent/layer_{i:02d}", share, step)
            for i, values in enumerate(look.log_alphas):
                if values is not None:
                    finite = values[values.isfinite()]  # of others there is no histogram
                    if finite.numel():
                        writer.add_histogram(f"log_alpha/layer_{i:02d}", finite, step)
            writer.add_image("heads", head_map, step, dataformats="HWC")
            lines = f"{look.prompt} ... {look.sample}".splitlines()
            sample = "\n".join(textwrap.fill(line, 90) for line in lines)
            writer.add_text("sample", _code(sample), step)

    def text(self, tag: str, text: str, step: int) -> None:
        """A sentence."""
        with self._writing() as writer:
            writer.add_text(tag, text, step)

    def flush(self) -> None:
        """Everything said so far is on disk."""
        with self._writing() as writer:
            writer.flush()

    def close(self) -> None:
        """Close the file."""
        with self._writing() as writer:
            writer.close()
        self.writer = None

    def _open(self, step: int) -> None:
        try:
            self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)
        except OSError as error:
            self._failed(error)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        """A full disk must not end a run that may go on without pictures."""
        try:
            yield self.writer or _Nothing()
        except OSError as error:
            self.writer = None
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.say(f"warning: {self.folder}: TensorBoard gets nothing for now ({error.strerror})")


class _Nothing:
    """Takes what a writer takes."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self


def hyperparameters(config: Config) -> dict[str, int | float | str]:
    """What a sweep may vary, by the names that overrides have; nothing that is not set."""
    sections = {"run": {"seed": config.run.seed}}
    for name in ("model", "train", "stages"):
        sections[name] = dataclasses.asdict(config)[name]
    return dict(_leaves("", sections))


def _hparams_summaries(named: dict[str, int | float | str]) -> list[Any]:
    """What the HParams page is made of; the end of a session is left out: nobody can promise it."""
    experiment, start, _ = hparams(named, dict.fromkeys(RESULTS, 0.0))
    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    for info in data.experiment.hparam_infos:
        info.differs = info.name.endswith(VARIED)
    plugin.content = data.SerializeToString()
    return [experiment, start]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, int | float | str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, inner in enumerate(value):
            yield from _leaves(f"{path}[{i}]", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            yield path, value
    elif value is not None:
        yield path, str(value)


def _code(text: str) -> str:
    """As it is, line by line: TensorBoard reads Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines())
