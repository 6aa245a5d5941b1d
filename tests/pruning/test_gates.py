"""Hard-concrete gates: closed forms against sampling, gradients by differences, exact counts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from allattn.config import PruneConfig
from allattn.model.transformer import TransformerLM
from allattn.pruning.gates import (
    HardConcreteGate,
    gates,
    hard_concrete,
    log_alphas,
    open_probability,
)
from allattn.pruning.methods import HardConcrete, PruningState

LEVELS = torch.tensor([-4.0, -2.5, -1.0, -0.3, 0.0, 0.7, 2.0, 3.5], dtype=torch.float64)


def method(model: TransformerLM, seed: int = 1, **values) -> HardConcrete:
    """Attached to the model, a run that starts with pruning."""
    values = {"keep": 0.5, **values} if "penalty" not in values else values
    heads = model.config.heads
    made = HardConcrete(PruneConfig(**values), seed, PruningState(list(heads), sum(heads)))
    made.attach(model)
    return made


# The distribution


def by_hand(log_alpha: float, u: float) -> float:
    """Louizos et al. 2018: beta 2/3 there, 1/3 in Voita et al. and Shim et al.; -0.1 and 1.1."""
    s = 1 / (1 + math.exp(-(math.log(u) - math.log(1 - u) + log_alpha) / (1 / 3)))
    return min(1.0, max(0.0, s * 1.2 - 0.1))


def test_a_draw_by_hand():
    for log_alpha in (-3.0, -0.5, 0.0, 1.5):
        uniform = torch.linspace(0.001, 0.999, 97, dtype=torch.float64)
        got = hard_concrete(torch.tensor(log_alpha, dtype=torch.float64), uniform)
        expected = [by_hand(log_alpha, u) for u in uniform.tolist()]
        np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-12)


def test_open_probability_is_what_draws_give():
    n = 200_000
    uniform = torch.rand(n, 1, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    draws = hard_concrete(LEVELS, uniform)
    p = open_probability(LEVELS)
    sigma = (p * (1 - p) / n).sqrt()
    assert (((draws > 0).double().mean(0) - p).abs() < 4 * sigma).all()
    # P(gate = 1), from the same equations: s > (1 - low) / (high - low) = 11/12
    whole = torch.sigmoid(LEVELS - math.log(11) / 3)
    sigma = (whole * (1 - whole) / n).sqrt()
    assert (((draws == 1).double().mean(0) - whole).abs() < 4 * sigma).all()


def test_expected_count_is_what_the_methods_draws_give(tiny_model):
    model = tiny_model(n_layers=3, n_heads=[3, 0, 4], d_head=2)
    pruner = method(model, output_scaling=False)
    with torch.no_grad():
        for gate in gates(model):
            gate.log_alpha.copy_(torch.linspace(-2, 1, gate.log_alpha.numel()))
    model.train()
    n = 2000
    counts = torch.zeros(n)
    for step in range(n):
        pruner.draw(model, step)
        counts[step] = sum(int((gate() > 0).sum()) for gate in gates(model))
    _, logged = pruner.objective(model, 0)
    p = torch.cat([open_probability(gate.log_alpha.detach()) for gate in gates(model)])
    assert logged["expected_heads"] == pytest.approx(float(p.sum()), rel=1e-6)
    sigma = float((p * (1 - p)).sum() / n) ** 0.5
    assert abs(float(counts.mean()) - logged["expected_heads"]) < 4 * sigma
    # every head by itself, and no two of them together: the draws are independent
    assert float(counts.var()) == pytest.approx(float((p * (1 - p)).sum()), rel=0.1)


def test_gate_init_starts_almost_surely_open():
    gate = HardConcreteGate(5, 5, PruneConfig(keep=0.5))
    assert (open_probability(gate.log_alpha) > 0.94).all()
    assert (gate.log_alpha == PruneConfig().gate_init).all()
    assert (HardConcreteGate(2, 2, PruneConfig(gate_init=-1.5)).log_alpha == -1.5).all()


# Gradients


def gate_with(log_alpha: Tensor, uniform: Tensor, **values) -> HardConcreteGate:
    gate = HardConcreteGate(len(log_alpha), len(log_alpha), PruneConfig(keep=0.5, **values))
    gate.double().train()
    with torch.no_grad():
        gate.log_alpha.copy_(log_alpha)
    gate.uniform = uniform
    return gate


def differences(gate: HardConcreteGate, weights: Tensor, eps: float = 1e-6) -> Tensor:
    """d (weights . gate) / d log_alpha, the number of open heads held fixed."""
    out = torch.zeros_like(weights)
    with torch.no_grad():
        for h in range(len(weights)):
            ends = []
            for sign in (1, -1):
                moved = gate.log_alpha.clone()
                moved[h] += sign * eps
                ends.append((hard_concrete(moved, gate.uniform) * weights).sum())
            out[h] = (ends[0] - ends[1]) / (2 * eps)
    return out


def test_soft_gradient_by_differences():
    uniform = torch.rand(8, dtype=torch.float64) * 0.9 + 0.05
    gate = gate_with(LEVELS, uniform, output_scaling=False)
    weights = torch.randn(8, dtype=torch.float64)
    (gate() * weights).sum().backward()
    assert 2 <= (gate.log_alpha.grad != 0).sum() <= 7  # some at the ends, where it is flat
    torch.testing.assert_close(gate.log_alpha.grad, differences(gate, weights), rtol=0, atol=1e-7)


def test_gradcheck_of_the_draw_and_of_the_closed_form():
    inner = torch.tensor([-1.0, 0.0, 0.3], dtype=torch.float64, requires_grad=True)
    uniform = torch.tensor([0.7, 0.5, 0.4], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a: hard_concrete(a, uniform), (inner,))
    assert torch.autograd.gradcheck(open_probability, (inner,))


@pytest.mark.parametrize("output_scaling", [False, True])
def test_straight_through(output_scaling):
    """Forward 0 or 1, backward as if it had been the soft value."""
    uniform = torch.tensor([0.5, 0.1, 0.6, 0.5, 0.9, 0.02, 0.5, 0.5], dtype=torch.float64)
    values = {"sampling": "straight_through", "output_scaling": output_scaling}
    gate = gate_with(LEVELS, uniform, **values)
    weights = torch.randn(8, dtype=torch.float64)
    out = gate()
    is_open = (hard_concrete(LEVELS, uniform) > 0).double()
    n_open = int(is_open.sum())
    assert 1 < n_open < 8
    scale = 8 / n_open if output_scaling else 1.0
    torch.testing.assert_close(out.detach(), is_open * scale, rtol=1e-6, atol=0)
    (out * weights).sum().backward()
    expected = differences(gate, weights) * scale
    torch.testing.assert_close(gate.log_alpha.grad, expected, rtol=0, atol=1e-6)


# Output scaling


def test_output_scaling_multiplies_by_heads_over_open_heads_without_gradient():
    uniform = torch.tensor([0.5, 0.1, 0.6, 0.5, 0.9, 0.02, 0.5, 0.5], dtype=torch.float64)
    plain, scaled = (gate_with(LEVELS, uniform, output_scaling=on) for on in (False, True))
    scaled.initial_heads = 12  # some heads of the layer were removed before
    n_open = int((plain() > 0).sum())
    assert 0 < n_open < 8
    torch.testing.assert_close(scaled(), plain() * 12 / n_open, rtol=1e-6, atol=0)
    weights = torch.randn(8, dtype=torch.float64)
    for gate in (plain, scaled):
        (gate() * weights).sum().backward()
    expected = plain.log_alpha.grad * 12 / n_open
    torch.testing.assert_close(scaled.log_alpha.grad, expected, rtol=1e-6, atol=1e-12)


def test_no_open_head_is_no_division_by_zero():
    gate = gate_with(LEVELS - 9, torch.full((8,), 0.5, dtype=torch.float64))
    assert torch.equal(gate(), torch.zeros(8, dtype=torch.float64))
    gate.eval()
    assert torch.equal(gate(), torch.zeros(8, dtype=torch.float64))


def test_evaluation_is_binary_and_needs_no_draw():
    gate = gate_with(LEVELS, torch.rand(8)).eval()
    gate.uniform = None
    is_open = open_probability(LEVELS) > 0.5
    scale = 8 / int(is_open.sum())
    torch.testing.assert_close(gate(), is_open.double() * scale, rtol=1e-6, atol=0)
    assert torch.equal(gate(), gate())


def test_output_scales_fold_what_the_gate_did(tiny_model):
    pruner = method(tiny_model(n_layers=3, n_heads=[4, 2, 1]), keep=0.5)
    assert pruner.output_scales([[0, 2, 3], [], [0]]) == [4 / 3, 1.0, 1.0]
    pruner.config = PruneConfig(keep=0.5, output_scaling=False)
    assert pruner.output_scales([[0, 2, 3], [], [0]]) == [1.0, 1.0, 1.0]


# The draw


def draws_of(pruner: HardConcrete, model: TransformerLM, step: int) -> list[list[float]]:
    pruner.draw(model, step)
    return [gate.uniform.tolist() for gate in gates(model)]


def test_a_draw_is_a_function_of_seed_and_step(tiny_model):
    model = tiny_model(n_layers=3, n_heads=[3, 0, 3], d_head=2)
    first = draws_of(method(model, seed=5), model, 7)
    torch.manual_seed(99)
    np.random.seed(99)
    other = tiny_model(n_layers=3, n_heads=[3, 0, 3], d_head=2)
    assert draws_of(method(other, seed=5), other, 7) == first
    assert draws_of(method(model, seed=5), model, 8) != first
    assert draws_of(method(model, seed=6), model, 7) != first
    assert first[0] != first[1]  # layers do not share theirs
    assert all(0 < u < 1 for row in first for u in row)


def test_a_draw_leaves_torchs_generator_alone(tiny_model):
    model = tiny_model()
    pruner = method(model)
    before = torch.get_rng_state()
    pruner.draw(model, 3)
    assert torch.equal(torch.get_rng_state(), before)


# The objective


def test_penalty_is_weight_times_expected_heads_and_warms_up(tiny_model):
    model = tiny_model(n_layers=3, n_heads=[2, 0, 3], d_head=2)
    pruner = method(model, penalty=0.3, warmup_steps=4)
    model.eval()
    expected = sum(float(open_probability(g.log_alpha.detach()).sum()) for g in gates(model))
    for gate in gates(model):
        gate()
    for step, share in enumerate([0.25, 0.5, 0.75, 1, 1]):
        term, logged = pruner.objective(model, step)
        assert float(term.detach()) == pytest.approx(0.3 * share * expected, rel=1e-6)
        assert logged["penalty"] == float(term.detach())
        assert logged["penalty_weight"] == pytest.approx(0.3 * share)
        assert logged["expected_heads"] == pytest.approx(expected, rel=1e-6)
    before = [list(pair) for pair in pruner.state.multipliers]
    pruner.after_step({"expected_by_layer": [2.0, 0.0, 3.0]}, 3)
    assert pruner.state.multipliers == before  # a fixed penalty stays what it is


def test_objective_has_the_gradient_of_its_equation(tiny_model):
    model = tiny_model(n_layers=2, n_heads=[2, 3], d_head=2)
    pruner = method(model, keep=0.4)
    model.eval()
    pruner.state.multipliers = [[0.7, 3.0]]
    log_alpha = torch.tensor([1.0, -0.5, 0.2, -2.0, 3.0], dtype=torch.float64)
    with torch.no_grad():
        for gate, value in zip(gates(model), log_alpha.split([2, 3]), strict=True):
            gate.log_alpha.copy_(value)
    for gate in gates(model):
        gate()
    term, logged = pruner.objective(model, 0)
    gap = float(open_probability(log_alpha).sum()) / 5 - 0.4
    assert float(term.detach()) == pytest.approx(0.7 * gap + 3.0 * gap**2, rel=1e-5)
    assert logged["target_heads"] == pytest.approx(2.0)
    term.backward()
    p = open_probability(log_alpha)
    expected = (0.7 + 2 * 3.0 * gap) / 5 * p * (1 - p)
    got = torch.cat([gate.log_alpha.grad for gate in gates(model)]).double()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


def test_target_falls_along_a_line_from_where_the_stage_began(tiny_model):
    model = tiny_model(n_layers=2, n_heads=[2, 1], d_head=2)
    state = PruningState([2, 1], run_heads=6)  # an earlier stage left half
    pruner = HardConcrete(PruneConfig(keep=0.25, warmup_steps=4), 1, state)
    pruner.attach(model)
    model.eval()
    for gate in gates(model):
        gate()
    targets = [pruner.objective(model, step)[1]["target_heads"] for step in range(6)]
    # a quarter of 6 heads is 1.5, and 2 is what will be left
    assert targets == pytest.approx([2.75, 2.5, 2.25, 2, 2, 2])


def test_multipliers_climb_while_too_many_are_open_and_fall_after(tiny_model):
    pruner = method(tiny_model(n_layers=2, n_heads=4, d_head=2), keep=0.5, lagrangian_lr=0.5)
    ((linear, quadratic),) = [list(pair) for pair in pruner.state.multipliers]
    pruner.after_step({"expected_by_layer": [2.0, 4.0]}, 0)  # 6 of 8 are a quarter too many
    assert pruner.state.multipliers[0] == pytest.approx([linear + 0.125, quadratic + 0.5 / 16])
    pruner.after_step({"expected_by_layer": [1.0, 1.0]}, 0)
    assert pruner.state.multipliers[0] == pytest.approx([linear, quadratic + 0.5 / 8])


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
def test_the_lagrangian_drives_gates_to_the_target(tiny_model, keep):
    """Sixteen heads, of which each is worth something else to a toy loss; the worthier stay."""
    model = tiny_model(n_layers=2, n_heads=8, d_head=2).train()
    pruner = method(model, keep=keep, warmup_steps=100, output_scaling=False)
    worth = torch.rand(16, generator=torch.Generator().manual_seed(0)).split(8)
    optimizer = torch.optim.Adam([gate.log_alpha for gate in gates(model)], lr=0.05)
    for step in range(500):
        pruner.draw(model, step)
        pairs = zip(gates(model), worth, strict=True)
        loss = -0.05 * sum((gate() * w).sum() for gate, w in pairs)
        term, logged = pruner.objective(model, step)
        optimizer.zero_grad()
        (loss + term).backward()
        optimizer.step()
        pruner.after_step(logged, step)
    assert logged["expected_heads"] == pytest.approx(keep * 16, abs=0.8)
    log_alpha = [gate.log_alpha.detach() for gate in gates(model)]
    kept, _ = pruner.final(log_alpha)
    chosen = {(layer, h) for layer, heads in enumerate(kept) for h in heads}
    ranked = sorted((float(worth[n][h]), (n, h)) for n in range(2) for h in range(8))
    best = {place for _, place in ranked[-len(chosen) :]}
    assert len(chosen) == keep * 16 and len(chosen & best) >= 0.75 * len(chosen)


# What stays


def best_heads(log_alpha: list[list[float] | None], k: int) -> list[list[int]]:
    """By a plain loop: take the largest, the first of equals, k times."""
    left = {
        (layer, h): value
        for layer, row in enumerate(log_alpha)
        for h, value in enumerate(row or [])
    }
    kept: list[list[int]] = [[] for _ in log_alpha]
    for _ in range(k):
        best = None
        for place in sorted(left):
            if best is None or left[place] > left[best]:
                best = place
        kept[best[0]].append(best[1])
        del left[best]
    return [sorted(heads) for heads in kept]


levels = st.one_of(st.none(), st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.5, 3.0]), max_size=5))


@settings(max_examples=200)
@given(rows=st.lists(levels, min_size=1, max_size=5), keep=st.floats(0, 1))
def test_exactly_k_stay(rows, keep):
    rows = [row or None for row in rows]
    total = sum(len(row or []) for row in rows)
    state = PruningState([len(row or []) for row in rows], total)
    log_alpha = [None if row is None else torch.tensor(row) for row in rows]
    kept, readiness = HardConcrete(PruneConfig(keep=keep), 1, state).final(log_alpha)
    k = math.floor(keep * total + 0.5)
    assert sum(map(len, kept)) == k
    assert kept == best_heads(rows, k)
    # of the levels, P(open) lies within 0.1 and 0.9 at -0.5, 0 and 0.5 only
    assert readiness["undecided"] == sum(-1 < value < 1 for row in rows for value in row or [])
    n_open = sum(value > -0.8 for row in rows for value in row or [])  # P(open) > 0.5
    assert readiness["cut_open"] == max(n_open - k, 0)


@pytest.mark.parametrize(("keep", "n"), [(0.0, 0), (1.0, 12), (0.5, 6), (0.3, 4)])
def test_exactly_k_of_random_logits(keep, n):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        log_alpha = [torch.randn(5, generator=generator), None, torch.randn(7, generator=generator)]
        state = PruningState([5, 0, 7], 12)
        kept, _ = HardConcrete(PruneConfig(keep=keep), 1, state).final(log_alpha)
        assert [len(kept[1]), sum(map(len, kept))] == [0, n]
        assert kept == best_heads([None if a is None else a.tolist() for a in log_alpha], n)


def test_keep_is_a_share_of_the_runs_first_heads():
    state = PruningState([2, 2], run_heads=8)  # half went in an earlier stage
    kept, _ = HardConcrete(PruneConfig(keep=0.25), 1, state).final([torch.ones(2)] * 2)
    assert kept == [[0, 1], []]


def test_a_penalty_keeps_what_is_open():
    log_alpha = [torch.tensor([3.0, -3.0, 0.1]), None, torch.tensor([-5.0, -5.0])]
    state = PruningState([3, 0, 2], 5)
    kept, readiness = HardConcrete(PruneConfig(penalty=0.1), 1, state).final(log_alpha)
    assert (kept, readiness) == ([[0, 2], [], []], {"undecided": 1, "cut_open": 0})


def test_early_removal_needs_patience_and_stops_at_the_target():
    closed, shut, opened = -4.0, -5.0, 2.0
    state = PruningState([3, 2], 5, closed_checks=[[0] * 3, [0] * 2])
    pruner = HardConcrete(PruneConfig(keep=0.4, patience=2), 1, state)
    assert float(open_probability(torch.tensor(closed))) < pruner.closed_below

    def check(*rows: list[float]) -> list[list[int]]:
        return pruner.check_closed([torch.tensor(row) if row else None for row in rows])

    everyone = [[0, 1, 2], [0, 1]]
    assert check([opened, closed, opened], [closed, opened]) == everyone  # the first time
    assert check([opened, closed, opened], [opened, opened]) == [[0, 2], [0, 1]]
    assert state.closed_checks == [[0, 2, 0], [0, 0]]  # one that opened again starts anew
    pruner.removed([[0, 2], [0, 1]])
    assert state.closed_checks == [[0, 0], [0, 0]]
    # all four are closed now, but the target is two: the surest go, the others stay
    check([closed, shut], [shut, closed])
    assert check([closed, shut], [shut, closed]) == [[0], [1]]


def test_early_removal_under_a_penalty_may_take_all():
    state = PruningState([2, 1], 3, closed_checks=[[0, 0], [0]])
    pruner = HardConcrete(PruneConfig(penalty=1.0, patience=1), 1, state)
    assert pruner.check_closed([torch.full((2,), -5.0), torch.full((1,), -5.0)]) == [[], []]


def test_the_state_survives_json(tiny_model):
    pruner = method(tiny_model(n_layers=2, n_heads=[2, 3], d_head=2))
    pruner.after_step({"expected_by_layer": [2.0, 2.0]}, 3)
    saved = dataclasses.asdict(pruner.state)
    assert PruningState(**saved) == pruner.state
    assert saved["closed_checks"] == [[0, 0], [0, 0, 0]]


def test_layers_without_heads_have_no_gate(tiny_model):
    model = tiny_model(n_layers=3, n_heads=[2, 0, 3], d_head=2)
    pruner = method(model)
    assert [len(gate.log_alpha) for gate in gates(model)] == [2, 3]
    found = log_alphas(dict(model.named_parameters()), 3)
    assert found[1] is None and [len(found[0]), len(found[2])] == [2, 3]
    assert pruner.open_now(found) == [[0, 1], [], [0, 1, 2]]


# Precision


@pytest.mark.parametrize("sampling", ["soft", "straight_through"])
def test_gates_are_float32_under_bfloat16_autocast(tiny_model, sampling):
    model = tiny_model().float().train()
    pruner = method(model, sampling=sampling)
    pruner.draw(model, 0)
    ids, targets = torch.randint(11, (2, 4)), torch.randint(11, (2, 4))
    seen = []
    for gate in gates(model):
        gate.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, targets).nll.mean()
        term, _ = pruner.objective(model, 0)
    (loss + term).backward()
    assert seen == [torch.float32] * 2
    for gate in gates(model):
        assert gate.open_probability.dtype == gate.log_alpha.dtype == torch.float32
        assert gate.log_alpha.grad.dtype == torch.float32 and gate.log_alpha.grad.abs().sum() > 0
    assert term.dtype == torch.float32
