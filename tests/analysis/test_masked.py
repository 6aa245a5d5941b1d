"""Masked = removed, for every mask and family; the model stays as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from carrier import losses_of_removed

from allattn.analysis.masked import all_heads, segment_losses, without
from allattn.analysis.sample import take_sample
from allattn.pruning.gates import MaskGate

FAMILIES = {
    "all-attention": {},
    "transformer-xl": {"n_persistent": 0, "d_ff": 10},
    "adaptive": {"embedding": "adaptive", "cutoffs": [4, 8], "div_value": 2},
    "same-length": {"same_length": True},
    "no-memory": {"mem_len": 0},
}
every_family = pytest.mark.parametrize("family", FAMILIES)
HEADS = [2, 0, 3]  # a layer without heads in between
MASKS = [
    [[0, 1], [], [0, 1, 2]], [[1], [], [0, 1, 2]], [[0, 1], [], [0, 2]], [[], [], [0, 1, 2]],
    [[0, 1], [], []], [[0], [], [1]], [[], [], []],
]  # fmt: skip


def some_text(n: int = 150):
    return take_sample(np.random.default_rng(0).integers(0, 11, n), seq_len=4, n_tokens=n)


@every_family
def test_masked_is_removed(tiny_model, family):
    model, sample = tiny_model(n_layers=3, n_heads=HEADS, **FAMILIES[family]), some_text()
    losses = segment_losses(model, sample, MASKS)
    assert losses.shape == (1 + len(MASKS), 8, 4) and losses.dtype == np.float64
    assert np.array_equal(losses[0], losses[1])
    for kept, row in zip(MASKS, losses[1:], strict=True):
        np.testing.assert_allclose(row, losses_of_removed(model, sample, kept), rtol=0, atol=1e-12)
    assert all(not np.allclose(row, losses[0]) for row in losses[2:])


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_the_batch_size_changes_nothing(tiny_model, batch_size):
    model, sample, counted = tiny_model(n_layers=3, n_heads=HEADS), some_text(), []
    expected = segment_losses(model, sample, MASKS)
    got = segment_losses(model, sample, MASKS, batch_size, counted.append)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    assert sum(counted) == (1 + len(MASKS)) * sample.n_tokens


@pytest.mark.parametrize("attention", ["reference", "fused"])
def test_a_head_that_does_nothing_changes_no_bit(tiny_model, attention):
    model = tiny_model(n_layers=3, n_heads=HEADS, attention=attention).float()
    with torch.no_grad():
        model.layers[0].attention.output.weight[:, 3:] = 0  # head 1 of d_head 3
        model.layers[2].attention.value.weight[:3] = 0
        model.layers[2].attention.persistent_value[0] = 0
    losses = segment_losses(model, some_text(), [without(HEADS, [a]) for a in all_heads(HEADS)])
    same = [np.array_equal(row, losses[0]) for row in losses[1:]]
    assert same == [False, True, True, False, False]


def test_masks_go_on_top_of_the_models_gates(tiny_model):
    model, sample = tiny_model(n_layers=3, n_heads=HEADS), some_text()
    model.layers[2].attention.gate = MaskGate(3, [0, 2], 1.5)
    closed, other = segment_losses(model, sample, [[[0, 1], [], [0, 2]], [[0, 1], [], [0]]])[1:]
    with torch.no_grad():
        model.layers[2].attention.gate = None
        model.layers[2].attention.output.weight *= 1.5
    np.testing.assert_allclose(closed, losses_of_removed(model, sample, [[0, 1], [], [0, 2]]))
    np.testing.assert_allclose(other, losses_of_removed(model, sample, [[0, 1], [], [0]]))


def test_the_model_stays_as_it_was(tiny_model):
    model = tiny_model(n_layers=3, n_heads=HEADS).train()
    gate = model.layers[0].attention.gate = MaskGate(2, [0], 1.0)
    layers, names = model.layers, [name for name, _ in model.named_parameters()]

    def check() -> None:
        assert model.layers is layers and [n for n, _ in model.named_parameters()] == names
        assert layers[0].attention.gate is gate and layers[2].attention.gate is None
        assert all(p.requires_grad for p in model.parameters())
        assert all(module.training for module in model.modules() if module is not gate)
        assert not any(layer._forward_pre_hooks for layer in layers)

    segment_losses(model, some_text(), MASKS)
    check()
    for last in (1, 5, 40):  # in the first segment, the first pass, a mask's pass
        calls = []

        def stop(n: int, calls: list = calls, last: int = last) -> None:
            calls.append(n)
            if len(calls) == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            segment_losses(model, some_text(), MASKS[2:], 3, stop)
        check()


def test_a_model_that_diverged_is_not_scored(tiny_model):
    model = tiny_model()
    with torch.no_grad():
        model.layers[0].attention.output.weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="diverged"):
        segment_losses(model, some_text(), [])
    assert all(layer.attention.gate is None for layer in model.layers)


@pytest.mark.gpu
def test_cuda_is_cpu(tiny_model):
    model, sample = tiny_model(n_layers=3, n_heads=HEADS), some_text()
    expected = segment_losses(model, sample, MASKS)
    got = segment_losses(model.cuda(), sample, MASKS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
