"""Weights in fewer bits: rounded to bfloat16 or float16, and what that does to perplexity."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from allattn.data.lanes import Corpus
from allattn.inference.evaluate import evaluate
from allattn.inference.load import Source

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPLIT = "valid"  # what perplexities before and after are of


def rounded(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Named tensors in another of the DTYPES; integers stay.

    Raises:
        ValueError: a number is too large for it.
    """
    out = {}
    for name, tensor in tensors.items():
        out[name] = tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
        if not torch.isfinite(out[name]).all():
            raise ValueError(
                f"--dtype {dtype}: {name} holds numbers up to {tensor.abs().max():.3g}, too large "
                "for it; bf16 takes them"
            )
    return out


def round_weights(source: Source, dtype: str) -> Source:
    """A source whose export has smaller files; loaded, its weights are float32 again."""
    parameters = rounded(source.weights.parameters, dtype)
    return dataclasses.replace(
        source, weights=dataclasses.replace(source.weights, parameters=parameters)
    )


def source_perplexity(source: Source, corpus: Corpus) -> float:
    """Of the valid split, by `allattn evaluate`, in float32 whatever the weights are stored in."""
    parameters = rounded(source.weights.parameters, "fp32")
    model = dataclasses.replace(source.weights, parameters=parameters).build()
    ppl: float = evaluate(model, corpus, SPLIT, 8)["ppl"]
    return ppl
