"""Curves of pruning: their ends, their orders, and the share that can go."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from carrier import CARRIER, counting, losses_of_removed, plant

from allattn.analysis.curves import (
    Curve,
    CurvePoint,
    curve_tokens,
    in_model_numbers,
    pruning_curves,
    removable_share,
)
from allattn.analysis.masked import all_heads, without
from allattn.analysis.sample import take_sample
from allattn.pruning.gates import MaskGate
from allattn.pruning.importance import importance

FAMILIES = {"all-attention": {}, "transformer-xl": {"n_persistent": 0, "d_ff": 10}}
every_family = pytest.mark.parametrize("family", FAMILIES)
HEADS = [4, 0, 5, 3]
LEVELS = [12, 11, 10, 8, 7, 6, 5, 4, 2, 1, 0]  # tenths of 12, halves up


def some_text(seed: int, n: int = 150):
    return take_sample(np.random.default_rng(seed).integers(0, 11, n), seq_len=4, n_tokens=n)


def loss_without(model, sample, removed) -> float:
    return losses_of_removed(model, sample, without(model.config.heads, removed)).mean()


@every_family
def test_every_point_is_that_of_removal(tiny_model, family):
    model = tiny_model(n_layers=4, n_heads=HEADS, **FAMILIES[family])
    sample, calibration = some_text(0), some_text(1)
    own = [(2, 3), (0, 0), (3, 1), (2, 0), (0, 2)]
    counted = []
    curves = pruning_curves(
        model, sample, calibration, own, n_random=2, seed=5, on_tokens=counted.append
    )
    assert sum(counted) == curve_tokens(HEADS, sample, calibration, own, n_random=2)
    assert all(layer.attention is None or layer.attention.gate is None for layer in model.layers)
    assert all(p.requires_grad for p in model.parameters())
    assert [curve.order for curve in curves] == ["importance", "random", "gates"]
    greedy, random, gates = (curve.points for curve in curves)
    assert [p.kept for p in greedy] == [p.kept for p in random] == LEVELS
    assert [p.kept for p in gates] == [12, 11, 10, 8, 7]
    assert [p.keep for p in greedy] == [k / 12 for k in LEVELS]

    scores = importance(model, calibration.streams(8))
    rising = sorted(all_heads(HEADS), key=lambda a: scores[a[0]][a[1]])
    for points, order in ((greedy, rising), (gates, own)):
        for p in points:
            expected = loss_without(model, sample, order[: 12 - p.kept])
            assert p.loss == pytest.approx(expected, rel=0, abs=1e-12)
            assert p.loss == p.loss_low == p.loss_high and p.ppl == math.exp(p.loss)
    # all heads, and none: the same for every order
    assert random[0].loss == random[0].loss_high == greedy[0].loss
    assert random[-1].loss == random[-1].loss_low == greedy[-1].loss
    for p in random[1:-1]:
        assert p.loss_low < p.loss < p.loss_high
        assert p.loss == pytest.approx((p.loss_low + p.loss_high) / 2)  # of two
        assert (p.ppl_low, p.ppl_high) == (math.exp(p.loss_low), math.exp(p.loss_high))


def test_seeds_and_batch_size(tiny_model):
    model, text = tiny_model(n_heads=[4, 3]), (some_text(0, 70), some_text(1, 70))
    first, second, other = (
        [dataclasses.asdict(c) for c in pruning_curves(model, *text, seed=seed, batch_size=size)]
        for seed, size in ((1, 8), (1, 3), (2, 8))
    )
    for a, b in zip(first, second, strict=True):
        for p, q in zip(a["points"], b["points"], strict=True):
            assert p == pytest.approx(q, rel=1e-9)
    assert first[0] == other[0] and first[1] != other[1]
    assert json.loads(json.dumps(first)) == first


@every_family
def test_a_planted_carrier_goes_last(tiny_model, family):
    model = plant(tiny_model, **FAMILIES[family])
    others = [head for head in all_heads([2, 2]) if head != CARRIER]
    sample = counting(400)
    own = [CARRIER, *others]
    by_importance, gates = pruning_curves(model, sample, sample, own, n_random=0)
    assert [p.kept for p in gates.points] == [4, 3, 2, 1, 0]
    assert by_importance.points[3].loss == pytest.approx(gates.points[0].loss, abs=0.05)
    assert gates.points[1].loss > gates.points[0].loss + 1
    assert by_importance.points[-1].loss == gates.points[-1].loss
    assert removable_share(by_importance, 0.2) >= 0.75 > 0.25 > removable_share(gates, 0.2)


def test_gates_come_back_after_an_exception(tiny_model):
    model = tiny_model()
    gate = model.layers[0].attention.gate = MaskGate(2, [0], 1.0)
    calls = []

    def stop(n: int) -> None:
        calls.append(n)
        if len(calls) == 3:  # while importance is scored
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pruning_curves(model, some_text(0), some_text(1), on_tokens=stop)
    assert model.layers[0].attention.gate is gate and model.layers[1].attention.gate is None
    assert torch.is_grad_enabled() and all(p.requires_grad for p in model.parameters())


def test_a_model_without_heads_has_no_curves(tiny_model):
    model, text = tiny_model(n_heads=[0, 0], n_persistent=0, d_ff=10), some_text(0)
    assert pruning_curves(model, text, text) == []
    assert curve_tokens([0, 0], text, text) == 0


def test_numbers_of_a_later_model():
    head_ids = [[0, 2, 5], [], [1]]
    order = [(0, 5), (1, 0), (0, 1), (2, 1), (0, 0)]
    assert in_model_numbers(order, head_ids) == [(0, 2), (2, 0), (0, 0)]


@pytest.mark.parametrize(
    ("losses", "share"),
    [
        ([2.0, 2.01, 2.03, 2.5], 0.375),  # 2.02 lies half way from 0.25 to 0.5
        ([2.0, 2.04, 1.9, 3.0], 0.125),  # the first that is too high ends it
        ([2.0, 1.9, 2.02, 2.02], 0.75),
        ([2.0], 0.0),
        ([2.0, 1.9, 1.8, 1.7], 0.75),  # all that the order removes
    ],
)
def test_removable_share(losses, share):
    points = [CurvePoint(4 - i, 1 - i / 4, *[x] * 3, *[0] * 3) for i, x in enumerate(losses)]
    assert removable_share(Curve("gates", points)) == pytest.approx(share)
