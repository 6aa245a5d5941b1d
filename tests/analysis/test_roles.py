"""Views of heads: brute force, closed forms, planted heads."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import oracles
import planted
import pytest
import torch

from allattn.analysis.roles import PERSISTENT, POSITIONAL, RARE, HeadView, count_tokens, view_heads
from allattn.analysis.sample import Sample, take_sample
from allattn.data.lanes import Corpus, Lanes
from allattn.model.transformer import TransformerLM, watched
from allattn.pruning.gates import MaskGate

V, EOS = 11, 3
FAMILIES = {
    "all-attention": {"n_heads": [3, 0, 2], "n_layers": 3},
    "transformer-xl": {"n_heads": [3, 0, 2], "n_layers": 3, "n_persistent": 0, "d_ff": 7},
    "same length": {"n_heads": [2, 1], "same_length": True},
    "adaptive": {"embedding": "adaptive", "cutoffs": [4], "div_value": 2},
    "no memory": {"mem_len": 0},
}


def text(n_tokens: int = 31, vocab_size: int = V, seed: int = 0) -> np.ndarray:
    """Frequent and rare ids, so that there are ties of rarity and several ends of lines."""
    p = 1 / np.arange(1, vocab_size + 1)
    return np.random.default_rng(seed).choice(vocab_size, n_tokens, p=p / p.sum())


COUNTS = np.array([90, 60, 60, 40, 30, 10, 10, 10, 4, 0, 0])


@torch.no_grad()
def by_loops(
    model: TransformerLM, sample: Sample, counts: np.ndarray
) -> list[list[dict[str, float]]]:
    """Every statistic, a lane, a query and a key at a time, with the memory as hidden states."""
    config = model.config
    window = config.mem_len if config.same_length else None
    rows = [[{"n": [], "at": {}} for _ in range(n)] for n in config.heads]
    for lane in range(sample.lanes.n_lanes):
        memory, ids = None, []
        for k in range(sample.n_segments):
            segment, targets = sample.lanes.batch(k, lane, lane + 1)
            ids += segment[0].tolist()
            seen: dict[int, np.ndarray] = {}

            def look(layer, weights, seen=seen):
                seen[layer] = weights[0].numpy()
                return weights

            with watched(model, look):
                memory = model(segment, targets, memory).memory
            for layer, weights_NTX in seen.items():
                for head, weights_TX in enumerate(weights_NTX):
                    tally(rows[layer][head], weights_TX, ids, config.n_persistent, window, counts)
    return [[means(row) for row in layer] for layer in rows]


def tally(row, weights_TX, ids, P, window, counts) -> None:
    T, S = len(weights_TX), weights_TX.shape[1] - P
    keys = ids[-S:]
    for i, weights in enumerate(weights_TX):
        query = S - T + i
        visible = [j for j in range(S) if oracles.sees(query, j, window)]
        largest = max(weights[j] for j in visible)
        (where,) = [j for j in visible if weights[j] == largest]
        row["at"][where - query] = row["at"].get(where - query, 0) + 1
        least = min(counts[keys[j]] for j in visible)
        share = sum(weights[S:])
        row["n"].append(
            {
                "rare_share": counts[keys[where]] == least,
                "rare_chance": sum(counts[keys[j]] == least for j in visible) / len(visible),
                "persistent_share": share,
            }
        )
        if P:
            row["n"][-1]["persistent_entropy"] = -sum(
                w / share * math.log(w / share) for w in weights[S:]
            )
        if keys[query] != EOS:
            row["n"][-1]["confidence"] = max(weights[j] for j in visible if keys[j] != EOS)


def means(row) -> dict[str, float]:
    result = {}
    for name in ("confidence", "rare_share", "rare_chance", "persistent_share"):
        result[name] = np.mean([query[name] for query in row["n"] if name in query])
    entropies = [q["persistent_entropy"] for q in row["n"] if "persistent_entropy" in q]
    result["persistent_entropy"] = np.mean(entropies) if entropies else None
    result["offset"] = max(row["at"], key=lambda where: (row["at"][where], where))
    result["offset_share"] = row["at"][result["offset"]] / len(row["n"])
    return result


def rows_of(views: list[list[HeadView]]) -> list[list[dict]]:
    return [[asdict(view) for view in layer] for layer in views]


def close(rows: list[list[dict]], abs: float = 1e-9) -> list[list]:
    return [[pytest.approx(row, abs=abs) for row in layer] for layer in rows]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_every_statistic_equals_loops(tiny_model, family, batch_size):
    """Four segments a lane: the memory grows, is full, and moves."""
    model = tiny_model(**FAMILIES[family])
    sample = Sample(Lanes(text(50), 3, 4), 4)
    wanted = by_loops(model, sample, COUNTS)
    assert any(view["rare_share"] != view["rare_chance"] for row in wanted for view in row)
    assert rows_of(view_heads(model, sample, COUNTS, EOS, batch_size)) == close(wanted)


def test_ends_of_lines_are_left_out_of_the_confidence(tiny_model):
    """The text does have them, and they change it."""
    sample = take_sample(text(50), 4, 48)
    with_eos = view_heads(tiny_model(), sample, COUNTS, EOS)
    without = view_heads(tiny_model(), sample, COUNTS, V)  # an id that never comes
    for one, other in zip(sum(with_eos, []), sum(without, []), strict=True):
        assert abs(one.confidence - other.confidence) > 1e-3
        assert (one.offset_share, one.rare_share) == (other.offset_share, other.rare_share)


def test_float32_is_independent_of_the_batch_size(tiny_model):
    model = tiny_model().float()
    sample = take_sample(text(200), 4, 160)
    wanted = view_heads(model, sample, COUNTS, EOS, 1)
    got = view_heads(model, sample, COUNTS, EOS, 8)
    assert rows_of(got) == close(rows_of(wanted), abs=1e-5)


# Planted heads

PI = (0.5, 0.25, 0.125, 0.0625, 0.0625)
PLANTED_V, T, M = 40, 16, 16


@pytest.fixture
def planted_model(tiny_config):
    """Heads that look one back, three back, at the rarest, at persistent vectors, evenly."""
    config = tiny_config(
        n_layers=1, n_heads=5, seq_len=T, mem_len=M, vocab_size=PLANTED_V, n_persistent=5
    )
    plans = [planted.offset(1), planted.offset(3), planted.rarest(), planted.persistent(PI)]
    return planted.plant(TransformerLM(config).double(), planted_counts(), plans)


def planted_counts() -> np.ndarray:
    return np.arange(PLANTED_V, 0, -1) ** 2  # no two alike


def planted_views(model: TransformerLM) -> list[HeadView]:
    sample = take_sample(text(3000, PLANTED_V), T, 1600)
    (views,) = view_heads(model, sample, planted_counts(), PLANTED_V)
    return views


def test_planted_heads_are_found_and_no_others(planted_model):
    one, three, rare, persistent, even = planted_views(planted_model)
    roles = [v.roles for v in (one, three, rare, persistent, even)]
    assert roles == [["positional"], ["positional"], ["rare"], ["persistent"], []]
    lane = 192
    # the first tokens of a lane have none that far back
    assert (one.offset, one.offset_share) == (-1, pytest.approx(1 - 1 / lane, abs=1e-9))
    assert (three.offset, three.offset_share) == (-3, pytest.approx(1 - 3 / lane, abs=1e-9))
    assert one.confidence > 0.99
    assert rare.rare_share == pytest.approx(1.0) and rare.rare_chance < 0.3
    assert max(one.rare_share, three.rare_share, even.rare_share) < RARE
    assert max(one.persistent_share, rare.persistent_share) < 1e-6


def test_entropy_over_persistent_vectors_is_that_of_the_plan(planted_model):
    persistent, even = planted_views(planted_model)[3:]
    wanted = -sum(p * math.log(p) for p in PI)
    assert persistent.persistent_share == pytest.approx(1.0, abs=1e-9)
    assert persistent.persistent_entropy == pytest.approx(wanted, abs=1e-6)
    assert persistent.confidence == pytest.approx(0.0, abs=1e-9)
    assert even.persistent_entropy == pytest.approx(math.log(5), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_even_head_has_closed_forms(planted_model, dtype):
    """With v keys in sight: 1 / (v + 5) each; ties share the query, so offset 0 has 1 / v."""
    even = planted_views(planted_model.to(dtype))[4]
    visible = [min(k * T, M) + i + 1 for k in range(200 // T) for i in range(T)]
    assert len(visible) == 192
    counted = [n for n in visible for _ in range(8)]
    assert even.confidence == pytest.approx(np.mean([1 / (n + 5) for n in counted]))
    assert even.persistent_share == pytest.approx(np.mean([5 / (n + 5) for n in counted]))
    assert (even.offset, even.offset_share) == (0, pytest.approx(np.mean(np.divide(1, visible))))
    assert even.rare_share == pytest.approx(even.rare_chance)


def test_closed_heads_still_look_somewhere(planted_model):
    wanted = planted_views(planted_model)
    planted_model.layers[0].attention.gate = MaskGate(5, [], 1.0)
    assert planted_views(planted_model) == wanted


# The rest


def test_roles_begin_at_their_bars():
    at = HeadView(0.1, -2, POSITIONAL, RARE, 0.1, PERSISTENT, 0.3)
    below = HeadView(0.1, -2, POSITIONAL - 0.01, RARE - 0.01, 0.1, PERSISTENT - 0.01, None)
    assert at.roles == ["positional", "rare", "persistent"]
    assert below.roles == []


def test_tokens_are_counted(tiny_corpus, monkeypatch):
    monkeypatch.setattr("allattn.analysis.roles._CHUNK", 7)
    corpus = Corpus(tiny_corpus)
    counts = count_tokens(corpus)
    tokens = corpus.tokens("train").tolist()
    assert counts.tolist() == [tokens.count(i) for i in range(corpus.vocab_size)]
    assert count_tokens(corpus, "valid").sum() == len(corpus.tokens("valid"))


def test_counts_of_another_vocabulary_are_refused(tiny_model):
    with pytest.raises(ValueError, match=r"token_counts: of shape \[5\] instead of \[11\]"):
        view_heads(tiny_model(), take_sample(text(), 4, 16), np.ones(5, dtype=int), EOS)


def test_progress_and_a_model_without_heads(tiny_model):
    counted = []
    sample = take_sample(text(), 4, 16)
    model = tiny_model(n_heads=[0, 0], d_ff=4)
    assert view_heads(model, sample, COUNTS, EOS, on_tokens=counted.append) == [[], []]
    assert sum(counted) == sample.n_tokens


def test_the_model_is_left_as_it_was(tiny_model):
    model = tiny_model().train()
    model.layers[1].eval()

    def fail(n):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        view_heads(model, take_sample(text(), 4, 16), COUNTS, EOS, on_tokens=fail)
    assert model.training and model.layers[0].training and not model.layers[1].training
    assert all(p.requires_grad for p in model.parameters())
    assert all(layer.attention.watch is None for layer in model.layers)


@pytest.mark.gpu
def test_on_a_gpu_as_on_a_cpu(tiny_model):
    sample = take_sample(text(200), 4, 160)
    wanted = view_heads(tiny_model(), sample, COUNTS, EOS)
    got = view_heads(tiny_model().cuda(), sample, COUNTS, EOS)
    assert rows_of(got) == close(rows_of(wanted), abs=1e-8)
