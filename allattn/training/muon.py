"""Muon for the layers' weight matrices, AdamW for everything else, in one optimiser.

A matrix moves along its momentum with all singular values made equal (Jordan et al. 2024), scaled
so that one rate and weight decay serve both (Liu et al. 2025, arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
ADAM_RMS = 0.2  # how far AdamW moves an element a step, as a share of the rate
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration; it takes [0.01, 1] near 1 in 5 steps


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon moves it: a linear map within a layer, so no embedding, vector or bias."""
    return name.startswith("layers.") and name.endswith(".weight") and parameter.dim() == 2


def orthogonal(x: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values from about 0.7 to 1.2."""
    a, b, c = _COEFFICIENTS
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() + 1e-12)
    for _ in range(5):
        square = wide @ wide.T
        wide = a * wide + (b * square + c * square @ square) @ wide
    result: Tensor = wide if x.shape[0] <= x.shape[1] else wide.T
    return result


class Muon(torch.optim.AdamW):
    """AdamW whose `matrices` take Muon's step instead.

    Their momentum is `exp_avg`; `exp_avg_sq` stays zero, so that checkpoints and removal treat all
    parameters alike.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: set[nn.Parameter], **settings: Any):
        """As AdamW; `matrices` are among the groups' parameters."""
        super().__init__(groups, **settings)
        self.matrices = matrices

    @torch.no_grad()
    def step(  # type: ignore[override]  # a closure's result is not given back: there is none
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Update all that have a gradient; those of the matrices are used up."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.matrices and parameter.grad is not None:
                    self._move(parameter, float(group["lr"]), group["weight_decay"])
                    parameter.grad = None  # AdamW leaves it alone then
        super().step()

    def _move(self, parameter: nn.Parameter, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        assert parameter.grad is not None, "the caller has seen it"
        momentum = state["exp_avg"].lerp_(parameter.grad, 1 - MOMENTUM)
        ahead = parameter.grad.lerp(momentum, MOMENTUM)  # Nesterov
        parameter.mul_(1 - lr * weight_decay)
        size = ADAM_RMS * max(parameter.shape) ** 0.5
        parameter.add_(orthogonal(ahead), alpha=-lr * size)
