"""Budgets: exact counts against brute force, and against parameters and FLOPs of real models."""

from __future__ import annotations

import itertools
import math

import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allattn.config import ConfigError, ModelConfig, PruneConfig
from allattn.model.transformer import TransformerLM, flops_per_token
from allattn.pruning.budget import apportion, select, target_heads
from allattn.pruning.schedule import annealed, heads_at

Kept = tuple[tuple[int, ...], ...]

few_scores = st.lists(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), max_size=3), min_size=1, max_size=4
)
sizes_of_layers = st.lists(st.integers(0, 6), min_size=1, max_size=5)


def every_choice(sizes: list[int], k: int) -> list[Kept]:
    """All ways to keep k heads."""
    places = [(layer, head) for layer, n in enumerate(sizes) for head in range(n)]
    return [
        tuple(tuple(h for at, h in chosen if at == layer) for layer in range(len(sizes)))
        for chosen in itertools.combinations(places, k)
    ]


def preference(kept: Kept, scores: list[list[float]]) -> tuple:
    """Larger is better: the scores that stay, best first; then the lower layers, lower heads."""
    places = [(layer, head) for layer, heads in enumerate(kept) for head in heads]
    ranked = sorted((-scores[layer][head], layer, head) for layer, head in places)
    return tuple((-cost, -layer, -head) for cost, layer, head in ranked)


def best_choice(scores: list[list[float]], k: int, min_heads: int, quotas=None) -> Kept:
    """By looking at all of them."""
    sizes = list(map(len, scores))
    allowed = [
        kept
        for kept in every_choice(sizes, min(k, sum(sizes)))
        if all(len(heads) >= min(min_heads, n) for heads, n in zip(kept, sizes, strict=True))
        and (quotas is None or list(map(len, kept)) == quotas)
    ]
    return max(allowed, key=lambda kept: (sum_of(kept, scores), preference(kept, scores)))


def sum_of(kept: Kept, scores: list[list[float]]) -> float:
    return sum(scores[layer][head] for layer, heads in enumerate(kept) for head in heads)


# Which heads


@settings(max_examples=150)
@given(scores=few_scores, share=st.floats(0, 1), min_heads=st.integers(0, 2))
def test_global_selection_is_the_best_of_all_choices(scores, share, min_heads):
    sizes = list(map(len, scores))
    least = sum(min(min_heads, n) for n in sizes)
    k = least + round(share * (sum(sizes) - least))
    kept = select(scores, k, "global", min_heads)
    assert tuple(map(tuple, kept)) == best_choice(scores, k, min_heads)


@settings(max_examples=150)
@given(scores=few_scores, share=st.floats(0, 1), min_heads=st.integers(0, 2))
def test_selection_by_layer_is_the_best_of_all_with_its_quotas(scores, share, min_heads):
    sizes = list(map(len, scores))
    least = sum(min(min_heads, n) for n in sizes)
    k = least + round(share * (sum(sizes) - least))
    kept = select(scores, k, "layer", min_heads)
    assert sum(map(len, kept)) == k
    quotas = list(map(len, kept))
    assert tuple(map(tuple, kept)) == best_choice(scores, k, min_heads, quotas)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_more_than_there_are_is_all(scope):
    assert select([[1.0, 2.0], [], [0.0]], 7, scope, 0) == [[0, 1], [], [0]]
    assert select([[], []], 3, scope, 2) == [[], []]


def test_ties_go_to_the_lower_layer_then_the_lower_head():
    same = [[0.0] * 3, [0.0] * 3, [0.0] * 3]
    assert select(same, 4, "global", 0) == [[0, 1, 2], [0], []]
    assert select(same, 4, "global", 1) == [[0, 1], [0], [0]]
    assert select(same, 4, "layer", 0) == [[0, 1], [0], [0]]
    assert select([[1.0, 3.0, 3.0], [3.0, 1.0]], 2, "global", 0) == [[1, 2], []]


def test_min_heads_takes_the_best_of_a_layer_that_is_all_bad():
    scores = [[9.0, 8.0, 7.0], [1.0, 3.0, 2.0], [5.0]]
    assert select(scores, 4, "global", 0) == [[0, 1, 2], [], [0]]
    assert select(scores, 4, "global", 1) == [[0, 1], [1], [0]]
    assert select(scores, 5, "global", 2) == [[0, 1], [1, 2], [0]]


# How many in each layer


@settings(max_examples=300)
@given(sizes=sizes_of_layers, share=st.floats(0, 1), min_heads=st.integers(0, 3))
def test_quotas_are_exact_and_within_one_of_the_share(sizes, share, min_heads):
    least = [min(min_heads, n) for n in sizes]
    k = sum(least) + round(share * (sum(sizes) - sum(least)))
    quotas = apportion(k, sizes, min_heads)
    assert sum(quotas) == k
    for quota, n, low in zip(quotas, sizes, least, strict=True):
        assert low <= quota <= n
        if not min_heads:
            assert abs(quota - k * n / max(sum(sizes), 1)) < 1


@settings(max_examples=200)
@given(n_layers=st.integers(1, 8), n=st.integers(1, 8), k=st.integers(0, 64))
def test_equal_layers_differ_by_one_and_the_lower_have_more(n_layers, n, k):
    k = min(k, n_layers * n)
    quotas = apportion(k, [n] * n_layers, 0)
    assert quotas == [k // n_layers + (layer < k % n_layers) for layer in range(n_layers)]


def test_quotas_by_hand():
    assert apportion(6, [8, 4, 0], 0) == [4, 2, 0]
    assert apportion(5, [8, 4, 0], 0) == [3, 2, 0]  # shares 3.33 and 1.67
    assert apportion(2, [8, 8, 8], 0) == [1, 1, 0]
    assert apportion(3, [8, 1, 1], 1) == [1, 1, 1]
    assert apportion(4, [8, 1, 1], 1) == [2, 1, 1]
    assert apportion(99, [2, 1], 0) == [2, 1]
    assert apportion(0, [0, 0], 2) == [0, 0]


# Budgets in parameters and FLOPs

ALL_ATTENTION = ModelConfig(
    n_layers=3, d_model=12, n_heads=4, d_head=3, n_persistent=7, vocab_size=50
)
UNEVEN = ModelConfig(
    n_layers=3, d_model=12, n_heads=[5, 0, 2], d_head=3, n_persistent=7, vocab_size=50
)
TRANSFORMER_XL = ModelConfig(
    n_layers=3, d_model=12, n_heads=4, d_head=3, n_persistent=0, d_ff=20, vocab_size=50
)
ADAPTIVE = ModelConfig(
    n_layers=2, d_model=16, n_heads=6, d_head=5, n_persistent=0, d_ff=9, vocab_size=50,
    embedding="adaptive", cutoffs=[10, 20], div_value=2, same_length=True, position="learned",
    clamp_len=99,
)  # fmt: skip
HYBRID = ModelConfig(
    n_layers=2, d_model=12, n_heads=5, d_head=3, n_persistent=4, d_ff=6, vocab_size=50
)
SHARES = [i / 40 for i in range(41)]


def prune(**values) -> PruneConfig:
    return PruneConfig(**values)


def target(config: PruneConfig, first: ModelConfig, where: str = "prune") -> int | None:
    """For a run that begins with pruning."""
    return target_heads(config, first, sum(first.heads), where)


@pytest.mark.parametrize("first", [ALL_ATTENTION, UNEVEN], ids=["even", "uneven"])
def test_all_three_budgets_agree_where_heads_are_all_there_is(first):
    for share in [*SHARES, 0.123, 1 / 3, 0.999]:
        found = {
            target(prune(**{key: share}), first) for key in ("keep", "keep_params", "keep_flops")
        }
        assert found == {math.floor(share * sum(first.heads) + 0.5)}, share


def with_heads(first: ModelConfig, k: int) -> ModelConfig:
    """The same with k heads in all, the lower layers having more."""
    heads = [k // first.n_layers + (i < k % first.n_layers) for i in range(first.n_layers)]
    return ModelConfig(**{**vars(first), "n_heads": heads})


def parameters_in_layers(config: ModelConfig) -> int:
    """Of a real model's layers, LayerNorms aside (a layer's first head brings one)."""
    named = TransformerLM(config).named_parameters()
    return sum(p.numel() for n, p in named if n.startswith("layers.") and "norm." not in n)


def flops_in_layers(config: ModelConfig) -> float:
    """By the loops of the oracle, which share none of the formulas, less those of no layer."""
    stages = [oracles.flops_per_token(config), 0.0]
    bare = ModelConfig(**{**vars(config), "n_heads": [0] * config.n_layers, "d_ff": 0})
    stages[1] = oracles.flops_per_token(bare)
    return stages[0] - stages[1]


@pytest.mark.parametrize("first", [ALL_ATTENTION, TRANSFORMER_XL, ADAPTIVE, HYBRID])
@pytest.mark.parametrize("key", ["keep_params", "keep_flops"])
def test_no_other_head_count_comes_nearer(first, key):
    """Against models built with every possible number of heads."""
    count = parameters_in_layers if key == "keep_params" else flops_in_layers
    costs = [count(with_heads(first, k)) for k in range(sum(first.heads) + 1)]
    reachable = 0
    for share in SHARES:
        wanted = share * costs[-1]
        distances = [abs(cost - wanted) for cost in costs]
        step = costs[1] - costs[0]
        if wanted < costs[0] - step / 2:
            with pytest.raises(ConfigError) as error:
                target(prune(**{key: share}), first, "stages[1].prune")
            message = str(error.value)
            assert message.startswith(f"stages[1].prune.{key}: {share} ") and "\n" not in message
            assert f"{costs[0] / costs[-1]:.3f}" in message
            continue
        reachable += 1
        k = target(prune(**{key: share}), first)
        assert distances[k] <= min(distances) + 1e-6 * costs[-1], (share, k)
    assert reachable >= 10
    assert target(prune(**{key: 1.0}), first) == sum(first.heads)


def test_what_a_budget_means_is_another_thing_for_transformer_xl():
    """A head has 186 parameters, the feed-forward blocks 1536; 2880 FLOPs, a head 369 of its own
    where 4.5 keys are seen on average.
    """
    short = ModelConfig(**{**vars(TRANSFORMER_XL), "seq_len": 8, "mem_len": 0})
    budgets = [{key: 0.7} for key in ("keep", "keep_params", "keep_flops")]
    assert [target(prune(**budget), short) for budget in budgets] == [8, 6, 6]
    budgets = [{key: 0.5} for key in ("keep", "keep_params", "keep_flops")]
    assert [target(prune(**budget), short) for budget in budgets] == [6, 2, 2]


def test_flops_of_the_package_are_those_of_the_oracle_up_to_positions():
    """The package projects positions once for all sequences and leaves them out."""
    for first in (ALL_ATTENTION, TRANSFORMER_XL):
        few, many = (with_heads(first, k) for k in (3, 11))
        got = flops_per_token(many) - flops_per_token(few)
        assert got == pytest.approx(flops_in_layers(many) - flops_in_layers(few), rel=1e-9)


def test_a_penalty_has_no_target():
    assert target(prune(penalty=0.1), ALL_ATTENTION) is None


@pytest.mark.parametrize("key", ["keep", "keep_params", "keep_flops"])
def test_min_heads_that_need_more_than_the_budget_are_refused(key):
    assert target(prune(**{key: 0.5}, min_heads=2), ALL_ATTENTION) == 6
    with pytest.raises(ConfigError) as error:
        target(prune(**{key: 0.5}, min_heads=3), ALL_ATTENTION, "stages[0].prune")
    message = str(error.value)
    assert message.startswith("stages[0].prune.min_heads: 3 ") and "\n" not in message
    assert "9 heads" in message and "6" in message


def test_min_heads_counts_what_a_layer_has():
    first = ModelConfig(**{**vars(ALL_ATTENTION), "n_heads": [1, 6, 0]})
    assert target(prune(keep=0.5, min_heads=3), first) == 4  # 1 + 3 + 0 of 7
    with pytest.raises(ConfigError):
        target(prune(keep=0.4, min_heads=3), first)


def test_shares_are_of_the_runs_first_heads_and_min_heads_of_the_present_ones():
    present = ModelConfig(**{**vars(ALL_ATTENTION), "n_heads": [3, 0, 2]})  # 5 of 12 are left
    for key in ("keep", "keep_params", "keep_flops"):
        assert target_heads(prune(**{key: 0.25}, min_heads=1), present, 12) == 3
    with pytest.raises(ConfigError):
        target_heads(prune(keep=0.25, min_heads=2), present, 12)


# Gradual targets

HEADS_AT = [
    # schedule, warmup_steps, steps, start, end, heads after 0, 1, 2, ... steps
    ("linear", 0, 4, 8, 4, [8, 7, 6, 5, 4]),
    ("linear", 2, 4, 8, 4, [8, 6, 4, 4, 4]),
    ("linear", 0, 4, 8, 5, [8, 7, 7, 6, 5]),  # 7.25, 6.5 (halves round up), 5.75
    ("linear", 8, 4, 8, 0, [8, 7, 6, 5, 4]),
    ("linear", 0, 2, 3, 3, [3, 3, 3]),
    ("cubic", 0, 4, 64, 0, [64, 27, 8, 1, 0]),
    ("cubic", 0, 4, 72, 8, [72, 35, 16, 9, 8]),
    ("cubic", 2, 4, 8, 0, [8, 1, 0, 0, 0]),
    ("cubic", 0, 5, 10, 5, [10, 8, 6, 5, 5, 5]),  # 7.56, 6.08, 5.32, 5.04
]


@pytest.mark.parametrize(("schedule", "warmup", "steps", "start", "end", "table"), HEADS_AT)
def test_heads_at(schedule, warmup, steps, start, end, table):
    config = prune(keep=0.5, schedule=schedule, warmup_steps=warmup)
    assert [heads_at(config, step, steps, start, end) for step in range(len(table))] == table


@pytest.mark.parametrize(
    ("temperature", "table"),
    [
        ([1.0, 0.0625], [1, 0.5, 0.25, 0.125, 0.0625]),
        ([0.1, 10.0], [0.1, 0.316227766, 1.0, 3.16227766, 10.0]),
        ([0.5, 0.5], [0.5, 0.5, 0.5]),
        ([1.0, 0.1], [1.0, 0.1]),
        ([1.0, 0.1], [1.0]),  # a stage of one step
    ],
)
def test_annealed(temperature, table):
    got = [annealed(temperature, step, len(table)) for step in range(len(table))]
    assert got == pytest.approx(table, rel=1e-8)
