"""Every method: exactly K heads at each draw and at the end, noise that is each head's own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allattn.config import PruneConfig
from allattn.model.transformer import TransformerLM
from allattn.pruning.budget import apportion, select
from allattn.pruning.gates import gates, open_probability, relaxed_top_k
from allattn.pruning.importance import head_scores
from allattn.pruning.methods import METHODS, Method, PruningState, Scored, build_method

SCOPES = ["global", "layer"]
UNEVEN = {"n_layers": 3, "n_heads": [3, 0, 5], "d_head": 2}
scopes = pytest.mark.parametrize("scope", SCOPES)
noises = pytest.mark.parametrize("noise", ["step", "sequence"])


def method(model: TransformerLM, name: str, seed: int = 1, **values) -> Method:
    """Attached to the model, a run that starts with pruning."""
    values = {"keep": 0.5, **values} if "penalty" not in values else values
    heads = model.config.heads
    state = PruningState(list(heads), sum(heads))
    made = build_method(PruneConfig(method=name, **values), seed, state)
    made.attach(model)
    return made


def set_logits(model: TransformerLM, values: Tensor) -> None:
    with torch.no_grad():
        for gate, part in zip(
            gates(model), values.split([len(g.log_alpha) for g in gates(model)]), strict=True
        ):
            gate.log_alpha.copy_(part)


def logits(model: TransformerLM) -> list[Tensor | None]:
    return [
        None if layer.attention is None else layer.attention.gate.log_alpha.detach()
        for layer in model.layers
    ]


def drawn(model: TransformerLM) -> list[Tensor]:
    """The gates' values of the last draw, by layer that has any."""
    if hasattr(model, "gate_pool"):
        model.gate_pool()
    return [gate().detach() for gate in gates(model)]


# Relaxed top k


def by_loops(scores: list[float], k: int, temperature: float) -> list[float]:
    """The threshold by bisection, in plain Python (Amos et al. 2019)."""
    if k in (0, len(scores)):
        return [float(k > 0)] * len(scores)

    def shares(threshold: float) -> list[float]:
        return [1 / (1 + math.exp(-(s - threshold) / temperature)) for s in scores]

    low, high = min(scores) - 50, max(scores) + 50
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) > k else (low, middle)
    return shares(low)


few = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=7)


@settings(max_examples=150)
@given(scores=few, share=st.floats(0, 1), temperature=st.floats(0.1, 3))
def test_relaxed_top_k_is_the_papers_and_adds_up_to_k(scores, share, temperature):
    k = round(share * len(scores))
    got = relaxed_top_k(torch.tensor(scores, dtype=torch.float64), k, temperature)
    assert got.tolist() == pytest.approx(by_loops(scores, k, temperature), abs=1e-6)
    assert float(got.sum()) == pytest.approx(k, abs=1e-9)
    assert (got >= 0).all()


@pytest.mark.parametrize("scores", [[0.3, -1.0, 2.0, 1.2, 0.9], [9.0, 8.0, -3.0, -9.0, 1.0]])
@pytest.mark.parametrize("k", range(6))
def test_relaxed_top_k_nears_the_hard_one_at_a_low_temperature(scores, k):
    best = sorted(range(5), key=lambda i: -scores[i])[:k]
    hard = torch.tensor([float(i in best) for i in range(5)])
    errors = [
        float((relaxed_top_k(torch.tensor(scores), k, t) - hard).abs().max())
        for t in (1.0, 0.3, 0.1, 0.02)
    ]
    assert errors[-1] < 1e-3 and errors[-1] <= errors[0]


def test_relaxed_top_k_of_scores_that_lie_far_apart():
    """Learned logits do, with Gumbel noise on top: the first must not be taken twice."""
    for t in (1.0, 0.1):
        got = relaxed_top_k(torch.tensor([25.0, 5.0, 0.0, -20.0]), 2, t)
        assert got.tolist() == pytest.approx([1, 1, 0, 0], abs=0.1 * t), t


def test_relaxed_top_k_of_two_is_a_sigmoid():
    """One of two: sigmoid of half their difference."""
    scores = torch.randn(7, 2, dtype=torch.float64)
    for t in (0.2, 1.0, 5.0):
        got = relaxed_top_k(scores, 1, t)
        half = (scores[:, 0] - scores[:, 1]) / (2 * t)
        torch.testing.assert_close(got[:, 0], half.sigmoid(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_relaxed_top_k_gradcheck(k):
    scores = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    for t in (0.5, 1.0):
        assert torch.autograd.gradcheck(lambda s, t=t: relaxed_top_k(s, k, t), (scores,))


# Subset: the draw


@noises
@scopes
@pytest.mark.parametrize("min_heads", [0, 1])
@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75, 1.0])
def test_exactly_k_are_open_at_each_draw(tiny_model, noise, scope, min_heads, keep):
    model = tiny_model(**UNEVEN).float().train()
    pruner = method(
        model, "subset", keep=keep, scope=scope, min_heads=min_heads, noise=noise,
        output_scaling=False,
    )  # fmt: skip
    set_logits(model, torch.tensor([4.0, 3.0, 3.5, 0.0, -1.0, 0.5, -2.0, 0.2]))
    k = round(keep * 8)
    quotas = apportion(k, [3, 0, 5], min_heads)
    seen = set()
    for step in range(12):
        pruner.draw(model, step, lanes=range(2, 5))
        first, second = drawn(model)
        rows = torch.cat([first, second], -1)
        assert rows.shape == ((3, 8) if noise == "sequence" else (8,))
        is_open = rows != 0
        torch.testing.assert_close(rows[is_open], torch.ones(int(is_open.sum())), atol=1e-6, rtol=0)
        assert (is_open.sum(-1) == k).all()
        counts = [(first != 0).sum(-1), (second != 0).sum(-1)]
        assert all((c >= min_heads).all() for c in counts)
        if scope == "layer":
            assert (counts[0] == quotas[0]).all() and (counts[1] == quotas[2]).all()
        seen.update(map(tuple, is_open.view(-1, 8).tolist()))
    assert len(seen) > 1 or keep == 1  # it is a draw


@scopes
@pytest.mark.parametrize("min_heads", [0, 2])
def test_the_open_heads_are_the_best_of_the_noisy_scores(tiny_model, scope, min_heads):
    model = tiny_model(**UNEVEN).float().train()
    pruner = method(model, "subset", scope=scope, min_heads=min_heads, noise="sequence")
    values = torch.tensor([2.0, 1.0, 1.5, 0.0, -1.0, 0.5, -2.0, 0.2])
    set_logits(model, values)
    for step in range(10):
        pruner.draw(model, step, lanes=range(3))
        values_now = drawn(model)
        u = model.gate_pool.uniform.double().numpy()
        noisy = values.double().numpy() - np.log(-np.log(u))
        for lane in range(3):
            row = noisy[lane].tolist()
            wanted = select([row[:3], [], row[3:]], 4, scope, min_heads)
            got = [v[lane].nonzero().flatten().tolist() for v in values_now]
            assert [got[0], [], got[1]] == wanted


def test_gumbel_top_1_is_a_draw_from_softmax(tiny_model):
    """Monte Carlo; and of the two best, by the product of the two draws (Plackett and Luce)."""
    model = tiny_model(n_layers=2, n_heads=[2, 3], d_head=2).float().train()
    values = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0])
    n = 20_000
    p = values.double().softmax(0)
    pairs = torch.zeros(5, dtype=torch.float64)
    for i, j in itertools.permutations(range(5), 2):
        both = p[i] * p[j] / (1 - p[i])
        pairs[i] += both
        pairs[j] += both
    for keep, wanted in ((0.2, p), (0.4, pairs)):
        pruner = method(model, "subset", keep=keep, noise="sequence", output_scaling=False)
        set_logits(model, values)
        pruner.draw(model, 0, lanes=range(n))
        got = torch.cat(drawn(model), -1).double().mean(0)
        sigma = (wanted * (1 - wanted) / n).sqrt()
        assert ((got - wanted).abs() < 4 * sigma).all(), keep


@noises
@scopes
@pytest.mark.parametrize("output_scaling", [False, True])
def test_straight_through_has_the_gradient_of_the_relaxed_form(
    tiny_model, noise, scope, output_scaling
):
    model = tiny_model(**UNEVEN).train()
    pruner = method(
        model, "subset", scope=scope, noise=noise, output_scaling=output_scaling,
        temperature=[0.7, 0.7],
    )  # fmt: skip
    start = torch.tensor([0.5, 1.0, 0.2, 0.0, -1.0, 0.5, -0.3, 0.2])
    set_logits(model, start)
    pruner.draw(model, 3, lanes=range(2))
    model.gate_pool()
    values = [gate() for gate in gates(model)]
    pull = torch.randn(2, 8) if noise == "sequence" else torch.randn(8)
    (torch.cat(values, -1) * pull).sum().backward()
    got = torch.cat([gate.log_alpha.grad for gate in gates(model)])

    alpha = start.double().requires_grad_()
    noisy = alpha - (-model.gate_pool.uniform.double().log()).log()
    if scope == "global":
        soft = relaxed_top_k(noisy, 4, 0.7)
    else:
        q = apportion(4, [3, 0, 5], 0)
        soft = torch.cat(
            [relaxed_top_k(noisy[..., :3], q[0], 0.7), relaxed_top_k(noisy[..., 3:], q[2], 0.7)], -1
        )
    if output_scaling:
        n_open = [(v != 0).sum(-1, keepdim=True).clamp(min=1) for v in values]
        scale = [3 / n_open[0], 5 / n_open[1]]
        soft = torch.cat([soft[..., :3] * scale[0], soft[..., 3:] * scale[1]], -1)
    (wanted,) = torch.autograd.grad((soft * pull).sum(), alpha)
    assert wanted.abs().max() > 0.05
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


@scopes
@pytest.mark.parametrize("min_heads", [0, 1, 2])
@pytest.mark.parametrize("start", ["tied", "learned"])
def test_evaluation_opens_the_best_and_says_so(tiny_model, scope, min_heads, start):
    """What the module computes and what the log and the decision name are the same heads."""
    model = tiny_model(n_layers=3, n_heads=[5, 0, 7], d_head=2).float()
    pruner = method(model, "subset", scope=scope, min_heads=min_heads, output_scaling=False)
    if start == "learned":
        set_logits(model, torch.randn(12))
    model.eval()
    rows = [[] if a is None else a.tolist() for a in logits(model)]
    wanted = select(rows, 6, scope, min_heads)
    pruner.draw(model, 5, stage_step=5, stage_steps=6)
    values = [value.nonzero().flatten().tolist() for value in drawn(model)]
    assert [values[0], [], values[1]] == wanted
    assert all(((v == 0) | (v == 1)).all() for v in drawn(model))
    assert pruner.open_now(logits(model)) == wanted
    assert pruner.final(logits(model))[0] == wanted


def test_subset_counts_fall_along_a_line_and_the_temperature_geometrically(tiny_model):
    model = tiny_model(n_layers=2, n_heads=4, d_head=2).float().train()
    pruner = method(
        model, "subset", keep=0.25, warmup_steps=4, temperature=[1.0, 0.0625],
        output_scaling=False,
    )  # fmt: skip
    found = []
    for stage_step in range(5):
        pruner.draw(model, stage_step, stage_step, 5)
        n_open = sum(int((v != 0).sum()) for v in drawn(model))
        assert pruner.objective(model, stage_step)[0] is None
        assert pruner.objective(model, stage_step)[1]["target_heads"] == n_open
        found.append((n_open, model.gate_pool.temperature))
        assert sum(map(len, pruner.open_now(logits(model)))) == n_open
    assert [n for n, _ in found] == [7, 5, 4, 2, 2]  # 6.5, 5, 3.5, 2
    assert [t for _, t in found] == pytest.approx([1, 0.5, 0.25, 0.125, 0.0625])


def test_subset_learns_which_heads_are_worth_more(tiny_model):
    model = tiny_model(n_layers=2, n_heads=8, d_head=2).float().train()
    pruner = method(model, "subset", keep=0.25, output_scaling=False)
    worth = torch.linspace(0, 1, 16)[torch.randperm(16)].split(8)
    optimizer = torch.optim.Adam([gate.log_alpha for gate in gates(model)], lr=0.1)
    for step in range(200):
        pruner.draw(model, step, step, 200)
        model.gate_pool()
        loss = -sum((gate() * w).sum() for gate, w in zip(gates(model), worth, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept, _ = pruner.final(logits(model))
    best = select([w.tolist() for w in worth], 4, "global", 0)
    chosen, wanted = ({(i, h) for i, row in enumerate(x) for h in row} for x in (kept, best))
    assert len(chosen) == 4 and len(chosen & wanted) >= 3


def test_probabilities_are_probabilities():
    """P(open), about: between 0 and 1, adding up to K, more for a larger logit."""
    state = PruningState([4, 3], 7, open_count=3)
    pruner = build_method(PruneConfig(method="subset", keep=3 / 7), 1, state)
    for values in ([2.0] * 7, [3.0, 0.0, 0.0, -1.0, 0.0, 0.5, -2.0], [9.0, 1, 0, -5, 0, 2, -7]):
        p = pruner.probabilities(list(torch.tensor(values).split([4, 3])))
        flat = [x for row in p for x in row]
        assert sum(flat) == pytest.approx(3, abs=1e-3)
        order = np.argsort(values, kind="stable")
        assert (np.diff(np.array(flat)[order]) > -1e-9).all()
        assert all(-1e-6 <= x <= 1 + 1e-3 for x in flat), flat


@scopes
def test_heads_that_nothing_is_known_of_are_undecided(scope):
    """With few of many to keep, a head that is as good as any is open seldom; it stays for now."""
    state = PruningState([12, 12], 24, closed_checks=[[0] * 12, [0] * 12], open_count=2)
    config = PruneConfig(method="subset", keep=2 / 24, scope=scope, patience=1)
    pruner = build_method(config, 1, state)
    same = [torch.full((12,), 2.0)] * 2
    assert pruner.check_closed(same) == [list(range(12))] * 2
    assert pruner.final(same)[1]["undecided"] > 0


# Noise


@pytest.mark.parametrize("name", ["hard_concrete", "subset"])
def test_noise_of_a_sequence_is_a_function_of_its_lane(tiny_model, name):
    """However lanes are split among ranks and micro-batches; every lane has its own."""
    model = tiny_model(**UNEVEN).float()

    def noise(step: int, lanes: range, seed: int = 1) -> Tensor:
        pruner = method(model, name, seed, noise="sequence")
        pruner.draw(model, step, lanes=lanes)
        if name == "subset":
            return model.gate_pool.uniform
        return torch.cat([gate.uniform for gate in gates(model)], -1)

    whole = noise(7, range(6))
    assert whole.shape == (6, 8)
    for split in ([(0, 3), (3, 6)], [(0, 2), (2, 4), (4, 6)], [(i, i + 1) for i in range(6)]):
        parts = [noise(7, range(first, last)) for first, last in split]
        assert torch.equal(torch.cat(parts), whole)
    flat = whole.flatten().tolist()
    assert len(set(flat)) == 48 and 0 < min(flat) < 0.25 and 0.75 < max(flat) < 1
    others = [noise(8, range(6)), noise(7, range(6), seed=2)]
    assert all(not torch.isin(other, whole).any() for other in others)


@noises
@pytest.mark.parametrize("name", ["hard_concrete", "subset"])
def test_a_heads_noise_stays_its_own_when_others_have_gone(tiny_model, name, noise):
    def draw(model: TransformerLM, ids: list[list[int]] | None) -> Tensor:
        pruner = method(model, name, noise=noise)
        pruner.draw(model, 4, lanes=range(2, 4), head_ids=ids, first_heads=[3, 2, 5])
        if name == "subset":
            return model.gate_pool.uniform
        return torch.cat([gate.uniform for gate in gates(model)], -1)

    whole = draw(tiny_model(n_layers=3, n_heads=[3, 2, 5], d_head=2), None)
    ids = [[0, 2], [], [1, 3, 4]]
    some = draw(tiny_model(n_layers=3, n_heads=[2, 0, 3], d_head=2), ids)
    assert torch.equal(some, whole[..., [0, 2, 5 + 1, 5 + 3, 5 + 4]])


def test_noise_of_a_sequence_is_uniform_and_independent(tiny_model):
    model = tiny_model(n_layers=2, n_heads=2, d_head=2)
    pruner = method(model, "hard_concrete", noise="sequence")
    pruner.draw(model, 0, lanes=range(4000))
    u = torch.cat([gate.uniform for gate in gates(model)], -1).double()
    for low in np.arange(0, 1, 0.1):
        share = ((u >= low) & (u < low + 0.1)).double().mean()
        assert abs(float(share) - 0.1) < 4 * math.sqrt(0.09 / u.numel())
    correlation = torch.corrcoef(u.T) - torch.eye(4)
    assert correlation.abs().max() < 4 / math.sqrt(4000)
    assert abs(float(torch.corrcoef(torch.stack([u[:-1, 0], u[1:, 0]]))[0, 1])) < 4 / 63


@pytest.mark.parametrize("attention", ["fused", "reference"])
@pytest.mark.parametrize("name", ["hard_concrete", "subset"])
def test_gates_of_each_sequence_act_on_it_alone(tiny_model, name, attention):
    """A batch with a draw for every sequence = its sequences one by one; gradients add up."""
    model = tiny_model(n_heads=4, attention=attention).train()
    pruner = method(model, name, noise="sequence")
    ids, targets = torch.randint(11, (2, 3, 4))

    def run(lanes: range) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        pruner.draw(model, 1, lanes=lanes)
        rows = slice(lanes.start, lanes.stop)
        nll = model(ids[rows], targets[rows]).nll
        nll.sum().backward()
        return nll.detach(), torch.cat([gate.log_alpha.grad for gate in gates(model)])

    whole, gradient = run(range(3))
    alone = [run(range(lane, lane + 1)) for lane in range(3)]
    # the gates are float32
    torch.testing.assert_close(whole, torch.cat([n for n, _ in alone]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, sum(g for _, g in alone), rtol=1e-4, atol=1e-6)
    assert gradient.abs().sum() > 0


# Hard concrete: scope, min_heads, warnings


def test_scope_layer_prices_each_layer(tiny_model):
    model = tiny_model(**UNEVEN).float()
    pruner = method(model, "hard_concrete", keep=0.5, scope="layer", warmup_steps=2)
    model.eval()
    assert len(pruner.state.multipliers) == 3
    pruner.state.multipliers = [[0.3, 2.0], [9.0, 9.0], [-0.4, 5.0]]
    values = torch.tensor([1.0, -0.5, 0.2, 0.0, 3.0, -1.0, -3.0, 0.7])
    set_logits(model, values)
    drawn(model)
    p = open_probability(values.double())
    expected = [float(p[:3].sum()), 0.0, float(p[3:].sum())]
    quotas = apportion(4, [3, 0, 5], 0)
    for stage_step, done in ((0, 0.5), (1, 1.0), (9, 1.0)):
        goals = [s + (q - s) * done for s, q in zip([3, 0, 5], quotas, strict=True)]
        sizes = [3, 1, 5]  # each layer's own; 1 where there is none
        gaps = [(e - g) / n for e, g, n in zip(expected, goals, sizes, strict=True)]
        term, logged = pruner.objective(model, stage_step)
        pairs = zip(pruner.state.multipliers, gaps, strict=True)
        wanted = sum(a * gap + b * gap**2 for (a, b), gap in pairs)
        assert float(term.detach()) == pytest.approx(wanted, rel=1e-5)
        assert logged["target_heads"] == pytest.approx(sum(goals))
        before = [list(pair) for pair in pruner.state.multipliers]
        pruner.after_step(logged, stage_step)
        for was, now, gap in zip(before, pruner.state.multipliers, gaps, strict=True):
            assert now == pytest.approx([was[0] + 0.1 * gap, was[1] + 0.1 * gap**2], rel=1e-5)


def test_the_lagrangian_drives_every_layer_to_its_share(tiny_model):
    """One layer is worth more than the other; with `scope: layer` both end at half."""
    model = tiny_model(n_layers=2, n_heads=8, d_head=2).float().train()
    pruner = method(
        model, "hard_concrete", keep=0.5, scope="layer", warmup_steps=100, output_scaling=False
    )
    worth = [torch.linspace(1, 2, 8), torch.linspace(0, 1, 8)]
    optimizer = torch.optim.Adam([gate.log_alpha for gate in gates(model)], lr=0.05)
    for step in range(600):
        pruner.draw(model, step)
        loss = -0.02 * sum((g() * w).sum() for g, w in zip(gates(model), worth, strict=True))
        term, logged = pruner.objective(model, step)
        optimizer.zero_grad()
        (loss + term).backward()
        optimizer.step()
        pruner.after_step(logged, step)
    assert logged["expected_by_layer"] == pytest.approx([4, 4], abs=0.8)


@scopes
@pytest.mark.parametrize("name", ["hard_concrete", "subset"])
@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum),
    share=st.floats(0, 1),
    min_heads=st.integers(0, 2),
    data=st.data(),
)
def test_exactly_k_stay_for_learned_gates(name, scope, sizes, share, min_heads, data):
    """Of ties too; with a target that min_heads allows."""
    least = sum(min(min_heads, n) for n in sizes)
    k = least + round(share * (sum(sizes) - least))
    rows = [
        data.draw(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 3.0]), min_size=n, max_size=n))
        for n in sizes
    ]
    state = PruningState(list(sizes), sum(sizes), target=k, open_count=k)
    config = PruneConfig(method=name, keep=0.5, scope=scope, min_heads=min_heads)
    found = [torch.tensor(row) if row else None for row in rows]
    kept, readiness = build_method(config, 1, state).final(found)
    assert kept == select(rows, k, scope, min_heads) and sum(map(len, kept)) == k
    assert all(0 <= readiness[key] <= sum(sizes) for key in ("undecided", "cut_open"))


def test_a_penalty_keeps_min_heads_too():
    state = PruningState([3, 0, 2], 5)
    pruner = build_method(PruneConfig(penalty=1.0, min_heads=2), 1, state)
    kept, _ = pruner.final([torch.tensor([-5.0, 3.0, -4.0]), None, torch.tensor([-6.0, -7.0])])
    assert kept == [[1, 2], [], [0, 1]]


def test_early_removal_leaves_what_evaluation_uses():
    """While subset still has more open than it will keep, a head can be seldom drawn and open."""
    state = PruningState([8], 8, target=2, closed_checks=[[0] * 8], open_count=6)
    pruner = build_method(PruneConfig(method="subset", keep=0.25, patience=1), 1, state)
    values = [torch.tensor([9.0, 8.5, 8.0, 7.5, 7.0, -3.0, -3.01, -3.02])]
    assert pruner.open_now(values) == [list(range(6))]
    assert pruner.probabilities(values)[0][5] < pruner.closed_below
    assert pruner.check_closed(values) == [list(range(6))]


@pytest.mark.parametrize("name", ["hard_concrete", "subset"])
@scopes
def test_early_removal_never_takes_what_the_end_would_keep(name, scope):
    """Checks of random gates, removal after removal, then exactly K with min_heads in each."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        sizes = [4, 6, 2]
        state = PruningState(
            list(sizes), 12, target=5, closed_checks=[[0] * n for n in sizes], open_count=5
        )
        config = PruneConfig(method=name, keep=0.5, scope=scope, min_heads=1, patience=2)
        pruner = build_method(config, 1, state)
        values = [torch.randn(n, generator=generator) * 6 for n in sizes]
        n_before = 12
        for _ in range(4):
            kept = pruner.check_closed(values)
            values = [v[heads] for v, heads in zip(values, kept, strict=True)]
            pruner.removed(kept)
            n_left = sum(map(len, kept))
            assert 5 <= n_left <= n_before and all(map(len, kept))
            n_before = n_left
            final, _ = pruner.final(values)
            assert sum(map(len, final)) == 5 and all(map(len, final))
        assert n_before < 12, seed


WARNINGS = [
    # log_alpha, what the objective logged, at the end, a word of each warning
    ([2.0, 2.0], {}, False, []),
    ([2.0, 2.0], {}, True, ["did not move"]),
    ([2.0, 2.0005], {}, True, ["did not move"]),
    ([2.0, 2.5], {}, True, []),
    ([-4.0, -3.0], {}, False, ["about to close"]),
    ([-4.0, 1.0], {}, False, []),
    ([-4.0, 3.0], {"expected_heads": 1.2}, True, []),
    ([-4.0, 3.0], {"expected_heads": 1.9}, True, ["far from it"]),
    ([-4.0, 3.0], {"expected_heads": 0.2}, True, ["far from it"]),
    ([-4.0, 3.0], {"expected_heads": 1.9}, False, []),
]


@pytest.mark.parametrize(("values", "logged", "at_end", "words"), WARNINGS)
def test_warnings_of_hard_concrete(values, logged, at_end, words):
    state = PruningState([1, 1], 2, target=1)
    pruner = build_method(PruneConfig(keep=0.5), 1, state)
    found = pruner.warnings([torch.tensor([v]) for v in values], logged, at_end)
    assert len(found) == len(words)
    assert all(word in text and "\n" not in text for word, text in zip(words, found, strict=True))


def test_warnings_of_other_methods():
    state = PruningState([1, 1], 2, target=1, open_count=1, open_heads=[[0], []])
    still = [torch.tensor([2.0])] * 2
    moved = [torch.tensor([1.0]), torch.tensor([3.0])]
    pruner = build_method(PruneConfig(method="subset", keep=0.5), 1, state)
    assert len(pruner.warnings(still, {}, True)) == 1 and not pruner.warnings(still, {}, False)
    assert not pruner.warnings(moved, {}, True)
    pruner = build_method(PruneConfig(method="magnitude", keep=0.5), 1, state)
    assert pruner.warnings([None, None], {}, True) == []


def test_closing_everything_on_purpose_is_no_collapse():
    pruner = build_method(PruneConfig(keep=0.0), 1, PruningState([1, 1], 2, target=0))
    assert not pruner.warnings([torch.tensor([-4.0])] * 2, {"expected_heads": 0.1}, True)


# Methods that score


def scored(sizes: list[int], k: int, **values) -> Scored:
    open_heads = [list(range(n)) for n in sizes]
    checks = [[0] * n for n in sizes]
    state = PruningState(
        list(sizes), sum(sizes), target=k, open_heads=open_heads, closed_checks=checks
    )
    return build_method(PruneConfig(method="magnitude", keep=0.5, **values), 1, state)


@scopes
@settings(max_examples=100)
@given(
    n_layers=st.integers(1, 4),
    n=st.integers(1, 4),
    falls=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    min_heads=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_cuts_leave_exactly_k_and_never_reopen(scope, n_layers, n, falls, min_heads, seed):
    sizes = [n] * n_layers
    least = min_heads * n_layers
    targets = sorted((least + round(f * (sum(sizes) - least)) for f in falls), reverse=True)
    pruner = scored(sizes, targets[-1], scope=scope, min_heads=min_heads)
    rng = np.random.default_rng(seed)
    before = [list(range(n)) for _ in sizes]
    for k in targets:
        scores = rng.uniform(size=(n_layers, n)).round(1).tolist()
        now = [list(heads) for heads in pruner.cut(scores, k)]
        assert sum(map(len, now)) == k
        assert all(set(b) <= set(a) for a, b in zip(before, now, strict=True))
        if scope == "global":
            open_scores = [
                [row[h] for h in heads] for row, heads in zip(scores, before, strict=True)
            ]
            best = select(open_scores, k, "global", min_heads)
            wanted = [[heads[i] for i in row] for heads, row in zip(before, best, strict=True)]
            assert now == wanted
        else:
            assert list(map(len, now)) == apportion(k, sizes, min_heads)
        before = now


def test_layers_of_unequal_size_lose_heads_and_never_gain_any():
    """Quotas by largest remainder can rise as the whole falls (11 of [6, 6, 2] are [5, 5, 1], 10
    are [4, 4, 2]); a head that was cut cannot come back, and still exactly K must stay.
    """
    for sizes in ([6, 6, 2], [5, 3, 2, 1], [7, 5, 3]):
        pruner = scored(sizes, 1, scope="layer")
        for k in range(sum(sizes) - 1, 0, -1):
            kept = pruner.cut([[float(-h) for h in range(n)] for n in sizes], k)
            assert sum(map(len, kept)) == k, (sizes, k)


CUTS = [
    # values, stage's steps, (heads open after each step it is asked about)
    ({}, 4, {0: 4}),
    ({"every": 2, "schedule": "linear"}, 4, {2: 6, 4: 4}),
    ({"every": 3, "schedule": "linear"}, 4, {3: 5, 4: 4}),
    ({"every": 1, "schedule": "cubic"}, 4, {1: 6, 2: 5, 3: 4}),  # 5.69, 4.5, 4.06
    ({"every": 2, "schedule": "linear", "warmup_steps": 2}, 6, {2: 4}),
    ({"every": 9}, 4, {4: 4}),
]


@pytest.mark.parametrize(("values", "steps", "table"), CUTS)
def test_when_cuts_are_due(values, steps, table):
    pruner = scored([4, 4], 4, **values)
    due = {}
    for step in range(steps + 1):
        k = pruner.cut_due(step, steps)
        if k is not None:
            due[step] = k
            pruner.cut([[1.0, 2.0, 3.0, 4.0]] * 2, k)
    assert due == table


@pytest.mark.parametrize("schedule", ["linear", "cubic"])
def test_a_stage_shorter_than_its_schedule_still_ends_at_the_target(schedule):
    pruner = scored([4, 4], 2, every=2, schedule=schedule, warmup_steps=20)
    for step in range(7):
        k = pruner.cut_due(step, 6)
        if k is not None:
            pruner.cut([[1.0, 2.0, 3.0, 4.0]] * 2, k)
    kept, _ = pruner.final([None, None])
    assert sum(map(len, kept)) == 2


@pytest.mark.parametrize("output_scaling", [False, True])
def test_masks_show_what_was_cut(tiny_model, output_scaling):
    model = tiny_model(**UNEVEN)
    pruner = method(model, "magnitude", output_scaling=output_scaling)
    assert [gate().tolist() for gate in gates(model)] == [[1] * 3, [1] * 5]
    pruner.cut([[3.0, 1.0, 2.0], [], [9.0, 0.0, 8.0, 0.1, 0.2]], 4)
    pruner.show(model)
    scale = (1.5, 2.5) if output_scaling else (1.0, 1.0)
    a, b = (gate().tolist() for gate in gates(model))
    assert a == pytest.approx([scale[0], 0, scale[0]])
    assert b == pytest.approx([scale[1], 0, scale[1], 0, 0])
    assert pruner.check_closed([None] * 3) == [[0, 2], [], [0, 2]]
    pruner.removed([[0, 2], [], [0, 2]])
    assert pruner.state.open_heads == [[0, 1], [], [0, 1]]
    assert pruner.state.closed_checks == [[0, 0], [], [0, 0]]
    smaller = tiny_model(n_layers=3, n_heads=[2, 0, 2], d_head=2)
    pruner.attach(smaller)  # what is left has the scale it had
    assert [gate().tolist() for gate in gates(smaller)] == [
        pytest.approx([s, s]) for s in (scale if output_scaling else (1.0, 1.0))
    ]


# All of them


@pytest.mark.parametrize("name", METHODS)
def test_the_state_survives_json(tiny_model, name):
    model = tiny_model(**UNEVEN)
    pruner = method(model, name, scope="layer", output_scaling=False)
    saved = json.loads(json.dumps(dataclasses.asdict(pruner.state)))
    assert PruningState(**saved) == pruner.state
    again = build_method(pruner.config, 1, PruningState(**saved))
    found = logits(model) if pruner.learns else [None] * 3
    assert again.open_now(found) == pruner.open_now(found)


@pytest.mark.parametrize("name", ["importance", "magnitude"])
@scopes
def test_heads_that_do_nothing_go_first_and_the_one_that_matters_last(tiny_model, name, scope):
    """Planted, through scores; learned gates see it in tests/training/test_methods_in_run.py."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(11, (2, 3, 4), generator=generator)
    useless = {(0, 0), (0, 3), (1, 1), (1, 2)} if scope == "layer" else {(0, 0), (0, 3), (0, 1)}

    def kept_by(keep: float, dead: set[tuple[int, int]], how: str) -> set[tuple[int, int]]:
        model = tiny_model(n_heads=4)
        with torch.no_grad():
            for layer, head in dead:
                model.layers[layer].attention.output.weight[:, head * 3 : head * 3 + 3] = 0
        pruner = method(model, name, keep=keep, scope=how)
        streams = [[(ids[0], ids[1])]]
        scores = head_scores(pruner.config, model, lambda: streams, [1])
        kept = pruner.cut(scores, round(keep * 8))
        return {(layer, h) for layer, heads in enumerate(kept) for h in heads}

    everyone = set(itertools.product(range(2), range(4)))
    assert kept_by(1 - len(useless) / 8, useless, scope) == everyone - useless
    if scope == "global":
        for last in ((0, 2), (1, 3)):
            assert kept_by(1 / 8, everyone - {last}, scope) == {last}
