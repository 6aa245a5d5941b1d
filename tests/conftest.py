"""Fixtures that every part of the suite shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allattn.config import ModelConfig, model_config_from_dict
from allattn.model.transformer import TransformerLM

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# Tensors here are tiny: on busy cores, waiting for a second thread made the suite six times as slow
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts from the same seeds; what it does to torch's globals ends with it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    grad = torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The corpora beside the project; tests that want them are skipped where they are absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no corpora at {SHARED_DATA}")
    return SHARED_DATA


TINY = {
    "n_layers": 2,
    "d_model": 8,
    "n_heads": 2,
    "d_head": 3,  # not d_model / n_heads, so that mixing the two up shows
    "n_persistent": 5,
    "d_ff": 0,
    "seq_len": 4,
    "mem_len": 6,
    "dropout": 0.0,
    "vocab_size": 11,
}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """`tiny_config(n_heads=[1, 0], ...)`: a validated config of a few hundred weights."""

    def build(**values: Any) -> ModelConfig:
        return model_config_from_dict({**TINY, **values}, "test")

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny_config: Callable[..., ModelConfig]) -> Callable[..., TransformerLM]:
    """`tiny_model(seed=0, ...)`: float64, evaluation mode, every weight (biases too) far from its
    initial value, so that no term of an equation is too small to be missed.
    """

    def build(seed: int = 0, **values: Any) -> TransformerLM:
        model = TransformerLM(tiny_config(**values)).double().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.copy_(noise * 0.5 + (1.0 if name.endswith("norm.weight") else 0.0))
        return model

    return build
