"""Gates that open each head by a chance of its own, priced by how many are expected open."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allattn.config import PruneConfig
from allattn.model.transformer import TransformerLM
from allattn.pruning.gates import HardConcreteGate, open_probability
from allattn.pruning.method import Method, PruningState, standing_still
from allattn.pruning.schedule import ramp

FAR = 0.05  # of the run's heads: a Lagrangian further from its target at the end is warned about


class HardConcrete(Method):
    """Stochastic gates with an expected-L0 objective: a fixed penalty, or a Lagrangian to a target.

    The Lagrangian is that of Wang et al. 2020 and CoFi (Xia et al. 2022): with e the expected and t
    the wanted share of open heads, l1 (e - t) + l2 (e - t)^2, minimised over gates, maximised over
    both l. It works like a controller with an integral (l1) and a proportional part (l2), so l2
    starts above zero: without it the share overshoots the target and swings back late. With
    `scope: layer` every layer has a target and multipliers of its own.
    """

    def __init__(self, config: PruneConfig, seed: int, state: PruningState):
        """Start, or go on from, a state."""
        super().__init__(config, seed, state)
        if not state.multipliers:
            n = len(state.initial_heads) if config.scope == "layer" else 1
            state.multipliers = [[0.0, 10.0] for _ in range(n)]

    def attach(self, model: TransformerLM) -> None:
        """Give every layer that has heads a gate."""
        for layer, initial in zip(model.layers, self.state.initial_heads, strict=True):
            if layer.attention is not None:
                gate = HardConcreteGate(layer.attention.n_heads, initial, self.config)
                layer.attention.gate = gate
        self._start_counters(model)

    def _take_step(
        self, model: TransformerLM, noise: list[Tensor], stage_step: int, stage_steps: int
    ) -> None:
        for layer, uniform in zip(model.layers, noise, strict=True):
            if layer.attention is not None:
                gate = layer.attention.gate
                assert isinstance(gate, HardConcreteGate)
                gate.uniform = uniform

    def objective(
        self, model: TransformerLM, stage_step: int
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """The expected number of open heads, priced."""
        sums = [
            None if layer.attention is None else _open_probability(layer.attention.gate).sum()
            for layer in model.layers
        ]
        # a model whose last head is gone has no gate left
        none = next((x for x in sums if x is not None), torch.zeros(())).new_zeros(())
        expected = torch.stack([none if x is None else x for x in sums])
        if self.target is None:
            assert self.config.penalty is not None, "a validated config has a target or it"
            weight = self.config.penalty * ramp(self.config, stage_step)
            term = weight * expected.sum()
            logged: dict[str, Any] = {"penalty_weight": weight}
        else:
            multipliers = expected.new_tensor(self.state.multipliers)
            groups = expected if self.config.scope == "layer" else expected.sum()[None]
            goals = self._goals(stage_step)
            gap = (groups - expected.new_tensor(goals)) / expected.new_tensor(
                self._sizes_of_groups()
            )
            term = (multipliers[:, 0] * gap + multipliers[:, 1] * gap**2).sum()
            linear, quadratic = multipliers.mean(0).tolist()
            logged = {"penalty_weight": linear, "penalty_weight_quadratic": quadratic}
            logged["target_heads"] = sum(goals)
        return term, logged | {
            "penalty": float(term.detach()),
            "expected_heads": float(expected.detach().sum()),
            "expected_by_layer": expected.detach().tolist(),
        }

    def after_step(self, logged: dict[str, Any], stage_step: int) -> None:
        """Gradient ascent on the multipliers of a target."""
        if self.target is None:
            return
        by_layer = logged["expected_by_layer"]
        groups = by_layer if self.config.scope == "layer" else [sum(by_layer)]
        rate = self.config.lagrangian_lr
        goals, sizes = self._goals(stage_step), self._sizes_of_groups()
        for pair, expected, goal, size in zip(
            self.state.multipliers, groups, goals, sizes, strict=True
        ):
            gap = (expected - goal) / size
            pair[0] += rate * gap
            pair[1] += rate * gap**2

    def open_now(self, log_alpha: list[Tensor | None]) -> list[list[int]]:
        """Heads whose deterministic gate is open."""
        return [[h for h, p in enumerate(row) if p > 0.5] for row in self.probabilities(log_alpha)]

    def probabilities(self, log_alpha: list[Tensor | None]) -> list[list[float]]:
        """P(open), closed form."""
        return [[] if a is None else open_probability(a).tolist() for a in log_alpha]

    def warnings(
        self, log_alpha: list[Tensor | None], logged: dict[str, Any], at_end: bool
    ) -> list[str]:
        """Gates that stand still, that all close, or that miss the target."""
        found = standing_still(log_alpha, self.config.gate_init) if at_end else []
        p = [x for row in self.probabilities(log_alpha) for x in row]
        wanted = self.target is None or self.target > 0
        if p and wanted and max(p) < 0.5:
            found.append(
                "every head of the model is about to close: lower prune.penalty or prune.gate_lr, "
                "or give the warm-up more steps"
            )
        if at_end and self.target is not None and "expected_heads" in logged:
            gap = logged["expected_heads"] - self.target
            if abs(gap) > max(FAR * self.state.run_heads, 0.5):
                found.append(
                    f"{logged['expected_heads']:.1f} heads were expected open at the end, "
                    f"{self.target} are the target: the Lagrangian is still far from it; give the "
                    "stage more steps, or raise prune.gate_lr or prune.lagrangian_lr"
                )
        return found

    def _sizes_of_groups(self) -> list[float]:
        """What a group's gap is a share of: the run's heads, or those a layer began with."""
        if self.config.scope == "layer":
            return [float(max(n, 1)) for n in self.state.initial_heads]
        return [float(self.state.run_heads)]

    def _goals(self, stage_step: int) -> list[float]:
        """Wanted open heads of each group: from all to the target, along a line."""
        done = ramp(self.config, stage_step)
        if self.config.scope == "layer":
            initial = self.state.initial_heads
            pairs = list(zip(initial, self._quotas(self.goal, initial), strict=True))
        else:
            pairs = [(sum(self.state.initial_heads), self.goal)]
        return [start + (end - start) * done for start, end in pairs]


def _open_probability(gate: nn.Module | None) -> Tensor:
    """Of the last forward pass, by head."""
    assert isinstance(gate, HardConcreteGate) and gate.open_probability is not None
    return gate.open_probability
