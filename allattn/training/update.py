"""One optimiser step: this rank's lanes, their memories, the loss, and what is not finite."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allattn.config import Config, ConfigError
from allattn.data.lanes import Lanes
from allattn.model.transformer import Memory
from allattn.moments import reached
from allattn.pruning.importance import Stream
from allattn.pruning.schedule import lr_factor
from allattn.training.distill import Teacher
from allattn.training.live import LiveModel
from allattn.training.optim import LossScale
from allattn.training.ranks import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADVICE = (
    "; the weights are still those of the step before (lower train.optimizer.lr, or set "
    "train.clip_norm)"
)


class NonFiniteLoss(RuntimeError):
    """The loss or a gradient is NaN or infinite; raised with the weights as they were before."""


@dataclass
class Update:
    """What an optimiser step came to.

    Attributes:
        updated: the weights moved; False where something was not finite.
        again: the same step has to be tried again (float16, with half the loss scale).
        loss: cross-entropy of the global batch, nats a token.
        grad_norm: before clipping.
        lrs: by group of parameters.
        parts: what else belongs in the log: the objective's parts and their weights.
        stop: some rank was asked to stop.
    """

    updated: bool
    again: bool
    loss: float
    grad_norm: float
    lrs: dict[str, float]
    parts: dict[str, Any]
    stop: bool


class Updater:
    """Takes optimiser steps for a rank.

    Attributes:
        n_micro: micro-batches that this rank's lanes are taken in.
        memories: Transformer-XL memory of each micro-batch.
        teacher: the dense model, in stages that distil.
        loss_scale: in float16.
        skipped: updates left out so far because something was not finite.
    """

    def __init__(self, config: Config, world: World, lanes: Lanes):
        """Divide the lanes among ranks and micro-batches.

        Raises:
            ConfigError: they do not divide.
        """
        self.config, self.world, self.lanes = config, world, lanes
        train, size = config.train, world.size
        check_lanes(config, world)
        self.rank_lanes = train.batch_size // size
        self.micro_lanes = train.micro_batch_size or self.rank_lanes
        self.first_lane = world.rank * self.rank_lanes
        self.n_micro = self.rank_lanes // self.micro_lanes
        self.memories: list[Memory | None] = [None] * self.n_micro
        self.teacher: Teacher | None = None
        self.loss_scale = LossScale() if train.precision == "fp16" else None
        self.skipped = 0
        self.pruning: dict[str, Any] = {}  # what the method logged of the last step

    def step(self, live: LiveModel, step: int, stage: int, stage_step: int, stop: bool) -> Update:
        """One optimiser step.

        Args:
            live: the model.
            step: of the run, from 0.
            stage: its number.
            stage_step: of the stage, from 0.
            stop: this rank was asked to stop.

        Raises:
            NonFiniteLoss: as `train.non_finite` and `train.max_skipped` have it.
        """
        settings = self.config.stages[stage]
        if self.lanes.starts_pass(step):
            self.memories = [None] * self.n_micro
            if self.teacher is not None:
                self.teacher.forget()
        # dropout's noise is a function of seed, step and rank: resuming needs no generator state
        torch.manual_seed(_mix(self.config.run.seed, step, self.world.rank))
        model, pruner = live.engine.module, live.pruner
        model.train()
        teacher_before = None if self.teacher is None else list(self.teacher.memories)
        losses, memories = [], []
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        for m in range(self.n_micro):
            lanes = self._lanes_of(m)
            inputs, targets = self._batch(step, lanes)
            live.draw(step, stage_step, settings.steps, lanes)
            with self.autocast():
                soft = None
                if settings.distill is not None:
                    assert self.teacher is not None, "a stage that distils has one"
                    soft = self.teacher(m, inputs, settings.distill.temperature)
                output = live.engine(inputs, targets, self.memories[m], soft_targets=soft)
                terms = [output.nll.mean()]
                if soft is not None:
                    terms.append(output.divergence.mean())
            losses.append(torch.stack([term.detach().double() for term in terms]))
            weight = 0.0 if settings.distill is None else settings.distill.weight
            loss = terms[0] if soft is None else (1 - weight) * terms[0] + weight * terms[1]
            if pruner is not None:
                term, self.pruning = pruner.objective(model, stage_step)
                loss = loss if term is None else loss + term.to(loss.device)
            memories.append(output.memory)
            # a loss that is not finite makes no gradient finite, on any rank: no engine updates
            loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
            live.engine.backward(loss, m == self.n_micro - 1, scale)
        asked = torch.tensor([float(stop)], dtype=torch.float64, device=losses[0].device)
        sums = self.world.sum(torch.cat([torch.stack(losses).mean(0), asked]))
        means = sums[:-1] / self.world.size
        cross_entropy, finite = float(means[0]), bool(means.isfinite().all())
        if not finite and self.loss_scale is None and self.config.train.non_finite == "stop":
            raise NonFiniteLoss(f"{self.place(step)}: the loss is {cross_entropy}{ADVICE}")
        lrs = self.learning_rates(stage, stage_step)
        gates_norm = 0.0
        logged = (step + 1) % self.config.train.log_every == 0
        if logged and live.has_gates:
            gates_norm = live.engine.gate_grad_norm(scale)
        reached("step:backward")
        grad_norm = live.engine.step(lrs, scale)
        finite = finite and math.isfinite(grad_norm)
        parts = {} if pruner is None else dict(self.pruning)
        if settings.distill is not None:
            parts |= {
                "distill": float(means[1]),
                "distill_weight": weight,
                "cross_entropy_weight": 1 - weight,
            }
        if logged and live.has_gates:
            weights_norm = math.sqrt(max(grad_norm**2 - gates_norm**2, 0.0))
            parts |= {"grad_norm_gates": gates_norm, "grad_norm_weights": weights_norm}
        again = False
        if self.loss_scale is not None:
            self.loss_scale.follow(finite)
            again = not finite and self.loss_scale.value >= 1
            parts["loss_scale"] = self.loss_scale.value
            if not finite and not again:
                self.loss_scale = LossScale()  # a batch that no scale saves says nothing about it
        if finite:
            self.memories = memories
            if pruner is not None:
                pruner.after_step(self.pruning, stage_step)
        else:
            if self.teacher is not None and teacher_before is not None:
                self.teacher.memories = teacher_before
            if not again:
                self._count_skipped(step, cross_entropy, grad_norm)
        # of any rank, so that all stop at the same step
        return Update(finite, again, cross_entropy, grad_norm, lrs, parts, bool(sums[-1] > 0))

    def _count_skipped(self, step: int, loss: float, grad_norm: float) -> None:
        """Stop where `train.non_finite` says so, or after too many."""
        self.skipped += 1
        train = self.config.train
        if train.non_finite == "skip" and self.skipped <= train.max_skipped:
            return
        why = ""
        if train.non_finite == "skip":
            why = f"; {train.max_skipped} updates were skipped before (train.max_skipped)"
        raise NonFiniteLoss(
            f"{self.place(step)}: the loss is {loss}, the gradient norm {grad_norm}{why}{ADVICE}"
        )

    def place(self, step: int) -> str:
        """Where in the corpus a step's batch comes from."""
        lanes, n = self.lanes, self.lanes.n_segments
        first = lanes.first_token(step)
        return (
            f"step {step + 1} (segment {step % n + 1} of {n}: tokens {first} to "
            f"{first + lanes.seq_len - 1} of each lane's {lanes.lane_len})"
        )

    def learning_rates(self, stage: int, stage_step: int) -> dict[str, float]:
        """By group of parameters; the gates' keeps its ratio to the others' at every step."""
        settings = self.config.stages[stage]
        peak = settings.lr.peak
        if peak is None:
            peak = self.config.train.optimizer.lr
        factor = lr_factor(settings.lr, stage_step, settings.steps)
        gates = 10 * peak
        if settings.prune is not None and settings.prune.gate_lr is not None:
            gates = settings.prune.gate_lr
        return {"matrices": peak * factor, "plain": peak * factor, "gates": gates * factor}

    def calibration(self, step: int, n_batches: int) -> list[Stream]:
        """The next segments of this rank's lanes: streams without a break in memory."""
        steps = range(step, step + n_batches)
        starts = [s for s in steps if s == step or self.lanes.starts_pass(s)]
        pieces = [range(a, b) for a, b in pairwise([*starts, steps.stop])]
        return [
            [self._batch(s, self._lanes_of(micro)) for s in piece]
            for micro in range(self.n_micro)
            for piece in pieces
        ]

    def autocast(self) -> torch.autocast:
        """The run's precision."""
        precision = self.config.train.precision
        device, dtype = self.world.device.type, DTYPES[precision]
        return torch.autocast(device, dtype, enabled=precision != "fp32")

    # ---- state ------------------------------------------------------------------------------

    def meta(self) -> dict[str, Any]:
        """What a checkpoint has to know beside the tensors (JSON values)."""

        def length(memories: list[Memory | None]) -> int:
            return 0 if memories[0] is None else memories[0].length

        return {
            "memory_length": length(self.memories),
            "teacher_memory_length": 0 if self.teacher is None else length(self.teacher.memories),
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
            "skipped": self.skipped,
        }

    def memory_tensors(self) -> dict[str, Tensor]:
        """Memories of all lanes of all ranks, by layer (all ranks must call it)."""
        found = self._gather(self.memories, "layer")
        if self.teacher is not None:
            found |= self._gather(self.teacher.memories, "teacher_layer")
        return found

    def restore(self, meta: dict[str, Any], memory: dict[str, Tensor]) -> None:
        """Take over what `meta` and `memory_tensors` gave; a teacher has to be there before."""
        self.skipped = meta["skipped"]
        if self.loss_scale is not None and meta["loss_scale"] is not None:
            self.loss_scale = LossScale(**meta["loss_scale"])
        self.memories = self._split(memory, "layer", meta["memory_length"])
        if self.teacher is not None:
            length = meta["teacher_memory_length"]
            self.teacher.memories = self._split(memory, "teacher_layer", length)

    def _gather(self, memories: list[Memory | None], prefix: str) -> dict[str, Tensor]:
        """All lanes of all ranks, by layer."""
        if memories[0] is None:
            return {}
        found = {}
        for i, hidden in enumerate(memories[0].hidden):
            if hidden is not None:
                lanes = torch.cat([_remembered(m, i) for m in memories])
                found[f"{prefix}_{i:02d}"] = self.world.gather_lanes(lanes).cpu()
        return found

    def _split(self, found: dict[str, Tensor], prefix: str, length: int) -> list[Memory | None]:
        """This rank's share of what `_gather` gave, by micro-batch."""
        if not length:
            return [None] * self.n_micro
        layers = [found.get(f"{prefix}_{i:02d}") for i in range(self.config.model.n_layers)]
        return [
            Memory(
                [
                    None if h is None else h[lanes.start : lanes.stop].to(self.world.device)
                    for h in layers
                ],
                length,
            )
            for lanes in map(self._lanes_of, range(self.n_micro))
        ]

    def _lanes_of(self, micro: int) -> range:
        """Global numbers of the lanes of one of this rank's micro-batches."""
        first = self.first_lane + micro * self.micro_lanes
        return range(first, first + self.micro_lanes)

    def _batch(self, step: int, lanes: range) -> tuple[Tensor, Tensor]:
        inputs, targets = self.lanes.batch(step, lanes.start, lanes.stop)
        return inputs.to(self.world.device), targets.to(self.world.device)


def check_lanes(config: Config, world: World) -> None:
    """Refuse a batch that does not divide among ranks and micro-batches."""
    train, size = config.train, world.size
    if train.batch_size % size:
        raise ConfigError(
            f"train.batch_size: {train.batch_size} lanes do not divide among {size} ranks"
        )
    lanes = train.batch_size // size
    if lanes % (train.micro_batch_size or lanes):
        raise ConfigError(
            f"train.micro_batch_size: {train.micro_batch_size} does not divide the {lanes} lanes "
            f"of each of {size} ranks"
        )


def _remembered(memory: Memory | None, layer: int) -> Tensor:
    """What training keeps of a layer that has heads; every micro-batch has it if one has."""
    held = None if memory is None else memory.hidden[layer]
    assert isinstance(held, Tensor)
    return held


def _mix(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1
