"""Parameter groups, AdamW, and the loss scale of float16.

Rates are set at every step by the trainer, never by a scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from allattn.config import OptimizerConfig
from allattn.training.muon import Muon, is_matrix


def group_of(name: str) -> str:
    """`gates`, `plain` (norms and biases: no weight decay) or `matrices`, by a parameter's name."""
    if name.endswith(".gate.log_alpha"):
        return "gates"
    if "norm." in name or name.endswith("bias") or ".biases." in name:
        return "plain"
    return "matrices"


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """AdamW groups, each with `kind` (as in `group_of`); empty ones are left out."""
    members: dict[str, list[nn.Parameter]] = {"matrices": [], "plain": [], "gates": []}
    for name, parameter in model.named_parameters():
        members[group_of(name)].append(parameter)
    return [
        {
            "kind": kind,
            "params": parameters,
            "weight_decay": config.weight_decay if kind == "matrices" else 0.0,
        }
        for kind, parameters in members.items()
        if parameters
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over `parameter_groups`, or Muon and AdamW."""
    betas = tuple(config.betas)
    settings: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps, "fused": True}
    groups = parameter_groups(model, config)
    if config.name == "muon":
        return Muon(groups, {p for n, p in model.named_parameters() if is_matrix(n, p)}, **settings)
    return torch.optim.AdamW(groups, **settings)


@dataclass
class LossScale:
    """What a float16 run multiplies its loss by, so that small gradients do not vanish.

    Halved where a gradient overflows (that step is not taken), doubled after `GROWTH_STEPS` steps
    without (Micikevicius et al. 2018, section 3.2).
    """

    GROWTH_STEPS = 2000

    value: float = 2.0**16
    good_steps: int = 0

    def follow(self, finite: bool) -> None:
        """A step was tried, and its gradient was finite or not."""
        if not finite:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.GROWTH_STEPS:
            self.value, self.good_steps = self.value * 2, 0
