"""Heads removed alone, and layers reduced to one: planted models and really cut ones."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from carrier import CARRIER, DEAD, counting, losses_of_removed, plant

from allattn.analysis.ablation import ablate_each, ablation_tokens, best_single_heads
from allattn.analysis.masked import all_heads, without
from allattn.analysis.sample import take_sample

FAMILIES = {"all-attention": {}, "transformer-xl": {"n_persistent": 0, "d_ff": 10}}
every_family = pytest.mark.parametrize("family", FAMILIES)
HEADS = [2, 0, 3, 1]
EXACT = {"rel": 0, "abs": 1e-12}


def some_text(n: int = 200):
    return take_sample(np.random.default_rng(0).integers(0, 11, n), seq_len=4, n_tokens=n)


@every_family
def test_planted_heads(tiny_model, family):
    model = plant(tiny_model, **FAMILIES[family])
    effects = {(e.layer, e.head): e for e in ablate_each(model, counting(520))}
    assert list(effects) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    dead, carrier = effects[DEAD], effects[CARRIER]
    assert (dead.delta_loss, dead.delta_ppl, dead.p_value, dead.p_corrected) == (0, 0, 1, 1)
    assert max(effects.values(), key=lambda e: e.delta_loss) is carrier
    assert carrier.delta_loss > 1 and carrier.p_corrected < 0.001
    assert all(abs(e.delta_loss) < 0.05 for e in effects.values() if e is not carrier)
    first, second = best_single_heads(model, counting(520))
    assert (second.layer, second.best) == CARRIER and abs(second.delta_loss) < 0.05
    assert second.losses[0] > second.losses[1] + 1
    assert first.layer == 0 and first.losses[first.best] == min(first.losses) == first.loss


@every_family
def test_effects_are_those_of_removal(tiny_model, family):
    model, sample = tiny_model(n_layers=4, n_heads=HEADS, **FAMILIES[family]), some_text()
    every = all_heads(HEADS)
    whole = losses_of_removed(model, sample, without(HEADS, [])).mean()
    effects = ablate_each(model, sample)
    assert [(e.layer, e.head) for e in effects] == every
    for e, head in zip(effects, every, strict=True):
        loss = losses_of_removed(model, sample, without(HEADS, [head])).mean()
        assert e.loss == pytest.approx(loss, **EXACT)
        assert e.delta_loss == pytest.approx(loss - whole, **EXACT)
        assert e.delta_ppl == pytest.approx(math.exp(loss) - math.exp(whole), rel=1e-9)
        assert e.ppl == math.exp(e.loss) and 0 < e.p_value <= e.p_corrected <= 1
    reduced = best_single_heads(model, sample)
    assert [e.layer for e in reduced] == [0, 2, 3]
    for e in reduced:
        others = [a for a in every if a[0] == e.layer]
        alone = [
            losses_of_removed(model, sample, without(HEADS, [b for b in others if b != a])).mean()
            for a in others
        ]
        assert e.losses == pytest.approx(alone, **EXACT)
        assert e.best == int(np.argmin(alone)) and e.loss == e.losses[e.best]
        assert e.delta_loss == pytest.approx(min(alone) - whole, **EXACT)
    assert (reduced[2].delta_loss, reduced[2].p_value) == (0, 1)  # it has one head


def test_results_do_not_depend_on_the_batch_size_and_go_into_json(tiny_model):
    model, sample = tiny_model(n_layers=4, n_heads=HEADS), some_text()
    for analysis in (ablate_each, best_single_heads):
        counted = []
        rows = [dataclasses.asdict(e) for e in analysis(model, sample, batch_size=8)]
        again = analysis(model, sample, batch_size=3, on_tokens=counted.append)
        assert sum(counted) == ablation_tokens(HEADS, sample) == 7 * sample.n_tokens
        for row, other in zip(rows, again, strict=True):
            for name, value in dataclasses.asdict(other).items():
                assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert json.loads(json.dumps(rows)) == rows


def test_a_model_without_heads(tiny_model):
    model = tiny_model(n_heads=[0, 0], n_persistent=0, d_ff=10)
    assert ablate_each(model, some_text()) == best_single_heads(model, some_text()) == []
