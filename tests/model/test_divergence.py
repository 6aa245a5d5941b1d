"""Distillation's term: temperature^2 KL(teacher || student) against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor, nn

from allattn.model import adaptive
from allattn.model.adaptive import AdaptiveVocabulary, SoftTargets, TiedVocabulary

V, D = 23, 16
KINDS = ["tied", "one cluster", "adaptive", "narrowing"]
TEMPERATURES = [0.5, 1.0, 3.0]


def vocabulary(kind: str, d_model: int = D) -> TiedVocabulary | AdaptiveVocabulary:
    torch.set_default_dtype(torch.float64)
    cutoffs = {"one cluster": [], "adaptive": [5, 12], "narrowing": [5, 12]}
    if kind == "tied":
        made: nn.Module = TiedVocabulary(V, d_model)
    else:
        made = AdaptiveVocabulary(V, d_model, cutoffs[kind], 2 if kind == "narrowing" else 1)
    for p in made.parameters():
        nn.init.normal_(p, std=0.5)
    return made


def log_probs(made: nn.Module, h_D: np.ndarray) -> list[float]:
    """By the loops of the oracles."""
    weights = oracles.weights_of(made)
    if isinstance(made, TiedVocabulary):
        return oracles.log_softmax(list(weights["embedding"] @ h_D + weights["bias"]))
    return list(oracles.adaptive_log_probs(h_D, weights, made.edges))


def softened(row: list[float], temperature: float) -> list[float]:
    return oracles.log_softmax([x / temperature for x in row])


def kl(teacher: list[float], student: list[float], temperature: float) -> float:
    """Of one token."""
    p, q = softened(teacher, temperature), softened(student, temperature)
    terms = [math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)]
    return temperature**2 * math.fsum(terms)


def by_loops(student: nn.Module, h: Tensor, soft: SoftTargets) -> np.ndarray:
    rows = []
    for x, y in zip(h.flatten(0, 1), soft.h_BTD.flatten(0, 1), strict=True):
        pair = log_probs(soft.vocabulary, y.numpy()), log_probs(student, x.numpy())
        rows.append(kl(*pair, soft.temperature))
    return np.array(rows).reshape(h.shape[:2])


def explicit(student: nn.Module, h: Tensor, soft: SoftTargets) -> Tensor:
    """The same in torch's operations, whole and without a trick, for its gradient."""
    t = soft.temperature
    q = (student.log_probs(h).exp() ** (1 / t)).clone()
    p = (soft.vocabulary.log_probs(soft.h_BTD).exp() ** (1 / t)).detach()
    q, p = q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True)
    return t**2 * (p * (p.log() - q.log())).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_divergence_equals_loops(kind, temperature):
    student, teacher = vocabulary(kind), vocabulary(kind)
    h, soft = torch.randn(2, 3, D), SoftTargets(teacher, torch.randn(2, 3, D), temperature)
    got = student.divergence(h, soft).detach()
    expected = by_loops(student, h, soft)
    assert expected.min() > 1e-3
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10, atol=1e-12)


def test_the_teacher_may_have_another_width_and_another_vocabulary_layer():
    student, teacher = vocabulary("tied"), vocabulary("narrowing", 8)
    h, soft = torch.randn(1, 4, D), SoftTargets(teacher, torch.randn(1, 4, 8), 2.0)
    got = student.divergence(h, soft).detach().numpy()
    np.testing.assert_allclose(got, by_loops(student, h, soft), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gradients_are_those_of_the_explicit_form(kind, temperature):
    student, teacher = vocabulary(kind), vocabulary(kind)
    h = torch.randn(2, 3, D, requires_grad=True)
    soft_h = torch.randn(2, 3, D, requires_grad=True)
    soft, pull = SoftTargets(teacher, soft_h, temperature), torch.randn(2, 3)
    inputs = [h, *student.parameters()]
    wanted = torch.autograd.grad(
        (explicit(student, h, soft) * pull).sum(), inputs, allow_unused=True
    )
    (student.divergence(h, soft) * pull).sum().backward()
    for tensor, gradient in zip(inputs, wanted, strict=True):
        if gradient is None:  # the first cluster's projection serves the input alone
            assert tensor.grad is None or not tensor.grad.any()
            continue
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-8, atol=1e-11)
    assert soft_h.grad is None and all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("kind", ["tied", "narrowing"])
def test_some_tokens_at_a_time_are_all_tokens_together(kind, monkeypatch):
    student, teacher = vocabulary(kind), vocabulary(kind)
    soft = SoftTargets(teacher, torch.randn(3, 5, D), 2.0)
    found = []
    sizes = []
    whole = type(student)._divergence

    def watched(made, h, *rest):
        sizes.append(len(h))
        return whole(made, h, *rest)

    monkeypatch.setattr(type(student), "_divergence", watched)
    start, pull = torch.randn(3, 5, D), torch.randn(3, 5)
    for logits in (1 << 24, 4 * V * 4, 1):  # all at once, four tokens, one
        monkeypatch.setattr(adaptive, "_LOGITS", logits)
        sizes.clear()
        h = start.clone().requires_grad_()
        student.zero_grad()
        out = student.divergence(h, soft)
        forward = list(sizes)
        (out * pull).sum().backward()
        found.append((forward, out.detach(), h.grad, student.biases[0].grad.clone()
                      if kind != "tied" else student.bias.grad.clone()))  # fmt: skip
    assert [each[0] for each in found] == [[15], [4, 4, 4, 3], [1] * 15]
    for each in found[1:]:
        for a, b in zip(each[1:], found[0][1:], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_learn_from_oneself(kind):
    made = vocabulary(kind)
    h = torch.randn(2, 3, D, requires_grad=True)
    out = made.divergence(h, SoftTargets(made, h.detach().clone(), 1.5))
    out.sum().backward()
    assert out.abs().max() < 1e-12 and h.grad.abs().max() < 1e-12


def test_float32_at_least_under_bfloat16():
    made = vocabulary("tied").bfloat16()
    h = torch.randn(1, 2, D, dtype=torch.bfloat16)
    out = made.divergence(h, SoftTargets(made, h * 2, 1.0))
    assert out.dtype == torch.float32 and (out > 0).all()


@pytest.mark.parametrize("kind", ["tied", "adaptive"])
def test_a_model_gives_it_beside_the_loss(tiny_model, kind):
    values = {} if kind == "tied" else {"embedding": "adaptive", "cutoffs": [4, 8]}
    student, teacher = tiny_model(1, **values), tiny_model(2, **values)
    ids, targets = torch.randint(11, (2, 2, 4))
    with torch.no_grad():
        x, _ = teacher.hidden(ids, None, None)
        soft = SoftTargets(teacher.vocabulary, teacher.norm(x), 2.0)
        out = student(ids, targets, soft_targets=soft)
        rows = zip(
            teacher(ids).log_probs.flatten(0, 1), student(ids).log_probs.flatten(0, 1), strict=True
        )
        expected = [kl(p.tolist(), q.tolist(), 2.0) for p, q in rows]
        np.testing.assert_allclose(out.divergence.flatten().numpy(), expected, rtol=1e-9)
        plain = student(ids, targets)
    assert torch.equal(out.nll, plain.nll) and plain.divergence is None
