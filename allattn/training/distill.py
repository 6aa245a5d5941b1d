"""The dense model of a run, frozen beside the one in training, to learn from (`distill`)."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allattn.config import Config, ConfigError
from allattn.data.checksum import sha256
from allattn.model.adaptive import SoftTargets
from allattn.model.transformer import Memory, TransformerLM
from allattn.training.state import (
    FORMAT_VERSION,
    load_weights,
    save_tensors,
    write_json,
)

FOLDER = "teacher"  # within a run's


def first_stage(config: Config) -> int | None:
    """The stage whose first weights are the teacher's: the first that prunes or distils.

    None where no stage distils.
    """
    if not any(stage.distill for stage in config.stages):
        return None
    return next(i for i, stage in enumerate(config.stages) if stage.prune or stage.distill)


def save_teacher(run_dir: Path, model: TransformerLM, parameters: dict[str, Tensor]) -> None:
    """Keep a model in a run's folder; it appears whole or not at all."""
    folder, partial = run_dir / FOLDER, run_dir / f".partial_{FOLDER}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_tensors(partial / "model.safetensors", parameters)
    config = {"format_version": FORMAT_VERSION, "model": dataclasses.asdict(model.config)}
    config["sha256"] = {"model.safetensors": sha256(partial / "model.safetensors")}
    write_json(partial / "config.json", config)
    shutil.rmtree(folder, ignore_errors=True)  # of a later step, after a resume from before it
    os.replace(partial, folder)


def check_teacher(run_dir: Path, meta: dict[str, Any], config: Config) -> None:
    """A run that goes on after its dense stages can distil only if it was to distil before.

    Args:
        run_dir: of the run.
        meta: of the checkpoint that it goes on from.
        config: to go on with.

    Raises:
        ConfigError: it kept no teacher, as no stage of it distilled then.
    """
    first = first_stage(config)
    distilled = any(stage.get("distill") for stage in meta["config"]["stages"])
    if first is not None and first <= meta["stage"] and not distilled:
        i = next(i for i, stage in enumerate(config.stages) if stage.distill)
        raise ConfigError(
            f"stages[{i}].distill: {run_dir} kept no dense model to learn from, as no stage of it "
            "distilled when it began to prune; leave it out, or start another run.name"
        )


class Teacher:
    """The frozen model, with a memory of its own for each micro-batch.

    Attributes:
        memories: of each micro-batch.
    """

    def __init__(self, run_dir: Path, device: torch.device, n_micro: int):
        """Load what `save_teacher` wrote.

        Raises:
            ValueError: it is missing or damaged.
        """
        self.model = load_weights(run_dir / FOLDER).build().to(device).requires_grad_(False)
        self.memories: list[Memory | None] = [None] * n_micro

    def forget(self) -> None:
        """The lanes start anew."""
        self.memories = [None] * len(self.memories)

    @torch.no_grad()
    def __call__(self, micro: int, ids_BT: Tensor, temperature: float) -> SoftTargets:
        """What it predicts for a micro-batch's segment."""
        x_BTD, self.memories[micro] = self.model.hidden(ids_BT, self.memories[micro], None)
        return SoftTargets(self.model.vocabulary, self.model.norm(x_BTD), temperature)
