"""Look at a model and leave it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from allattn.model.transformer import TransformerLM


@contextlib.contextmanager
def undisturbed(model: TransformerLM) -> Iterator[None]:
    """In evaluation mode, weights without gradient; modes, gates and flags come back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    attentions = [layer.attention for layer in model.layers if layer.attention is not None]
    gates = [(a, a.gate) for a in attentions]
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        for attention, gate in gates:
            attention.gate = gate
        for p, flag in flags:
            p.requires_grad_(flag)
        for module, training in modes:
            module.training = training
