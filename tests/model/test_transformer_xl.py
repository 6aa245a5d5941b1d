"""The Transformer-XL family against an implementation that is not ours, with the same weights.

`tools/make_transformer_xl_fixture.py` made the numbers with Hugging Face transformers 4.33.3.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from allattn.config import CHOICES
from allattn.model.transformer import Memory, TransformerLM

FIXTURE = Path(__file__).with_name("transformer_xl.safetensors")
EXACT = {"rtol": 0, "atol": 1e-10}
every_way = pytest.mark.parametrize("way", CHOICES["model.attention"])
every_case = pytest.mark.parametrize("case", ["narrowing", "clamped", "same_length"])


def load(case: str) -> tuple[dict, dict[str, Tensor]]:
    """The shape of a case and its tensors."""
    with safe_open(FIXTURE, framework="pt") as file:
        shape = json.loads(file.metadata()["cases"])[case]
        names = [name for name in file.keys() if name.startswith(f"{case}/")]
        return shape, {name.partition("/")[2]: file.get_tensor(name) for name in names}


def under(tensors: dict[str, Tensor], folder: str) -> dict[str, Tensor]:
    """The tensors whose names start with `folder/`, without it."""
    return {k[len(folder) + 1 :]: t for k, t in tensors.items() if k.startswith(f"{folder}/")}


def build(tiny_model, shape: dict, tensors: dict[str, Tensor], way: str) -> TransformerLM:
    """Our model with their weights; the final norm is all that they do not have."""
    model = tiny_model(n_persistent=0, embedding="adaptive", attention=way, **shape)
    missing, unexpected = model.load_state_dict(under(tensors, "weight"), strict=False)
    assert (missing, unexpected) == (["norm.weight", "norm.bias"], [])
    return model


def memory_of(tensors: dict[str, Tensor]) -> Memory:
    """What the previous segment left."""
    hidden = tensors["memory"]
    return Memory(list(hidden), hidden.shape[2])


@every_way
@every_case
def test_hidden_states_and_new_memory_are_the_same(tiny_model, case, way):
    shape, tensors = load(case)
    model = build(tiny_model, shape, tensors, way)
    hidden, memory = model.hidden(tensors["ids"], memory_of(tensors), None)
    torch.testing.assert_close(hidden, tensors["hidden"], **EXACT)
    # theirs is one longer under same_length, by how mem_len is counted
    wanted = tensors["memory_after"][:, :, -shape["mem_len"] :]
    torch.testing.assert_close(torch.stack(memory.hidden), wanted, **EXACT)
    assert memory.length == wanted.shape[2]


@every_way
@every_case
def test_adaptive_softmax_is_the_same(tiny_model, case, way):
    shape, tensors = load(case)
    vocabulary = build(tiny_model, shape, tensors, way).vocabulary
    log_probs = vocabulary.log_probs(tensors["hidden"])
    torch.testing.assert_close(log_probs, tensors["log_probs"], **EXACT)
    targets = tensors["targets"]
    wanted = -tensors["log_probs"].gather(2, targets[..., None]).squeeze(2)
    torch.testing.assert_close(vocabulary.nll(tensors["hidden"], targets), wanted, **EXACT)


@every_way
@every_case
def test_every_gradient_is_the_same(tiny_model, case, way):
    shape, tensors = load(case)
    model = build(tiny_model, shape, tensors, way)
    hidden, _ = model.hidden(tensors["ids"], memory_of(tensors), None)
    nll = model.vocabulary.nll(hidden, tensors["targets"])
    ((hidden * tensors["pull_hidden"]).sum() + (nll * tensors["pull_nll"]).sum()).backward()
    wanted = under(tensors, "gradient")
    actual = {n: p.grad for n, p in model.named_parameters() if not n.startswith("norm.")}
    assert set(actual) == set(wanted)
    for name, gradient in actual.items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(
            gradient, wanted[name], rtol=0, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )
