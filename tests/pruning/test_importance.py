"""Scores of heads: importance by finite differences, magnitude by loops, random by its seed."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

from allattn.config import PruneConfig
from allattn.model.attention import Attention
from allattn.model.transformer import Memory, TransformerLM
from allattn.pruning.gates import MaskGate
from allattn.pruning.importance import head_scores, importance, magnitude

V, T = 11, 4
Stream = list[tuple[Tensor, Tensor]]
FAMILIES = {
    "all-attention": {"n_heads": [3, 0, 2], "n_layers": 3},
    "transformer-xl": {"n_heads": [3, 0, 2], "n_layers": 3, "n_persistent": 0, "d_ff": 7},
}
families = pytest.mark.parametrize("family", FAMILIES)


def text(n_segments: int, n_lanes: int, seed: int = 0) -> Stream:
    """Consecutive segments of some lanes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (n_lanes, n_segments * T + 1), generator=generator)
    return [
        (ids[:, k * T : (k + 1) * T], ids[:, k * T + 1 : (k + 1) * T + 1])
        for k in range(n_segments)
    ]


def lanes_of(stream: Stream, *lanes: int) -> Stream:
    return [(ids[list(lanes)], targets[list(lanes)]) for ids, targets in stream]


def of_one(memory: Memory | None, lane: int) -> Memory | None:
    if memory is None:
        return None
    hidden = [None if h is None else h[lane : lane + 1] for h in memory.hidden]
    return Memory(hidden, memory.length)


@torch.no_grad()
def by_differences(model: TransformerLM, streams: list[Stream], eps: float = 1e-5):
    """Mean over sequences of abs(dL/dc), c multiplying a head's columns of Wo, memory held."""
    H = model.config.d_head
    sums = [[0.0] * n for n in model.config.heads]
    n_sequences = 0
    for stream in streams:
        memory = None
        for ids, targets in stream:
            for lane in range(len(ids)):
                n_sequences += 1
                one = (ids[lane : lane + 1], targets[lane : lane + 1], of_one(memory, lane))
                for layer, row in enumerate(sums):
                    for head in range(len(row)):
                        weight = model.layers[layer].attention.output.weight
                        kept = weight.clone()
                        ends = []
                        for sign in (1, -1):
                            weight[:, head * H : (head + 1) * H] *= 1 + sign * eps
                            ends.append(float(model(*one).nll.mean()))
                            weight.copy_(kept)
                        row[head] += abs(ends[0] - ends[1]) / (2 * eps)
            memory = model(ids, targets, memory).memory
    return [[x / n_sequences for x in row] for row in sums]


def assert_close(got: list[list[float]], wanted: list[list[float]], rel: float = 1e-6) -> None:
    assert list(map(len, got)) == list(map(len, wanted))
    for a, b in zip(got, wanted, strict=True):
        assert a == pytest.approx(b, rel=rel, abs=1e-9)


# Importance


@families
@pytest.mark.parametrize("attention", ["fused", "reference"])
def test_importance_is_the_mean_absolute_difference(tiny_model, family, attention):
    values = {**FAMILIES[family], "attention": attention}
    streams = [text(3, 2), text(2, 1, seed=1)]
    wanted = by_differences(tiny_model(**values), streams)
    assert min(x for row in wanted for x in row) > 1e-4
    assert_close(importance(tiny_model(**values), streams, normalize=False), wanted)


def test_memory_counts(tiny_model):
    """The same segments without the memory between them are scored otherwise."""
    stream = text(3, 2)
    together = importance(tiny_model(), [stream], normalize=False)
    apart = importance(tiny_model(), [[segment] for segment in stream], normalize=False)
    assert_close(apart, by_differences(tiny_model(), [[segment] for segment in stream]))
    assert any(abs(a / b - 1) > 1e-3 for a, b in zip(together[1], apart[1], strict=True))


def test_it_is_the_mean_of_absolute_values_not_the_absolute_mean(tiny_model):
    """Gradients of opposite signs do not cancel: a batch's score is the mean of its lanes'."""
    stream = text(1, 6)
    alone = [importance(tiny_model(), [lanes_of(stream, b)], normalize=False) for b in range(6)]
    mean = [list(np.mean([each[layer] for each in alone], axis=0)) for layer in range(2)]
    assert_close(importance(tiny_model(), [stream], normalize=False), mean, rel=1e-9)


@families
def test_how_lanes_are_split_changes_nothing(tiny_model, family):
    stream = text(3, 4)
    whole = importance(tiny_model(**FAMILIES[family]), [stream])
    for split in ([(0, 1), (2, 3)], [(0,), (1, 2, 3)], [(b,) for b in range(4)]):
        streams = [lanes_of(stream, *lanes) for lanes in split]
        assert_close(importance(tiny_model(**FAMILIES[family]), streams), whole, rel=1e-9)


def test_ranks_add_up(tiny_model):
    """Two ranks of uneven text: each gets what one process gets of all of it."""
    stream = text(2, 3)
    whole = importance(tiny_model(), [stream])
    shares: dict[int, Tensor] = {}
    parts = [lanes_of(stream, 0), lanes_of(stream, 1, 2)]

    def keep(rank: int):
        def total(x: Tensor) -> Tensor:
            shares[rank] = x.clone()
            return x

        return total

    for rank, part in enumerate(parts):
        importance(tiny_model(), [part], total=keep(rank))
    for rank, part in enumerate(parts):
        got = importance(tiny_model(), [part], total=lambda x, r=rank: x + shares[1 - r])
        assert_close(got, whole, rel=1e-9)


def test_normalised_within_each_layer(tiny_model):
    values = FAMILIES["all-attention"]
    raw = importance(tiny_model(**values), [text(2, 2)], normalize=False)
    got = importance(tiny_model(**values), [text(2, 2)])
    wanted = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in raw]
    assert_close(got, wanted, rel=1e-9)
    assert got[1] == []


@pytest.mark.parametrize("normalize", [False, True])
def test_masked_heads_score_zero_and_the_others_as_behind_the_mask(tiny_model, normalize):
    """Output scaling too: the score is of a head's own 0 or 1, which the scale multiplies."""
    model = tiny_model(n_heads=4)
    for layer, kept, scale in zip(model.layers, [[0, 2], []], [2.0, 1.0], strict=True):
        layer.attention.gate = MaskGate(4, kept, scale).double()
    streams = [text(2, 2)]
    wanted = by_differences(model, streams)
    assert wanted[0][1] == wanted[0][3] == 0 and wanted[0][0] > 1e-3
    if normalize:
        norm = math.hypot(*wanted[0])
        wanted[0] = [x / norm for x in wanted[0]]
    got = importance(model, streams, normalize)
    assert_close(got, wanted)
    assert got[1] == [0.0] * 4


def without_its_gate(monkeypatch, *layers: int) -> None:
    """Attention that ignores the gates of some layers, as a core that bypasses them would."""
    forward = Attention.forward

    def ungated(self, *args):
        if self.number not in layers:
            return forward(self, *args)
        gate, self.gate = self.gate, None
        try:
            return forward(self, *args)
        finally:
            self.gate = gate

    monkeypatch.setattr(Attention, "forward", ungated)


def test_a_gate_without_gradient_is_an_error_not_a_zero(tiny_model, monkeypatch):
    def numbered() -> TransformerLM:
        model = tiny_model()
        for number, layer in enumerate(model.layers):
            layer.attention.number = number
        return model

    without_its_gate(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="layer 1: .*no gradient"):
        importance(numbered(), [text(1, 2)])
    without_its_gate(monkeypatch, 0, 1)
    with pytest.raises(RuntimeError):
        importance(numbered(), [text(1, 2)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_is_not_scored(tiny_model, value):
    model = tiny_model()
    with torch.no_grad():
        model.layers[1].attention.value.weight[0, 0] = value
    with pytest.raises(RuntimeError, match="finite"):
        importance(model, [text(1, 2)])


def test_no_head_no_score(tiny_model):
    model = tiny_model(n_heads=[0, 0], d_ff=4)
    assert magnitude(model) == [[], []]
    assert head_scores(PruneConfig(method="random"), model, nothing_to_read, [1]) == [[], []]


def test_gradient_mode_and_the_weights_are_left_alone(tiny_model):
    """Scoring inside `no_grad`, as after an evaluation, works; weights keep their values."""
    model = tiny_model()
    before = oracles.weights_of(model)
    with torch.no_grad():
        got = importance(model, [text(1, 2)])
    assert_close(got, importance(tiny_model(), [text(1, 2)]), rel=1e-12)
    after = oracles.weights_of(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)


# Magnitude


def magnitude_by_loops(model: TransformerLM) -> list[list[float]]:
    H = model.config.d_head
    scores: list[list[float]] = []
    for index, n in enumerate(model.config.heads):
        row = []
        for head in range(n):
            weights = oracles.part(oracles.weights_of(model), f"layers.{index}.attention.")
            inside = slice(head * H, (head + 1) * H)
            Wo, Wv = weights["output.weight"][:, inside], weights["value.weight"][inside]
            D = model.config.d_model
            total = 0.0
            for i in range(D):
                for j in range(D):
                    total += sum(Wo[i, k] * Wv[k, j] for k in range(H)) ** 2
            P = model.config.n_persistent
            for p in range(P):
                value = math.sqrt(P) * weights["persistent_value"][head, p]
                total += sum(float(Wo[i] @ value) ** 2 for i in range(D)) / P
            row.append(math.sqrt(total))
        scores.append(row)
    return scores


@families
def test_magnitude_equals_loops(tiny_model, family):
    model = tiny_model(**FAMILIES[family])
    wanted = magnitude_by_loops(model)
    assert_close(magnitude(model), wanted, rel=1e-10)


def test_magnitude_is_the_size_of_a_heads_output(tiny_model):
    """Monte Carlo: white inputs, even attention over the persistent values or one content value."""
    model = tiny_model(n_heads=3)
    a = model.layers[0].attention
    with torch.no_grad():
        x = torch.randn(4000, 8, dtype=torch.float64)
        v = a.value(x).view(-1, 3, 3)
        Wo = a.output.weight.view(8, 3, 3)
        content = torch.einsum("dnh,bnh->bnd", Wo, v).square().sum(2).mean(0)
        values = a.persistent_value * math.sqrt(5)
        persistent = torch.einsum("dnh,nph->npd", Wo, values).square().sum(2).mean(1)
        expected = (content + persistent).sqrt()
    assert magnitude(model)[0] == pytest.approx(expected.tolist(), rel=0.05)


def test_magnitude_of_masked_heads_is_zero(tiny_model):
    model = tiny_model(n_heads=3)
    wanted = magnitude_by_loops(model)
    model.layers[0].attention.gate = MaskGate(3, [1], 3.0)
    got = magnitude(model)
    assert got[0] == pytest.approx([0.0, wanted[0][1], 0.0])
    assert got[1] == pytest.approx(wanted[1])


# The way in


def nothing_to_read():
    raise AssertionError("only importance needs text")


def test_head_scores_asks_the_method_of_the_config(tiny_model):
    streams = [text(2, 2)]

    def scores(method: str, seed: list[int], **values) -> list[list[float]]:
        config = PruneConfig(method=method, keep=0.5, **values)
        way = (lambda: streams) if method == "importance" else nothing_to_read
        return head_scores(config, tiny_model(), way, seed)

    assert scores("importance", [1]) == importance(tiny_model(), streams)
    assert scores("importance", [1], normalize=False) == importance(tiny_model(), streams, False)
    assert scores("magnitude", [1]) == magnitude(tiny_model())


def test_random_is_a_function_of_its_seed_alone(tiny_model):
    config = PruneConfig(method="random", keep=0.5)

    def scores(*seed: int, weights: int = 0) -> list[list[float]]:
        model = tiny_model(weights, n_layers=3, n_heads=[3, 0, 2])
        return head_scores(config, model, nothing_to_read, list(seed))

    first = scores(3, 7)
    torch.manual_seed(5)
    np.random.seed(5)
    assert scores(3, 7, weights=4) == first
    assert list(map(len, first)) == [3, 0, 2]
    different = [scores(3, 8), scores(4, 7)]
    assert first not in different and different[0] != different[1]
    assert all(0 <= x < 1 for row in first for x in row)


def test_random_has_no_favourites(tiny_model):
    model = tiny_model(n_layers=2, n_heads=2)
    config = PruneConfig(method="random", keep=0.5)
    wins = np.zeros(4)
    for step in range(1000):
        flat = np.concatenate(head_scores(config, model, nothing_to_read, [1, step]))
        wins[flat.argmax()] += 1
    assert abs(wins - 250).max() < 4 * math.sqrt(1000 * 0.25 * 0.75)


# Planted


@families
@pytest.mark.parametrize("attention", ["fused", "reference"])
def test_heads_that_do_nothing_score_zero_and_no_other_does(tiny_model, family, attention):
    useless = {(0, 1), (2, 0), (0, 2)}
    model = tiny_model(**FAMILIES[family], attention=attention)
    with torch.no_grad():
        for layer, head in useless:
            model.layers[layer].attention.output.weight[:, head * 3 : head * 3 + 3] = 0
    for scores in (magnitude(model), importance(model, [text(2, 2)])):
        zero = {(i, h) for i, row in enumerate(scores) for h, x in enumerate(row) if x < 1e-12}
        assert zero == useless
