"""The training loop: stages, pruning, removal inside the run, evaluation, saving and resuming."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allattn.config import Config, ConfigError, save_config, with_vocabulary
from allattn.data.lanes import Corpus, Lanes
from allattn.model.attention import choose
from allattn.model.fused import flash_kernel_works
from allattn.model.scoring import perplexity, score_stream
from allattn.model.transformer import Memory, TransformerLM
from allattn.pruning.budget import target_heads
from allattn.pruning.importance import Stream
from allattn.pruning.schedule import Schedule, lr_factor
from allattn.training.distill import Teacher, first_stage, save_teacher
from allattn.training.engine import connect
from allattn.training.live import LiveModel
from allattn.training.monitor import Monitor
from allattn.training.run_folder import check_resumable, lock_folder
from allattn.training.state import (
    check_shapes,
    checkpoints_of,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    with_structure,
)


class NonFiniteLoss(RuntimeError):
    """The loss is NaN or infinite; raised before the optimiser touches the weights."""


class Trainer:
    """One run.

    Attributes:
        step: optimiser steps done.
        stage: number of the stage that the model is set up for; -1 before the first.
        live: the model, its optimiser state and its gates.
        history: what each finished stage came to.
    """

    def __init__(self, config: Config, resume: bool = False):
        """Open the corpus and the run's folder, build or load the model.

        Args:
            config: a validated config.
            resume: go on from the newest checkpoint in the run's folder, if there is one.

        Raises:
            ConfigError, ValueError, FileNotFoundError: what a user can mend, in one line.
        """
        self.config = config = dataclasses.replace(config)
        self.corpus = Corpus(config.data.dir)
        self.run_dir = Path(config.run.dir) / config.run.name
        checkpoints = checkpoints_of(self.run_dir)
        # of a run that goes on, the structure is settled, wherever it came from
        config.model = with_structure(config, checkpoints[-1] if checkpoints else None)
        config.model = with_vocabulary(config.model, self.corpus.vocab_size, self.corpus.dir)
        for i, stage in enumerate(config.stages):
            if stage.prune is not None:
                target_heads(
                    stage.prune, config.model, sum(config.model.heads), f"stages[{i}].prune"
                )
        self.eos_id = self.corpus.tokenizer.eos_id
        self.lanes = Lanes(
            self.corpus.tokens("train"), config.train.batch_size, config.model.seq_len
        )
        self.schedule = Schedule(config.stages)
        self.world = connect(config)
        self._split_lanes()
        if self.run_dir.exists() and not resume:
            raise ConfigError(
                f"{self.run_dir}: the run's folder exists; continue it with --resume, or choose "
                "another run.name"
            )
        self.step, self.stage = 0, -1
        self.live = LiveModel(config, self.world, self.n_micro)
        self.history: list[dict[str, Any]] = []
        self.memories: list[Memory | None] = [None] * self.n_micro
        self.teacher: Teacher | None = None
        self.pruning: dict[str, Any] = {}  # what the method logged of the last step
        self.warned: set[str] = set()
        self.world.barrier()  # every rank has looked at the folder before rank 0 makes it
        if checkpoints:
            self._restore(checkpoints[-1])
        else:
            self._start()
        if self.world.rank == 0:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.lock = lock_folder(self.run_dir)
            save_config(config, self.run_dir / "config.yaml")
        self.world.barrier()
        self.monitor = Monitor(
            self.run_dir, self.step, self.schedule.total_steps, active=self.world.rank == 0
        )
        if resume:
            self.monitor.say(
                f"{self.run_dir}: continuing after step {self.step}"
                if checkpoints
                else f"{self.run_dir}: no checkpoint to resume from; starting at the first step"
            )
        model, precision = config.model, config.train.precision
        way, why = choose(
            model.attention,
            self.world.device.type,
            torch.bfloat16 if precision == "bf16" else torch.float32,
            model.attn_dropout,
        )
        self.monitor.say(
            f"{self.live.run_heads} heads, {self.live.n_parameters():,} parameters, {precision} on "
            f"{self.world.size} x {self.world.device.type}; attention: {way} ({why})"
        )
        if way == "fused" and precision == "bf16" and not flash_kernel_works():
            self.monitor.say("this PyTorch lacks a kernel that the fused core uses; tiles instead")

    # ---- the loop ---------------------------------------------------------------------------

    def train(self, stop_at: int | None = None) -> None:
        """Run to the end of the schedule, or to a step; saves there."""
        end = self.schedule.total_steps if stop_at is None else stop_at
        end = min(end, self.schedule.total_steps)
        every = self.config.train
        self.clock, self.clock_tokens = time.perf_counter(), 0
        try:
            while self.step < end:
                stage, stage_step = self.schedule.lookup(self.step)
                if stage != self.stage:
                    self._begin_stage(stage)
                self._train_step(stage_step)
                stage_ends = self.step in self.schedule.ends
                if stage_ends:
                    self._finish_stage()
                else:
                    self._cut_if_due(stage_step + 1)
                    self._remove_closed(stage_step + 1)
                    if self.step % every.eval_every == 0:
                        self._log_evaluation()
                        self._warn(at_end=False)
                if stage_ends or self.step % every.save_every == 0 or self.step == end:
                    self.save()
        finally:
            self.monitor.close()
            if self.world.rank == 0:
                self.lock.close()

    def _train_step(self, stage_step: int) -> None:
        stage = self.config.stages[self.stage]
        if self.lanes.starts_pass(self.step):
            self.memories = [None] * self.n_micro
            if self.teacher is not None:
                self.teacher.forget()
        # dropout's noise is a function of seed, step and rank: resuming needs no generator state
        torch.manual_seed(_mix(self.config.run.seed, self.step, self.world.rank))
        model, pruner = self.live.engine.module, self.live.pruner
        model.train()
        losses = []
        for m in range(self.n_micro):
            lanes = self._micro_lanes(m)
            inputs, targets = self._batch(self.step, lanes)
            self.live.draw(self.step, stage_step, stage.steps, lanes)
            with self._autocast():
                soft = None
                if stage.distill is not None:
                    soft = self.teacher(m, inputs, stage.distill.temperature)
                output = self.live.engine(inputs, targets, self.memories[m], soft_targets=soft)
                terms = [output.nll.mean()]
                if soft is not None:
                    terms.append(output.divergence.mean())
            losses.append(torch.stack([term.detach().double() for term in terms]))
            weight = 0.0 if soft is None else stage.distill.weight
            loss = terms[0] if soft is None else (1 - weight) * terms[0] + weight * terms[1]
            if pruner is not None:
                term, self.pruning = pruner.objective(model, stage_step)
                loss = loss if term is None else loss + term.to(loss.device)
            self.memories[m] = output.memory
            self.live.engine.backward(loss, last=m == self.n_micro - 1)
        means = self.world.sum(torch.stack(losses).mean(0)) / self.world.size
        cross_entropy = float(means[0])
        if not means.isfinite().all():
            raise NonFiniteLoss(
                f"step {self.step}: the loss is {cross_entropy}; the weights are still those of "
                "the step before (lower train.optimizer.lr, or set train.clip_norm)"
            )
        lrs = self._learning_rates(stage_step)
        grad_norm = self.live.engine.step(lrs)
        if pruner is not None:
            pruner.after_step(self.pruning, stage_step)
        self.step += 1
        self.clock_tokens += self.config.train.batch_size * self.config.model.seq_len
        self.monitor.advance()
        if self.step % self.config.train.log_every == 0:
            extra = {} if pruner is None else self.pruning
            if stage.distill is not None:
                extra = extra | {
                    "distill": float(means[1]),
                    "distill_weight": weight,
                    "cross_entropy_weight": 1 - weight,
                }
            self._log_step(cross_entropy, lrs, grad_norm, extra)

    def _learning_rates(self, stage_step: int) -> dict[str, float]:
        stage = self.config.stages[self.stage]
        peak = stage.lr.peak if stage.lr.peak is not None else self.config.train.optimizer.lr
        factor = lr_factor(stage.lr, stage_step, stage.steps)
        gates = (
            10 * peak if stage.prune is None or stage.prune.gate_lr is None else stage.prune.gate_lr
        )
        return {"matrices": peak * factor, "plain": peak * factor, "gates": gates * factor}

    # ---- stages and removal -----------------------------------------------------------------

    def _begin_stage(self, stage: int) -> None:
        self.stage, self.pruning, self.warned = stage, {}, set()
        if stage == first_stage(self.config):
            snapshot = self.live.engine.snapshot()
            if self.world.rank == 0:
                save_teacher(self.run_dir, self.live.engine.module, snapshot.parameters)
            self.world.barrier()
        if self.config.stages[stage].distill is not None and self.teacher is None:
            self.teacher = Teacher(self.run_dir, self.world.device, self.n_micro)
        prune = self.config.stages[stage].prune
        if prune is not None:
            self.live.begin_pruning(prune)
        self.monitor.event(
            self._event("stage") | {"step": self.step + 1},  # the step to come
            f"begins: {self.config.stages[stage].steps} steps, {sum(self.live.shape.heads)} heads",
        )
        self._cut_if_due(0)

    def _finish_stage(self) -> None:
        """Decide on heads if the stage pruned, remove them as configured, and evaluate."""
        result = {"stage": self._stage_name(), "step": self.step}
        if self.live.pruner is not None:
            self._cut_if_due(self.config.stages[self.stage].steps)
            self._warn(at_end=True)
            readiness = self.live.decide()
            heads = self.live.open_by_layer()
            text = (
                f"{sum(heads)} of {self.live.run_heads} heads stay {heads}; "
                f"{readiness['undecided']} gates were undecided (0.1 < P(open) < 0.9)"
            )
            if readiness["cut_open"]:
                text += (
                    f"; warning: {readiness['cut_open']} of the heads cut were still open: give "
                    "the stage more steps or a larger prune.gate_lr"
                )
            self.monitor.event(self._event("decision") | {"heads": heads} | readiness, text)
            result |= readiness
            if self.config.stages[self.stage].prune.remove != "never":
                self._remove(self.live.masks)
        valid = self._log_evaluation()
        self.history.append(result | {"ppl": valid["ppl"], "heads": self.live.open_by_layer()})

    def _warn(self, at_end: bool) -> None:
        """Say what looks wrong with the gates, each thing once a stage."""
        if self.live.pruner is None:
            return
        log_alphas = self.live.log_alphas()
        for text in self.live.pruner.warnings(log_alphas, self.pruning, at_end):
            if text not in self.warned:
                self.warned.add(text)
                self.monitor.event(self._event("warning") | {"text": text}, f"warning: {text}")

    def _cut_if_due(self, stage_step: int) -> None:
        """Methods that score heads: close as many as are due after so many steps of the stage."""
        stage = self.config.stages[self.stage]
        k = self.live.pruner and self.live.pruner.cut_due(stage_step, stage.steps)
        if k is None:
            return
        with self._autocast():
            self.live.cut(k, lambda: map(self._calibration, range(self.n_micro)), self.step)
        heads = self.live.open_by_layer()
        self.monitor.event(
            # a stage's first cut belongs to the step to come, as its beginning does
            self._event("cut") | {"step": self.step + (stage_step == 0), "heads": heads},
            f"{stage.prune.method}: {sum(heads)} heads stay open {heads}",
        )

    def _calibration(self, micro: int) -> Stream:
        """The next segments of a micro-batch's lanes."""
        for k in range(self.config.stages[self.stage].prune.batches):
            yield self._batch(self.step + k, self._micro_lanes(micro))

    def _micro_lanes(self, micro: int) -> range:
        """Global numbers of the lanes of one of this rank's micro-batches."""
        first = self.first_lane + micro * self.micro_lanes
        return range(first, first + self.micro_lanes)

    def _batch(self, step: int, lanes: range) -> tuple[Tensor, Tensor]:
        inputs, targets = self.lanes.batch(step, lanes.start, lanes.stop)
        return inputs.to(self.world.device), targets.to(self.world.device)

    def _remove_closed(self, stage_steps_done: int) -> None:
        """`remove: {every: N}`: cut the heads that have been closed long enough."""
        prune = self.config.stages[self.stage].prune
        if prune is None or not isinstance(prune.remove, dict):
            return
        if stage_steps_done % prune.remove["every"] == 0:
            kept = self.live.check_closed()
            if sum(map(len, kept)) < sum(self.live.shape.heads):
                self._remove(kept)

    def _remove(self, kept: list[list[int]]) -> None:
        before = self._evaluate("valid")["loss"]
        n_removed = self.live.remove(kept, self.memories)
        after = self._evaluate("valid")["loss"]
        self.monitor.event(
            self._event("removal")
            | {
                "removed": n_removed,
                "heads": self.live.shape.heads,
                "head_ids": self.live.head_ids,
                "loss_before": before,
                "loss_after": after,
            },
            f"removed {n_removed} heads, {self.live.shape.heads} are left; "
            f"valid loss {before:.6f} before, {after:.6f} after",
        )

    # ---- evaluation and logging -------------------------------------------------------------

    def _evaluate(self, split: str) -> dict[str, float]:
        if split not in self.corpus.splits:
            return {"loss": float("nan"), "ppl": float("nan")}
        started = time.perf_counter()
        model = self.live.engine.module
        model.eval()
        with self._autocast():
            total = score_stream(
                self.live.engine,
                model,
                self.corpus.tokens(split),
                self.eos_id,
                seq_len=self.config.model.seq_len,
                batch_size=self.config.train.eval_batch_size,
                rank=self.world.rank,
                world_size=self.world.size,
            )
        nats, tokens = self.world.sum(total).tolist()
        self.clock += time.perf_counter() - started  # training speed leaves evaluation out
        return {"loss": nats / tokens, "ppl": perplexity(nats / tokens)}

    def _log_evaluation(self) -> dict[str, float]:
        result = self._evaluate("valid")
        if math.isfinite(result["loss"]) or "valid" in self.corpus.splits:
            self.monitor.evaluation(self._line("valid") | result)
        return result

    def _log_step(
        self, loss: float, lrs: dict[str, float], grad_norm: float, extra: dict[str, Any]
    ) -> None:
        elapsed = time.perf_counter() - self.clock
        line = self._line("train") | {
            "loss": loss,
            "ppl": perplexity(loss),
            "tokens": self.step * self.config.train.batch_size * self.config.model.seq_len,
            "tokens_per_second": self.clock_tokens / elapsed,
            "lr": lrs["matrices"],
            "grad_norm": grad_norm,
            "sparsity": 1 - sum(self.live.open_by_layer()) / max(self.live.run_heads, 1),
            **({"gate_lr": lrs["gates"]} if self.live.has_gates else {}),
            **extra,
        }
        self.monitor.train(line, self.live.open_by_layer())
        self.clock, self.clock_tokens = time.perf_counter(), 0

    def _line(self, split: str) -> dict[str, Any]:
        return {
            "step": self.step,
            "stage": self._stage_name(),
            "split": split,
            "heads_open": sum(self.live.open_by_layer()),
            "params": self.live.n_parameters(),
        }

    def _event(self, name: str) -> dict[str, Any]:
        return {"event": name, "step": self.step, "stage": self._stage_name()}

    def _stage_name(self) -> str:
        return self.config.stages[max(self.stage, 0)].name

    # ---- state ------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self.monitor.flush()
        snapshot = self.live.engine.snapshot()
        memory = self._gather_memories(self.memories, "layer")
        if self.teacher is not None:
            memory |= self._gather_memories(self.teacher.memories, "teacher_layer")
        if self.world.rank == 0:
            meta = {
                "step": self.step,
                "stage": self.stage,
                "config": dataclasses.asdict(self.config),
                **self.live.meta(),
                "memory_length": 0 if self.memories[0] is None else self.memories[0].length,
                "teacher_memory_length": 0
                if self.teacher is None or self.teacher.memories[0] is None
                else self.teacher.memories[0].length,
                "history": self.history,
                "warned": sorted(self.warned),
                "world_size": self.world.size,
                "tokenizer": self.corpus.tokenizer.fingerprint(),
                "corpus": self.corpus.splits["train"]["sha256"],
            }
            save_checkpoint(self.run_dir / "checkpoints", snapshot, memory, meta)
        self.world.barrier()

    def _gather_memories(self, memories: list[Memory | None], prefix: str) -> dict[str, Tensor]:
        """All lanes of all ranks, by layer."""
        if memories[0] is None:
            return {}
        found = {}
        for i, hidden in enumerate(memories[0].hidden):
            if hidden is not None:
                lanes = torch.cat([m.hidden[i] for m in memories])
                found[f"{prefix}_{i:02d}"] = self.world.gather_lanes(lanes).cpu()
        return found

    def _split_memories(
        self, found: dict[str, Tensor], prefix: str, length: int
    ) -> list[Memory | None]:
        """This rank's share of what `_gather_memories` gave, by micro-batch."""
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
            for lanes in map(self._micro_lanes, range(self.n_micro))
        ]

    def close(self) -> None:
        """Leave the other ranks in good order."""
        self.live.engine.close()
        self.world.close()

    def _start(self) -> None:
        torch.manual_seed(self.config.run.seed)
        parameters = dict(TransformerLM(self.config.model).named_parameters())
        if self.config.run.init_from is not None:
            source = load_weights(self.config.run.init_from)
            if source.config.heads != self.config.model.heads:
                raise ConfigError(
                    f"run.init_from: {source.path} has other heads; set model.n_heads="
                    f"{source.config.heads} model.d_head={source.config.d_head}".replace(", ", ",")
                )
            check_shapes(source.path, source.parameters, parameters)
            parameters = source.parameters
        self.live.start(parameters)

    def _restore(self, folder: Path) -> None:
        try:
            snapshot, memory, meta = load_checkpoint(folder)
        except ValueError as error:
            raise ValueError(
                f"{error}; delete {folder} to go on from the checkpoint before it"
            ) from None
        check_resumable(folder, meta, self.config, self.corpus)
        self.step, self.stage, self.history = meta["step"], meta["stage"], meta["history"]
        self.warned = set(meta["warned"])
        prune = self.config.stages[self.stage].prune
        self.live.restore(snapshot, meta, prune, folder / "parameters.safetensors")
        self.memories = self._split_memories(memory, "layer", meta["memory_length"])
        if self.config.stages[self.stage].distill is not None:
            self.teacher = Teacher(self.run_dir, self.world.device, self.n_micro)
            length = meta["teacher_memory_length"]
            self.teacher.memories = self._split_memories(memory, "teacher_layer", length)

    # ---- small things -----------------------------------------------------------------------

    def _split_lanes(self) -> None:
        """Which lanes this rank and each of its micro-batches run."""
        train, size = self.config.train, self.world.size
        if train.batch_size % size:
            raise ConfigError(
                f"train.batch_size: {train.batch_size} lanes do not divide among {size} ranks"
            )
        self.rank_lanes = train.batch_size // size
        self.micro_lanes = train.micro_batch_size or self.rank_lanes
        if self.rank_lanes % self.micro_lanes:
            raise ConfigError(
                f"train.micro_batch_size: {self.micro_lanes} does not divide the "
                f"{self.rank_lanes} lanes of each of {size} ranks"
            )
        self.first_lane = self.world.rank * self.rank_lanes
        self.n_micro = self.rank_lanes // self.micro_lanes

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.world.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16"
        )


def _mix(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1
