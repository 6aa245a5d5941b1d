"""Parameter groups and AdamW. Rates are set at every step by the trainer, never by a scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allattn.config import OptimizerConfig


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
    """AdamW (Loshchilov and Hutter 2019) over `parameter_groups`."""
    return torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
