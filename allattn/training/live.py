"""The model of a run while it trains: in its engine, with its gates, and the surgery on it.

Every change of shape (gates come, gates are decided, heads are cut) takes the same way: the full
state out of the engine, changed by name, into a fresh model in a fresh engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from allattn.config import Config, ModelConfig, PruneConfig
from allattn.model.transformer import Memory, TransformerLM
from allattn.moments import reached
from allattn.pruning.budget import target_heads
from allattn.pruning.gates import MaskGate, log_alphas
from allattn.pruning.importance import Stream, head_scores
from allattn.pruning.methods import Method, PruningState, Scored, build_method
from allattn.pruning.removal import cut_config, cut_tensors, fold_output_scales, without_gates
from allattn.training.engine import build_engine
from allattn.training.optim import group_of
from allattn.training.ranks import World
from allattn.training.state import Snapshot, check_shapes


class LiveModel:
    """Weights, optimiser state and gates of a run.

    Attributes:
        shape: the model's config as it is now; fewer heads than at the start, later.
        engine: what trains it.
        pruner: the method of the pruning stage that is under way, if one is.
        masks: by layer the heads that stay, decided on while the others are still in the weights.
        scales: by layer the output scale that goes with the masks.
        run_heads: heads of the run's first model, what `keep` and sparsity are shares of.
        head_ids: by layer the original numbers of the heads in the weights.
    """

    def __init__(self, config: Config, world: World, n_micro: int):
        """An empty shell; `start` or `restore` fills it."""
        self.config, self.world, self.n_micro = config, world, n_micro
        self.shape = config.model
        self.pruner: Method | None = None
        self.masks: list[list[int]] | None = None
        self.scales: list[float] | None = None
        self.run_heads = sum(config.model.heads)
        self.head_ids = [list(range(n)) for n in config.model.heads]
        self.engine: Any = None

    def start(self, parameters: dict[str, Tensor]) -> None:
        """Begin a run with these weights."""
        self._rebuild(Snapshot(parameters))

    def meta(self) -> dict[str, Any]:
        """What a checkpoint has to know beside the tensors (JSON values)."""
        return {
            "model": dataclasses.asdict(self.shape),
            "pruner": None if self.pruner is None else dataclasses.asdict(self.pruner.state),
            "masks": self.masks,
            "scales": self.scales,
            "run_heads": self.run_heads,
            "head_ids": self.head_ids,
        }

    def restore(
        self, snapshot: Snapshot, meta: dict[str, Any], prune: PruneConfig | None, source: Any
    ) -> None:
        """Take over a checkpoint's state.

        Args:
            snapshot: its tensors.
            meta: as from `meta`.
            prune: the pruning of the checkpoint's stage.
            source: the file that a misfit is blamed on.

        Raises:
            ValueError: tensors that do not fit the shape that meta gives.
        """
        # the way to compute attention is this start's, not the checkpoint's
        attention = self.config.model.attention
        self.shape = dataclasses.replace(ModelConfig(**meta["model"]), attention=attention)
        self.masks, self.scales = meta["masks"], meta["scales"]
        self.run_heads, self.head_ids = meta["run_heads"], meta["head_ids"]
        if meta["pruner"] is not None:
            assert prune is not None, "a stage with a method has it"
            state = PruningState(**meta["pruner"])
            self.pruner = build_method(prune, self.config.run.seed, state)
        with torch.device("meta"):
            expected = TransformerLM(self.shape)
            if self.pruner is not None:
                self.pruner.attach(expected)
        check_shapes(source, snapshot.parameters, dict(expected.named_parameters()))
        self._rebuild(snapshot)

    def begin_pruning(self, prune: PruneConfig) -> None:
        """Give every head a gate; weights and their moments stay as they are."""
        assert self.masks is None
        target = target_heads(prune, self.config.model, self.run_heads)
        if target is not None:
            target = min(target, sum(self.shape.heads))  # an earlier stage may have left fewer
        state = PruningState(list(self.shape.heads), self.run_heads, target)
        self.pruner = build_method(prune, self.config.run.seed, state)
        self._rebuild(self.engine.snapshot())

    def draw(self, step: int, stage_step: int, stage_steps: int, lanes: range) -> None:
        """Noise of the gates for the lanes of one forward pass."""
        if self.pruner is not None:
            self.pruner.draw(
                self.engine.module, step, stage_step, stage_steps, lanes,
                self.head_ids, self.config.model.heads,
            )  # fmt: skip

    def cut(self, n_open: int, streams: Callable[[], Iterable[Stream]], step: int) -> None:
        """Score the heads and close all but the best; the weights stay (`methods.Scored`).

        Args:
            n_open: heads that stay open.
            streams: calibration text of this rank.
            step: of the run, for `random`.
        """
        assert isinstance(self.pruner, Scored)
        model = self._plain(self.engine.snapshot()).to(self.world.device)
        scores = head_scores(
            self.pruner.config, model, streams, [self.config.run.seed, step], self.world.sum
        )
        self.pruner.cut(scores, n_open)
        self.pruner.show(self.engine.module)

    def check_closed(self) -> list[list[int]]:
        """By layer the heads that a check of `remove: {every: N}` leaves."""
        assert self.pruner is not None, "a stage that prunes is under way"
        return self.pruner.check_closed(self.log_alphas())

    def decide(self) -> dict[str, Any]:
        """End pruning: gates become masks; returns how ready they were (`Method.final`)."""
        assert self.pruner is not None, "a stage that prunes is under way"
        kept, readiness = self.pruner.final(self.log_alphas())
        self.masks, self.scales = kept, self.pruner.output_scales(kept)
        self.pruner = None
        snapshot = self.engine.snapshot()
        self._rebuild(
            Snapshot(
                without_gates(snapshot.parameters),
                {key: without_gates(named) for key, named in snapshot.moments.items()},
                without_gates(snapshot.adam_steps),
            )
        )
        return readiness

    def remove(self, kept: list[list[int]], memories: list[Memory | None]) -> int:
        """Cut all other heads out of weights, moments and memory; returns how many went.

        Where they were decided on (`masks`), the masks go and the output scale moves into `Wo`.
        """
        snapshot = self.engine.snapshot()
        if self.masks is not None:
            assert self.scales is not None, "they come together"
            snapshot.parameters = fold_output_scales(snapshot.parameters, self.scales)
            self.masks = self.scales = None
        d_head = self.shape.d_head
        assert d_head is not None, "a validated config has it"
        snapshot = Snapshot(
            cut_tensors(snapshot.parameters, kept, d_head),
            {key: cut_tensors(named, kept, d_head) for key, named in snapshot.moments.items()},
            snapshot.adam_steps,
        )
        n_removed = sum(self.shape.heads) - sum(map(len, kept))
        self.shape = cut_config(self.shape, kept)
        self.head_ids = [[ids[h] for h in k] for ids, k in zip(self.head_ids, kept, strict=True)]
        if self.pruner is not None:
            self.pruner.removed(kept)
        for memory in memories:
            if memory is not None:
                memory.hidden = [h if k else None for h, k in zip(memory.hidden, kept, strict=True)]
        reached("removal:cut")
        self._rebuild(snapshot)
        return n_removed

    @property
    def has_gates(self) -> bool:
        """Whether gates are being learned."""
        return self.pruner is not None and self.pruner.learns

    def log_alphas(self) -> list[Tensor | None]:
        """Gate logits by layer, on the CPU."""
        gates = self.engine.read(lambda name: name.endswith(".gate.log_alpha"))
        return log_alphas(gates, self.shape.n_layers)

    def open_heads(self) -> list[list[int]]:
        """By layer the heads, of those in the weights, that evaluation uses."""
        if self.pruner is not None:
            return self.pruner.open_now(self.log_alphas())
        if self.masks is not None:
            return self.masks
        return [list(range(n)) for n in self.shape.heads]

    def open_by_layer(self) -> list[int]:
        """How many heads evaluation uses, by layer."""
        return list(map(len, self.open_heads()))

    def p_open(self) -> list[list[float | None]]:
        """P(open) by layer of every head of the run's first model; None for one that is removed.

        The closed form of the gates' method (`Method.probabilities`); 1 or 0 where none learns.
        """
        if self.pruner is not None:
            rows = self.pruner.probabilities(self.log_alphas())
        else:
            rows = [
                [float(h in kept) for h in range(n)]
                for n, kept in zip(self.shape.heads, self.open_heads(), strict=True)
            ]
        out: list[list[float | None]] = [[None] * n for n in self.config.model.heads]
        for layer, (ids, row) in enumerate(zip(self.head_ids, rows, strict=True)):
            for head, p in zip(ids, row, strict=True):
                out[layer][head] = p
        return out

    def n_parameters(self, wanted: Callable[[str], bool] = lambda name: True) -> int:
        """Numbers in the weights (gates included), also where ZeRO-3 has emptied the tensors."""
        named = self.engine.module.named_parameters()
        shapes = [getattr(p, "ds_shape", p.shape) for name, p in named if wanted(name)]
        return sum(shape.numel() for shape in shapes)

    def n_non_embedding(self) -> int:
        """Those outside the vocabulary, without gates."""
        return self.n_parameters(
            lambda name: not name.startswith("vocabulary.") and group_of(name) != "gates"
        )

    def _rebuild(self, snapshot: Snapshot) -> None:
        """A fresh model of the present shape with this state, in a fresh engine."""
        if self.engine is not None:
            self.engine.close()
        model = self._plain(snapshot)
        model.checkpoint_layers = self.config.train.activation_checkpointing
        if self.config.train.compile:
            for layer in model.layers:
                layer.compile(dynamic=False)
        self.engine = build_engine(model, self.config, self.world, self.n_micro, snapshot)

    def _plain(self, snapshot: Snapshot) -> TransformerLM:
        """A model of the present shape with these weights and the present gates, on the CPU."""
        model = TransformerLM(self.shape)
        if self.pruner is not None:
            self.pruner.attach(model)
        elif self.masks is not None:
            assert self.scales is not None, "they come together"
            for layer, kept, scale in zip(model.layers, self.masks, self.scales, strict=True):
                if layer.attention is not None:
                    layer.attention.gate = MaskGate(layer.attention.n_heads, kept, scale)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in snapshot.parameters:  # gates that begin now have no value yet
                    parameter.copy_(snapshot.parameters[name])
        return model
