"""Removed = masked, to float64 rounding; what is kept is kept to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

from allattn.config import PruneConfig
from allattn.model.transformer import TransformerLM
from allattn.pruning.gates import MaskGate
from allattn.pruning.methods import HardConcrete, PruningState
from allattn.pruning.removal import cut_config, cut_tensors, fold_output_scales, without_gates

EXACT = {"rtol": 0, "atol": 1e-12}
N_LAYERS, N_HEADS, HEAD_DIM = 3, 4, 3
FAMILIES = {
    "all-attention": {},
    "transformer-xl": {"n_persistent": 0, "d_ff": 10},
    "hybrid": {"d_ff": 10},
    "biased": {"persistent_share": 0.5},
    "adaptive": {"embedding": "adaptive", "cutoffs": [4, 8], "div_value": 2},
    "learned": {"position": "learned"},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def kept_heads() -> list[list[list[int]]]:
    """What stays, by layer: by hand at the edges, random at every number of heads."""
    rng = np.random.default_rng(0)
    cases = [[[], [], []], [[0, 1, 2, 3]] * 3, [[], [2], []], [[0, 3], [], [1]]]
    every = list(itertools.product(range(N_LAYERS), range(N_HEADS)))
    for n in range(1, N_LAYERS * N_HEADS):
        chosen = sorted(every[i] for i in rng.choice(len(every), n, replace=False))
        cases.append([[h for layer, h in chosen if layer == i] for i in range(N_LAYERS)])
    return cases


def dense(tiny_model, family: str, **values) -> TransformerLM:
    return tiny_model(n_layers=N_LAYERS, n_heads=N_HEADS, **FAMILIES[family], **values)


def removed(model: TransformerLM, kept: list[list[int]], scales: list[float]) -> TransformerLM:
    parameters = without_gates({n: p.detach() for n, p in model.named_parameters()})
    parameters = cut_tensors(fold_output_scales(parameters, scales), kept, model.config.d_head)
    smaller = TransformerLM(cut_config(model.config, kept)).double().eval()
    smaller.load_state_dict(parameters, strict=True)
    return smaller


def stream(model: TransformerLM, ids_BT: Tensor) -> Tensor:
    parts, memory = [], None
    with torch.no_grad():
        for segment in ids_BT.split(4, dim=1):
            output = model(segment, memory=memory)
            parts.append(output.log_probs)
            memory = output.memory
    return torch.cat(parts, dim=1)


@every_family
def test_removed_is_masked(tiny_model, family):
    torch.set_default_dtype(torch.float64)  # of the masks
    ids = torch.randint(11, (2, 16))
    n_seen = 0
    for kept in kept_heads():
        model = dense(tiny_model, family, mem_len=6)
        scales = [N_HEADS / len(heads) if heads else 1.0 for heads in kept]
        for layer, heads, scale in zip(model.layers, kept, scales, strict=True):
            layer.attention.gate = MaskGate(N_HEADS, heads, scale)
        smaller = removed(model, kept, scales)
        assert smaller.config.heads == [len(heads) for heads in kept]
        torch.testing.assert_close(stream(smaller, ids), stream(model, ids), **EXACT)
        n_seen += [] in kept
    assert n_seen >= 3  # layers without a head were among them


@every_family
@pytest.mark.parametrize("output_scaling", [True, False])
def test_removed_is_what_evaluation_gates_give(tiny_model, family, output_scaling):
    torch.set_default_dtype(torch.float64)  # of heads / open heads
    ids = torch.randint(11, (2, 12))
    config = PruneConfig(keep=0.5, output_scaling=output_scaling)
    for kept in kept_heads()[::3]:
        model = dense(tiny_model, family)
        method = HardConcrete(config, 1, PruningState([N_HEADS] * N_LAYERS, 12))
        method.attach(model)
        for layer, heads in zip(model.double().layers, kept, strict=True):
            with torch.no_grad():
                layer.attention.gate.log_alpha.fill_(-5.0)[heads] = 5.0
        log_alpha = [layer.attention.gate.log_alpha.detach() for layer in model.layers]
        assert method.open_now(log_alpha) == kept
        smaller = removed(model.eval(), kept, method.output_scales(kept))
        torch.testing.assert_close(stream(smaller, ids), stream(model, ids), **EXACT)


@every_family
def test_gradients_of_what_is_left_are_those_behind_the_mask(tiny_model, family):
    torch.set_default_dtype(torch.float64)
    kept = [[0, 2, 3], [], [1]]
    ids, targets = torch.randint(11, (2, 8)), torch.randint(11, (2, 8))
    model = dense(tiny_model, family)
    smaller = removed(model, kept, [1.0] * N_LAYERS)
    for layer, heads in zip(model.layers, kept, strict=True):
        layer.attention.gate = MaskGate(N_HEADS, heads, 1.0)
    for each in (model, smaller):
        each(ids, targets).nll.mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = cut_tensors(gradients, kept, HEAD_DIM)
    got = {n: p.grad for n, p in smaller.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], **EXACT)


@every_family
def test_parameter_counts(tiny_model, family):
    model = dense(tiny_model, family)
    for kept in kept_heads():
        smaller = removed(model, kept, [1.0] * N_LAYERS)
        count = sum(p.numel() for p in smaller.parameters())
        assert count == oracles.parameters(smaller.config)


def by_head(name: str, tensor: Tensor) -> dict[int, Tensor] | None:
    """An attention tensor's share of each head, cut by loops; None for what belongs to no head."""
    if ".attention." not in name:
        return None
    part = name.split(".attention.")[1]
    if part == "output.weight":
        return {h: tensor[:, h * HEAD_DIM : (h + 1) * HEAD_DIM] for h in range(N_HEADS)}
    if part.endswith(".weight"):
        return {h: tensor[h * HEAD_DIM : (h + 1) * HEAD_DIM] for h in range(N_HEADS)}
    return {h: tensor[h] for h in range(N_HEADS)}


@every_family
def test_what_stays_is_bit_equal(tiny_model, family):
    model = dense(tiny_model, family)
    HardConcrete(PruneConfig(keep=0.5), 1, PruningState([N_HEADS] * 3, 12)).attach(model)
    # like the weights, but with no two numbers equal: also the shape of Adam's moments
    tensors = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    for kept in kept_heads():
        cut = cut_tensors(tensors, kept, HEAD_DIM)
        for name, tensor in tensors.items():
            layer = int(name.split(".")[1]) if name.startswith("layers.") else None
            heads = by_head(name, tensor)
            if heads is None:
                gone = ".attention_norm." in name and not kept[layer]
                assert (name not in cut) if gone else torch.equal(cut[name], tensor)
                continue
            if not kept[layer]:
                assert name not in cut
                continue
            columns = name.endswith("output.weight")
            wide = not columns and name.endswith(".weight")
            parts = [heads[h] for h in kept[layer]]
            expected = torch.cat(parts, dim=int(columns)) if columns or wide else torch.stack(parts)
            assert torch.equal(cut[name], expected), name
        assert cut.keys() <= tensors.keys()


def test_cutting_twice_is_cutting_once(tiny_model):
    tensors = dict(dense(tiny_model, "hybrid").named_parameters())
    twice = cut_tensors(cut_tensors(tensors, [[0, 2, 3], [1, 2], []], 3), [[1, 2], [0], []], 3)
    once = cut_tensors(tensors, [[2, 3], [1], []], 3)
    assert twice.keys() == once.keys()
    assert all(torch.equal(twice[name], once[name]) for name in once)


def test_the_sources_stay_as_they_were(tiny_model):
    model = dense(tiny_model, "hybrid")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    removed(model, [[0], [1, 2], []], [4.0, 2.0, 1.0])
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert model.config.heads == [N_HEADS] * N_LAYERS


def test_folding_touches_the_output_matrix_alone(tiny_model):
    tensors = {n: p.detach() for n, p in dense(tiny_model, "hybrid").named_parameters()}
    folded = fold_output_scales(tensors, [2.0, 1.0, 4 / 3])
    for name, tensor in tensors.items():
        scale = {"layers.0.attention.output.weight": 2, "layers.2.attention.output.weight": 4 / 3}
        assert torch.equal(folded[name], tensor * scale.get(name, 1.0)), name
