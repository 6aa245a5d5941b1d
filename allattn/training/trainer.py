"""The training loop: stages, pruning, removal inside the run, evaluation, saving and resuming."""

from __future__ import annotations

import dataclasses
import fcntl
import math
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from allattn.config import Config, ConfigError, save_config, with_vocabulary
from allattn.data.lanes import Corpus, Lanes
from allattn.model.attention import choose
from allattn.model.fused import flash_kernel_works
from allattn.model.scoring import perplexity, score_stream
from allattn.model.transformer import Memory, TransformerLM
from allattn.pruning.schedule import Schedule, lr_factor
from allattn.training.engine import connect
from allattn.training.live import LiveModel
from allattn.training.monitor import Monitor
from allattn.training.state import (
    check_shapes,
    checkpoints_of,
    load_checkpoint,
    load_weights,
    save_checkpoint,
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
        config.model = with_vocabulary(config.model, self.corpus.vocab_size, self.corpus.dir)
        self.eos_id = self.corpus.tokenizer.eos_id
        self.lanes = Lanes(
            self.corpus.tokens("train"), config.train.batch_size, config.model.seq_len
        )
        self.schedule = Schedule(config.stages)
        self.world = connect(config)
        self._split_lanes()
        self.run_dir = Path(config.run.dir) / config.run.name
        checkpoints = checkpoints_of(self.run_dir)
        if self.run_dir.exists() and not resume:
            raise ConfigError(
                f"{self.run_dir}: the run's folder exists; continue it with --resume, or choose "
                "another run.name"
            )
        self.step, self.stage = 0, -1
        self.live = LiveModel(config, self.world, self.n_micro)
        self.history: list[dict[str, Any]] = []
        self.memories: list[Memory | None] = [None] * self.n_micro
        self.world.barrier()  # every rank has looked at the folder before rank 0 makes it
        if checkpoints:
            self._restore(checkpoints[-1])
        else:
            self._start()
        if self.world.rank == 0:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.lock = _lock(self.run_dir)
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
                    self._remove_closed(stage_step + 1)
                    if self.step % every.eval_every == 0:
                        self._log_evaluation()
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
        # dropout's noise is a function of seed, step and rank: resuming needs no generator state
        torch.manual_seed(_mix(self.config.run.seed, self.step, self.world.rank))
        model = self.live.engine.module
        model.train()
        if self.live.pruner is not None:
            self.live.pruner.draw(model, self.step)
        pruning: dict[str, float] = {}
        losses = []
        for m in range(self.n_micro):
            first = self.first_lane + m * self.micro_lanes
            inputs, targets = self.lanes.batch(self.step, first, first + self.micro_lanes)
            device = self.world.device
            with self._autocast():
                output = self.live.engine(inputs.to(device), targets.to(device), self.memories[m])
                loss = output.nll.mean()
            losses.append(loss.detach())
            if self.live.pruner is not None:
                term, pruning = self.live.pruner.objective(model, stage_step)
                loss = loss + term
            self.memories[m] = output.memory
            self.live.engine.backward(loss, last=m == self.n_micro - 1)
        mean_loss = torch.stack(losses).mean().double()
        cross_entropy = float(self.world.sum(mean_loss)) / self.world.size
        if not math.isfinite(cross_entropy):
            raise NonFiniteLoss(
                f"step {self.step}: the loss is {cross_entropy}; the weights are still those of "
                "the step before (lower train.optimizer.lr, or set train.clip_norm)"
            )
        lrs = self._learning_rates(stage_step)
        grad_norm = self.live.engine.step(lrs)
        if self.live.pruner is not None:
            self.live.pruner.after_step(pruning["expected_heads"], stage_step)
        self.step += 1
        self.clock_tokens += self.config.train.batch_size * self.config.model.seq_len
        self.monitor.advance()
        if self.step % self.config.train.log_every == 0:
            self._log_step(stage.name, cross_entropy, lrs, grad_norm, pruning)

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
        self.stage = stage
        prune = self.config.stages[stage].prune
        if prune is not None:
            self.live.begin_pruning(prune)
        self.monitor.event(
            self._event("stage") | {"step": self.step + 1},  # the step to come
            f"begins: {self.config.stages[stage].steps} steps, {sum(self.live.shape.heads)} heads",
        )

    def _finish_stage(self) -> None:
        """Decide on heads if the stage pruned, remove them as configured, and evaluate."""
        result = {"stage": self._stage_name(), "step": self.step}
        if self.live.pruner is not None:
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

    def _remove_closed(self, stage_steps_done: int) -> None:
        """`remove: {every: N}`: cut the heads that have been closed long enough."""
        prune = self.config.stages[self.stage].prune
        if prune is None or not isinstance(prune.remove, dict):
            return
        if stage_steps_done % prune.remove["every"] == 0:
            kept = self.live.pruner.check_closed(self.live.log_alphas())
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
        self,
        stage: str,
        loss: float,
        lrs: dict[str, float],
        grad_norm: float,
        pruning: dict[str, float],
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
            **({"gate_lr": lrs["gates"]} if pruning else {}),
            **pruning,
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
        memory: dict[str, Tensor] = {}
        if self.memories[0] is not None:
            for i, hidden in enumerate(self.memories[0].hidden):
                if hidden is not None:
                    lanes = torch.cat([m.hidden[i] for m in self.memories])
                    memory[f"layer_{i:02d}"] = self.world.gather_lanes(lanes).cpu()
        if self.world.rank == 0:
            meta = {
                "step": self.step,
                "stage": self.stage,
                "config": dataclasses.asdict(self.config),
                **self.live.meta(),
                "memory_length": 0 if self.memories[0] is None else self.memories[0].length,
                "history": self.history,
                "world_size": self.world.size,
                "tokenizer": self.corpus.tokenizer.fingerprint(),
                "corpus": self.corpus.splits["train"]["sha256"],
            }
            save_checkpoint(self.run_dir / "checkpoints", snapshot, memory, meta)
        self.world.barrier()

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
        _check_resumable(folder, meta, self.config, self.corpus)
        self.step, self.stage, self.history = meta["step"], meta["stage"], meta["history"]
        prune = self.config.stages[self.stage].prune
        self.live.restore(snapshot, meta, prune, folder / "parameters.safetensors")
        if meta["memory_length"]:
            n_layers, size = self.config.model.n_layers, self.micro_lanes
            lanes = [memory.get(f"layer_{i:02d}") for i in range(n_layers)]
            starts = range(self.first_lane, self.first_lane + self.rank_lanes, size)
            self.memories = [
                Memory(
                    [None if h is None else h[s : s + size].to(self.world.device) for h in lanes],
                    meta["memory_length"],
                )
                for s in starts
            ]

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


def _check_resumable(folder: Path, meta: dict[str, Any], config: Config, corpus: Corpus) -> None:
    """A run goes on with the model, data and lanes that it began with."""
    saved = meta["config"]
    now = dataclasses.asdict(config)
    pairs = [(f"model.{k}", saved["model"].get(k), v) for k, v in now["model"].items()]
    pairs += [
        (f"train.{k}", saved["train"].get(k), now["train"][k]) for k in ("batch_size", "optimizer")
    ]
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


def _lock(run_dir: Path) -> IO[str]:
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


def _mix(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1
