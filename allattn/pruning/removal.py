"""Cut heads out of named tensors: parameters and their Adam moments alike, by name.

Removal works on the full state of a run, not on modules: what it returns fits a smaller
`TransformerLM`, built from the smaller config, in the same way as a loaded checkpoint does.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeVar

import torch
from torch import Tensor

from allattn.config import ModelConfig

# which dimension of an attention tensor runs over heads
HEAD_ROWS = ("query.weight", "key.weight", "value.weight", "position.weight")  # [N*H, D]
HEAD_COLUMNS = ("output.weight",)  # [D, N*H]
HEAD_FIRST = (
    "content_bias", "position_bias", "persistent_key", "persistent_value", "persistent_bias",
    "gate.log_alpha",
)  # fmt: skip
_Value = TypeVar("_Value")
_ATTENTION = re.compile(r"layers\.(\d+)\.(attention|attention_norm)\.(.+)")


def cut_tensors(
    tensors: dict[str, Tensor], kept: list[list[int]], d_head: int
) -> dict[str, Tensor]:
    """Keep only some heads.

    Args:
        tensors: by parameter name; anything shaped like the parameters (weights, moments).
        kept: for each layer the numbers of the heads that stay, rising.
        d_head: H.

    Returns:
        New tensors, bit-equal where kept; a layer that keeps no head loses all of its attention.
    """
    out = {}
    for name, tensor in tensors.items():
        match = _ATTENTION.fullmatch(name)
        if match is None:
            out[name] = tensor
            continue
        heads = kept[int(match[1])]
        if not heads:
            continue
        part = match[3]
        rows = torch.tensor([h * d_head + i for h in heads for i in range(d_head)])
        if match[2] == "attention_norm":
            out[name] = tensor
        elif part in HEAD_ROWS:
            out[name] = tensor.index_select(0, rows.to(tensor.device))
        elif part in HEAD_COLUMNS:
            out[name] = tensor.index_select(1, rows.to(tensor.device))
        else:
            assert part in HEAD_FIRST, f"removal does not know {name}"
            out[name] = tensor.index_select(0, torch.tensor(heads).to(tensor.device))
    return out


def fold_output_scales(parameters: dict[str, Tensor], scales: list[float]) -> dict[str, Tensor]:
    """Multiply each layer's `Wo` by its output scale: then dropping the gates changes nothing."""
    out = dict(parameters)
    for i, scale in enumerate(scales):
        name = f"layers.{i}.attention.output.weight"
        if name in out and scale != 1.0:
            out[name] = out[name] * scale
    return out


def without_gates(tensors: dict[str, _Value]) -> dict[str, _Value]:
    """Drop the gates' own parameters."""
    return {name: t for name, t in tensors.items() if not name.endswith(".gate.log_alpha")}


def cut_config(config: ModelConfig, kept: list[list[int]]) -> ModelConfig:
    """The config of the model that is left."""
    return dataclasses.replace(config, n_heads=[len(heads) for heads in kept])
