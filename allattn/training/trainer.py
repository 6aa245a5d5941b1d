"""The training loop: stages, pruning, removal inside the run, evaluation, saving and resuming."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from allattn.config import Config, ConfigError, save_config, with_vocabulary
from allattn.data.lanes import Lanes
from allattn.model import kernel
from allattn.model.attention import choose
from allattn.model.scoring import perplexity
from allattn.model.transformer import TransformerLM, flops_per_token
from allattn.moments import reached
from allattn.pruning.budget import stage_table
from allattn.pruning.schedule import Schedule
from allattn.training.corpus import open_corpus, prepare_missing
from allattn.training.distill import Teacher, check_teacher, first_stage, save_teacher
from allattn.training.engine import connect
from allattn.training.live import LiveModel
from allattn.training.monitor import Monitor, SpikeDetector
from allattn.training.run_folder import check_resumable, lock_folder, make_folder
from allattn.training.speed import Speedometer
from allattn.training.state import (
    Snapshot,
    blaming,
    check_shapes,
    checkpoints_of,
    clear_left,
    keep_newest,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    with_structure,
)
from allattn.training.update import DTYPES, Update, Updater, check_lanes
from allattn.training.watch import Watch

REMOVAL_TOKENS = 1 << 14  # of the valid split: that a removal changes nothing shows on few


class RankLost(RuntimeError):
    """Another rank is gone."""


class Stopped(RuntimeError):
    """SIGTERM came (a scheduler's wish to end the job); the run was saved at the next step."""


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
        corpus = open_corpus(config.data)
        self.run_dir = Path(config.run.dir) / config.run.name
        self.world = connect(config)
        check_lanes(config, self.world)
        if self.run_dir.exists() and not resume:
            raise ConfigError(
                f"{self.run_dir}: the run's folder exists; continue it with --resume, or choose "
                "another run.name"
            )
        self.lock: IO[str] | None = None
        if self.world.rank == 0 and self.run_dir.exists():
            # before anything is read: another process may be about to write the newest checkpoint
            self.lock = lock_folder(self.run_dir)
            clear_left(self.run_dir / "checkpoints")
        self.world.barrier()  # also: every rank has looked at the folder before rank 0 makes it
        self.corpus = prepare_missing(corpus, config.data, self.world)
        checkpoints = checkpoints_of(self.run_dir)
        if not checkpoints and (self.run_dir / "final").exists():
            raise ConfigError(
                f"{self.run_dir}: holds a finished model but no checkpoint to go on from; choose "
                "another run.name, or delete the folder to train anew"
            )
        # of a run that goes on, the structure is settled, wherever it came from
        config.model = with_structure(config, checkpoints[-1] if checkpoints else None)
        config.model = with_vocabulary(config.model, self.corpus.vocab_size, self.corpus.dir)
        stages = stage_table(config, config.model)  # also: every pruning target can be reached
        self.lanes = Lanes(
            self.corpus.tokens("train"),
            config.train.batch_size,
            config.model.seq_len,
            config.run.seed if config.data.shift else None,
        )
        self.schedule = Schedule(config.stages)
        self.step, self.stage = 0, -1
        self.updater = Updater(config, self.world, self.lanes)
        self.live = LiveModel(config, self.world, self.updater.n_micro)
        self.watch = Watch(config, self.corpus, self.world, self.live, self.updater.autocast)
        self.history: list[dict[str, Any]] = []
        self.warned: set[str] = set()
        self.spikes = SpikeDetector()
        self.valid: tuple[int, float] | None = None  # step and perplexity of the last evaluation
        self.stop_asked = False
        if checkpoints:
            self._restore(checkpoints[-1])
        else:
            self._start()
        if self.world.rank == 0:
            if self.lock is None:
                self.lock = make_folder(self.run_dir)
            save_config(config, self.run_dir / "config.yaml")
        self.world.barrier()
        self.monitor = Monitor(
            self.run_dir, self.step, self.schedule.total_steps, active=self.world.rank == 0
        )
        self.monitor.begin(config, stages, self.step)
        if resume:
            self.monitor.say(
                f"{self.run_dir}: continuing after step {self.step}"
                if checkpoints
                else f"{self.run_dir}: no checkpoint to resume from; starting at the first step"
            )
        model, precision = config.model, config.train.precision
        self.speed = Speedometer(self.world, DTYPES[precision])
        way, why = choose(
            model.attention,
            self.world.device.type,
            DTYPES[precision],
            model.attn_dropout,
            model.seq_len,
        )
        self.monitor.say(
            f"{self.live.run_heads} heads, {self.live.n_parameters():,} parameters, {precision} on "
            f"{self.world.size} x {self.world.device.type}; attention: {way} ({why})"
        )
        if way == "fused" and self.world.device.type == "cpu":
            compiled, why = kernel.load()
            if compiled is None:
                self.monitor.say(
                    "attention in PyTorch's own operations, so a step takes about 1.5 times as "
                    f"long: {why}"
                )

    # ---- the loop ---------------------------------------------------------------------------

    def train(self, stop_at: int | None = None) -> None:
        """Run to the end of the schedule, or to a step; saves there.

        Raises:
            NonFiniteLoss: as configured by `train.non_finite`.
            Stopped: SIGTERM came; saved.
            RuntimeError: a checkpoint could not be written, or another rank is gone.
        """
        end = self.schedule.total_steps if stop_at is None else stop_at
        end = min(end, self.schedule.total_steps)
        self.speed.start()
        with self._sigterm():
            try:
                while self.step < end and not self.stop_asked:
                    taken = self._train_step()
                    reached("step:logged")
                    if self.stop_asked or taken and (self.step == end or self._save_is_due()):
                        self.save()
            except RuntimeError as error:
                if self.world.is_lost_connection(error):
                    raise RankLost(
                        f"{self.run_dir}: rank {self.world.rank} lost the others in a step after "
                        f"{self.step}: one of them died (its own output says why); continue with "
                        "--resume"
                    ) from error
                raise
            finally:
                self.monitor.close()
                if self.lock is not None:
                    self.lock.close()
        if self.stop_asked:
            raise Stopped(
                f"{self.run_dir}: SIGTERM; saved after step {self.step}, continue with --resume"
            )

    def _train_step(self) -> bool:
        """A step of the schedule and what is due after it; False where it has to be tried again."""
        stage, stage_step = self.schedule.lookup(self.step)
        if stage != self.stage:
            self._begin_stage(stage)
        update = self.updater.step(self.live, self.step, stage, stage_step, self.sigterm)
        self.stop_asked = update.stop
        if not update.updated:
            self._log_skipped(update)
            if update.again:
                return False
        self.step += 1
        self.monitor.advance()
        if update.updated:
            self._log_update(update)
        if self.step in self.schedule.ends:
            self._finish_stage()
            return True
        self._cut_if_due(stage_step + 1)
        self._remove_closed(stage_step + 1)
        if self.step % self.config.train.eval_every == 0:
            self._log_evaluation()
            self._warn(at_end=False)
        return True

    def _save_is_due(self) -> bool:
        return self.step in self.schedule.ends or self.step % self.config.train.save_every == 0

    @contextlib.contextmanager
    def _sigterm(self) -> Iterator[None]:
        """SIGTERM, what a scheduler sends, asks for a stop at the next step boundary."""

        def ask(*_: Any) -> None:
            self.sigterm = True

        self.sigterm = False
        if threading.current_thread() is not threading.main_thread():
            yield  # no place for signal handlers
            return
        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    # ---- stages and removal -----------------------------------------------------------------

    def _begin_stage(self, stage: int) -> None:
        self.stage, self.updater.pruning, self.warned = stage, {}, set()
        if stage == first_stage(self.config):
            snapshot = self.live.engine.snapshot()
            if self.world.rank == 0:
                save_teacher(self.run_dir, self.live.engine.module, snapshot.parameters)
            self.world.barrier()
        if self.config.stages[stage].distill is None:
            self.updater.teacher = None
        elif self.updater.teacher is None:
            self.updater.teacher = Teacher(self.run_dir, self.world.device, self.updater.n_micro)
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
            below = self.live.pruner.decided_below
            readiness = self.live.decide()
            heads = self.live.open_by_layer()
            text = (
                f"{sum(heads)} of {self.live.run_heads} heads stay {heads}; "
                f"{readiness['undecided']} gates were undecided ({below:.2g} < P(open) < 0.9)"
            )
            if readiness["cut_open"]:
                text += (
                    f"; warning: {readiness['cut_open']} of the heads cut were still open: give "
                    "the stage more steps or a larger prune.gate_lr"
                )
            self.monitor.event(self._event("decision") | {"heads": heads} | readiness, text)
            reached("removal:decided")
            result |= readiness
            prune = self.config.stages[self.stage].prune
            assert prune is not None and self.live.masks is not None
            if prune.remove != "never":
                self._remove(self.live.masks)
        valid = self._log_evaluation()
        self.history.append(result | {"ppl": valid["ppl"], "heads": self.live.open_by_layer()})

    def _warn(self, at_end: bool) -> None:
        """Say what looks wrong with the gates, each thing once a stage."""
        if self.live.pruner is None:
            return
        log_alphas = self.live.log_alphas()
        for text in self.live.pruner.warnings(log_alphas, self.updater.pruning, at_end):
            if text not in self.warned:
                self.warned.add(text)
                self.monitor.event(self._event("warning") | {"text": text}, f"warning: {text}")

    def _cut_if_due(self, stage_step: int) -> None:
        """Methods that score heads: close as many as are due after so many steps of the stage."""
        stage = self.config.stages[self.stage]
        pruner = self.live.pruner
        k = None if pruner is None else pruner.cut_due(stage_step, stage.steps)
        if k is None:
            return
        assert stage.prune is not None, "it has a method"
        with self.updater.autocast():
            n_batches = stage.prune.batches
            self.live.cut(k, lambda: self.updater.calibration(self.step, n_batches), self.step)
        heads = self.live.open_by_layer()
        self.monitor.event(
            # a stage's first cut belongs to the step to come, as its beginning does
            self._event("cut") | {"step": self.step + (stage_step == 0), "heads": heads},
            f"{stage.prune.method}: {sum(heads)} heads stay open {heads}",
        )

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
        before = self._evaluate("valid", REMOVAL_TOKENS)["loss"]
        n_removed = self.live.remove(kept, self.updater.memories)
        after = self._evaluate("valid", REMOVAL_TOKENS)["loss"]
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
            f"loss of a piece of valid {before:.6f} before, {after:.6f} after",
        )

    # ---- evaluation and logging -------------------------------------------------------------

    def _evaluate(self, split: str, most: int | None = None) -> dict[str, float]:
        with self.speed.stopped():
            return self.watch.loss(split, most)

    def _log_evaluation(self) -> dict[str, float]:
        result = self._evaluate("valid")
        if math.isfinite(result["loss"]) or "valid" in self.corpus.splits:
            with self.speed.stopped():
                look = self.watch.look()
                line = self._line("valid", self.live.open_by_layer()) | result
                line |= {
                    "keep": line["heads_open"] / max(self.live.run_heads, 1),
                    "params_non_embedding": self.live.n_non_embedding(),
                    "p_open": look.p_open,
                    "persistent_share": look.persistent_share,
                }
                self.monitor.evaluation(line, look)
            self.valid = (self.step, result["ppl"])
        return result

    def _log_update(self, update: Update) -> None:
        """A training line every `log_every` steps, and a warning where the loss leaps."""
        train = self.config.train
        self.speed.tokens += train.batch_size * self.config.model.seq_len
        if self.spikes.rises(update.loss):
            self.monitor.event(
                self._event("spike") | {"cross_entropy": update.loss},
                f"warning: the loss rose to {update.loss:.3f} from about {self.spikes.mean:.3f}",
            )
        if self.step % train.log_every:
            return
        open_by_layer = self.live.open_by_layer()
        run_heads = max(self.live.run_heads, 1)
        line = self._line("train", open_by_layer) | {
            "loss": update.loss,
            "ppl": perplexity(update.loss),
            "tokens": self.step * train.batch_size * self.config.model.seq_len,
            **self.speed.read(flops_per_token(self.live.shape)),
            "lr": update.lrs["matrices"],
            "grad_norm": update.grad_norm,
            "sparsity": 1 - sum(open_by_layer) / run_heads,
            **({"gate_lr": update.lrs["gates"]} if self.live.has_gates else {}),
            **update.parts,
        }
        if "target_heads" in line:
            line["target_sparsity"] = 1 - line["target_heads"] / run_heads
        self.monitor.train(line, open_by_layer)

    def _log_skipped(self, update: Update) -> None:
        what = f"the loss is {update.loss}, the gradient norm {update.grad_norm}"
        line = self._event("skipped") | {"step": self.step + 1, "skipped": self.updater.skipped}
        line |= {"cross_entropy": update.loss, "norm": update.grad_norm}
        line |= {"segment": self.step % self.lanes.n_segments}
        line |= {key: update.parts[key] for key in ("loss_scale",) if key in update.parts}
        text = f"skipped an update ({line['skipped']} so far): {self.updater.place(self.step)}"
        if update.again:
            text = f"overflow; again with loss scale {update.parts['loss_scale']:g}"
        self.monitor.event(line, text if update.again else f"warning: {text}: {what}")

    def _line(self, split: str, open_by_layer: list[int]) -> dict[str, Any]:
        return {
            "step": self.step,
            "stage": self._stage_name(),
            "split": split,
            "heads_open": sum(open_by_layer),
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
        memory = self.updater.memory_tensors()
        error = ""
        if self.world.rank == 0:
            try:
                save_checkpoint(self.run_dir / "checkpoints", snapshot, memory, self._meta())
                reached("checkpoint:kept")
                if self.config.train.keep_last is not None:
                    keep_newest(self.run_dir / "checkpoints", self.config.train.keep_last)
            except OSError as failure:
                error = f"could not save step {self.step}: {failure}"
        failed = self.world.sum(torch.tensor([float(bool(error))], device=self.world.device))
        if failed > 0:
            newest = checkpoints_of(self.run_dir)
            error += f"; the newest checkpoint is {newest[-1].name if newest else 'none'}"
            if self.config.train.save_error == "stop":
                raise RuntimeError(error)
            self.monitor.event(self._event("save_error") | {"text": error}, f"warning: {error}")

    def _meta(self) -> dict[str, Any]:
        """What a checkpoint has to know beside the tensors (JSON values)."""
        return {
            "step": self.step,
            "stage": self.stage,
            "config": dataclasses.asdict(self.config),
            **self.live.meta(),
            **self.updater.meta(),
            "history": self.history,
            "warned": sorted(self.warned),
            "spikes": dataclasses.asdict(self.spikes),
            "valid_ppl": self.valid[1] if self.valid and self.valid[0] == self.step else None,
            "world_size": self.world.size,
            "tokenizer": self.corpus.tokenizer.fingerprint(),
            "corpus": self.corpus.splits["train"]["sha256"],
        }

    def close(self) -> None:
        """Leave the other ranks in good order."""
        self.live.engine.close()
        self.world.close()

    def _start(self) -> None:
        torch.manual_seed(self.config.run.seed)
        parameters: dict[str, Tensor] = dict(TransformerLM(self.config.model).named_parameters())
        if self.config.run.init_from is not None:
            source = load_weights(self.config.run.init_from)
            if source.config.heads != self.config.model.heads:
                raise ConfigError(
                    f"run.init_from: {source.path} has other heads; set model.n_heads="
                    f"{source.config.heads} model.d_head={source.config.d_head}".replace(", ", ",")
                )
            check_shapes(source.path, source.parameters, parameters)
            known = source.info.get("tokenizer")
            if known not in (None, self.corpus.tokenizer.fingerprint()):
                raise ConfigError(
                    f"run.init_from: {source.path} was trained with another tokenizer than the one "
                    f"of {self.corpus.dir}; prepare the text with that one"
                )
            parameters = source.parameters
        self.live.start(parameters)

    def _restore(self, folder: Path) -> None:
        try:
            snapshot, memory, meta = load_checkpoint(folder)
        except ValueError as error:
            raise ValueError(
                f"{error}; delete {folder} to go on from the checkpoint before it"
            ) from None
        with blaming(folder / "meta.json"):
            self._take_over(folder, snapshot, memory, meta)

    def _take_over(
        self, folder: Path, snapshot: Snapshot, memory: dict[str, Tensor], meta: dict[str, Any]
    ) -> None:
        check_resumable(folder, meta, self.config, self.corpus)
        check_teacher(self.run_dir, meta, self.config)
        self.step, self.stage, self.history = meta["step"], meta["stage"], meta["history"]
        self.warned = set(meta["warned"])
        self.spikes = SpikeDetector(**meta["spikes"])
        prune = self.config.stages[self.stage].prune
        self.live.restore(snapshot, meta, prune, folder / "parameters.safetensors")
        if self.config.stages[self.stage].distill is not None:
            self.updater.teacher = Teacher(self.run_dir, self.world.device, self.updater.n_micro)
        self.updater.restore(meta, memory)
