"""Token embeddings and output probabilities against loops."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor, nn

from allattn.model.adaptive import AdaptiveVocabulary, TiedVocabulary

V, D = 23, 16
EXACT = {"rtol": 0, "atol": 1e-10}
SHAPES = [([], 1), ([5], 1), ([5, 12], 1), ([5, 12], 4), ([5, 12], 2), ([1, 2, 22], 2), ([], 4)]
shapes = pytest.mark.parametrize(("cutoffs", "div_value"), SHAPES)


def fill(module: nn.Module) -> None:
    """Random values for every parameter."""
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)


def adaptive(cutoffs: list[int], div_value: int) -> AdaptiveVocabulary:
    torch.set_default_dtype(torch.float64)
    vocabulary = AdaptiveVocabulary(V, D, cutoffs, div_value)
    fill(vocabulary)
    return vocabulary


def tied() -> TiedVocabulary:
    torch.set_default_dtype(torch.float64)
    vocabulary = TiedVocabulary(V, D)
    fill(vocabulary)
    return vocabulary


@shapes
def test_adaptive_embedding_equals_loops(cutoffs, div_value):
    vocabulary = adaptive(cutoffs, div_value)
    ids = torch.stack([torch.randperm(V), torch.arange(V)])
    weights, edges = oracles.weights_of(vocabulary), [0, *cutoffs, V]
    for row, vectors in zip(ids.tolist(), vocabulary(ids).detach().numpy(), strict=True):
        wanted = [oracles.adaptive_embedding(token, weights, edges) for token in row]
        np.testing.assert_allclose(vectors, np.array(wanted), rtol=0, atol=1e-10)


@shapes
def test_adaptive_log_probs_equal_loops_and_sum_to_one(cutoffs, div_value):
    vocabulary = adaptive(cutoffs, div_value)
    h = torch.randn(2, 3, D)
    log_probs = vocabulary.log_probs(h)
    weights, edges = oracles.weights_of(vocabulary), [0, *cutoffs, V]
    wanted = [
        oracles.adaptive_log_probs(vector, weights, edges) for vector in h.view(-1, D).numpy()
    ]
    np.testing.assert_allclose(
        log_probs.detach().view(-1, V).numpy(), np.array(wanted), rtol=0, atol=1e-10
    )
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3), **EXACT)


@shapes
def test_adaptive_nll_is_minus_the_log_prob_of_the_target(cutoffs, div_value):
    vocabulary = adaptive(cutoffs, div_value)
    h = torch.randn(2, V, D)
    targets = torch.stack([torch.randperm(V), torch.arange(V)])  # each word, in two orders
    wanted = -vocabulary.log_probs(h).gather(2, targets[..., None]).squeeze(2)
    torch.testing.assert_close(vocabulary.nll(h, targets), wanted, **EXACT)


@shapes
def test_adaptive_nll_has_the_gradients_of_the_log_probs(cutoffs, div_value):
    vocabulary = adaptive(cutoffs, div_value)
    h = torch.randn(2, V, D, requires_grad=True)
    targets = torch.stack([torch.randperm(V), torch.arange(V)])
    pull = torch.randn(2, V)
    inputs = [h, *vocabulary.parameters()]
    through_all = -vocabulary.log_probs(h).gather(2, targets[..., None]).squeeze(2)
    wanted = torch.autograd.grad((through_all * pull).sum(), inputs, allow_unused=True)
    actual = torch.autograd.grad(
        (vocabulary.nll(h, targets) * pull).sum(), inputs, allow_unused=True
    )
    assert wanted[0].abs().sum() > 0
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("target", [0, 4, 5, 11, 12, 22])
def test_adaptive_nll_of_one_token_leaves_the_other_clusters_out(target):
    vocabulary = adaptive([5, 12], 2)
    h = torch.randn(1, 1, D)
    nll = vocabulary.nll(h, torch.tensor([[target]]))
    wanted = oracles.adaptive_log_probs(
        h[0, 0].numpy(), oracles.weights_of(vocabulary), [0, 5, 12, V]
    )
    assert nll.item() == pytest.approx(-wanted[target], abs=1e-10)
    nll.sum().backward()
    for c, (low, high) in enumerate([(0, 5), (5, 12), (12, V)]):
        touched = vocabulary.biases[c].grad is not None and vocabulary.biases[c].grad.any()
        assert bool(touched) == (c == 0 or low <= target < high)


def every_kind() -> list[tuple[str, nn.Module]]:
    return [
        ("tied", tied()),
        ("one cluster", adaptive([], 1)),
        ("adaptive", adaptive([5, 12], 1)),
        ("narrowing", adaptive([5, 12], 4)),
    ]


@shapes
def test_logits_are_log_probs_without_the_normalisers_and_linear(cutoffs, div_value):
    """Put together again they give the log-probabilities: in the head, and in each cluster."""
    vocabulary = adaptive(cutoffs, div_value)
    h = torch.randn(1, 2, D)
    every = torch.arange(V).expand(1, V)
    for place in range(2):
        same = h[:, place : place + 1].expand(1, V, D)
        logits = vocabulary.logits_of(same, every)[0]
        bounds = list(zip([0, *cutoffs], [*cutoffs, V], strict=True))
        # exp of a cluster's entry times the sum within the cluster is what its ids' logits add to
        entry = [
            vocabulary._head_logits(same[0, :1])[0, bounds[0][1] + c] for c in range(len(cutoffs))
        ]
        head = torch.stack([*logits[: bounds[0][1]], *entry]).logsumexp(0)
        wanted = [logits[: bounds[0][1]] - head]
        for (low, high), one in zip(bounds[1:], entry, strict=True):
            wanted.append(logits[low:high] - head - (logits[low:high] - one).logsumexp(0))
        torch.testing.assert_close(vocabulary.log_probs(same)[0, 0], torch.cat(wanted), **EXACT)
    a, b, zero = torch.randn(2, V, D), torch.randn(2, V, D), torch.zeros(2, V, D)
    ids = torch.stack([torch.randperm(V), torch.arange(V)])
    f = lambda x: vocabulary.logits_of(x, ids)  # noqa: E731
    torch.testing.assert_close(f(a + b), f(a) + f(b) - f(zero), **EXACT)


def test_minus_one_is_not_scored_and_has_no_gradient():
    for kind, vocabulary in every_kind():
        h = torch.randn(2, 3, D, requires_grad=True)
        targets = torch.tensor([[4, -1, 20], [-1, 11, 0]])
        nll = vocabulary.nll(h, targets)
        assert (nll[targets == -1] == 0).all(), kind
        assert (nll[targets != -1] > 0).all(), kind
        nll.sum().backward()
        assert (h.grad[targets == -1] == 0).all(), kind
        assert (h.grad[targets != -1].abs().sum(-1) > 0).all(), kind


def test_no_target_at_all_gives_zeros_and_finite_gradients():
    for kind, vocabulary in every_kind():
        h = torch.randn(1, 3, D, requires_grad=True)
        nll = vocabulary.nll(h, torch.full((1, 3), -1))
        nll.sum().backward()
        assert (nll == 0).all() and (h.grad == 0).all(), kind


def test_tied_vocabulary_equals_loops():
    vocabulary = tied()
    weights = oracles.weights_of(vocabulary)
    h = torch.randn(2, 3, D)
    log_probs = vocabulary.log_probs(h)
    for vector, row in zip(h.view(-1, D).numpy(), log_probs.detach().view(-1, V), strict=True):
        logits = list(weights["embedding"] @ vector + weights["bias"])
        np.testing.assert_allclose(row.numpy(), oracles.log_softmax(logits), rtol=0, atol=1e-10)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3), **EXACT)
    targets = torch.randint(V, (2, 3))
    wanted = -log_probs.gather(2, targets[..., None]).squeeze(2)
    torch.testing.assert_close(vocabulary.nll(h, targets), wanted, **EXACT)
    ids = torch.randint(V, (2, 3))
    wanted = torch.from_numpy(weights["embedding"])[ids] * math.sqrt(D)
    torch.testing.assert_close(vocabulary(ids), wanted, **EXACT)


def test_tied_logits_are_log_probs_without_the_normaliser():
    vocabulary, h = tied(), torch.randn(2, 3, D)
    ids = torch.randint(V, (2, 3))
    logits = h @ vocabulary.embedding.t() + vocabulary.bias
    wanted = logits.gather(2, ids[..., None]).squeeze(2)
    torch.testing.assert_close(vocabulary.logits_of(h, ids), wanted, **EXACT)
    torch.testing.assert_close(vocabulary.log_probs(h), logits.log_softmax(-1), **EXACT)


def test_one_tensor_serves_input_and_output():
    vocabulary = tied()
    assert sum(p.numel() for p in vocabulary.parameters()) == V * D + V
    assert moved(vocabulary, vocabulary.embedding) == (True, True)
    assert moved(vocabulary, vocabulary.bias) == (False, True)


@pytest.mark.parametrize(("cutoffs", "div_value"), SHAPES[:5])
def test_adaptive_clusters_are_tied_and_all_but_the_first_projection(cutoffs, div_value):
    vocabulary = adaptive(cutoffs, div_value)
    for embedding in vocabulary.embeddings:
        assert moved(vocabulary, embedding) == (True, True)
    for bias in vocabulary.biases:
        assert moved(vocabulary, bias) == (False, True)
    assert len(vocabulary.projections) == (len(cutoffs) + 1 if div_value > 1 else 0)
    for c, projection in enumerate(vocabulary.projections):
        assert moved(vocabulary, projection) == (True, c > 0)  # the first is for the input alone
    if div_value > 1:
        assert moved(vocabulary, vocabulary.output_projection) == (False, True)
    if cutoffs:
        assert moved(vocabulary, vocabulary.cluster_weight) == (False, True)
        assert moved(vocabulary, vocabulary.cluster_bias) == (False, True)


def moved(vocabulary: nn.Module, parameter: Tensor) -> tuple[bool, bool]:
    """Whether the input vectors and the output probabilities depend on a parameter."""
    ids, h = torch.arange(V)[None], torch.linspace(-1, 1, 2 * D).view(1, 2, D)
    with torch.no_grad():
        vectors, log_probs = vocabulary(ids), vocabulary.log_probs(h)
        kept = parameter.clone()
        parameter.add_(torch.linspace(0.1, 1, parameter.numel()).view_as(parameter))
        changed = [(vocabulary(ids) - vectors).abs().max(), None]
        changed[1] = (vocabulary.log_probs(h) - log_probs).abs().max()
        parameter.copy_(kept)
    return bool(changed[0] > 1e-9), bool(changed[1] > 1e-9)


def test_cluster_widths_shrink_by_div_value():
    vocabulary = adaptive([5, 12], 4)
    assert [tuple(e.shape) for e in vocabulary.embeddings] == [(5, 16), (7, 4), (11, 1)]
    assert [tuple(p.shape) for p in vocabulary.projections] == [(16, 16), (16, 4), (16, 1)]
    vocabulary = adaptive([5, 12], 1)
    assert [tuple(e.shape) for e in vocabulary.embeddings] == [(5, 16), (7, 16), (11, 16)]


def test_probabilities_are_float32_at_least():
    for kind, vocabulary in every_kind():
        vocabulary = vocabulary.bfloat16()
        h = torch.randn(1, 2, D, dtype=torch.bfloat16)
        assert vocabulary.log_probs(h).dtype == torch.float32, kind
        assert vocabulary.nll(h, torch.tensor([[3, 13]])).dtype == torch.float32, kind


@pytest.mark.parametrize("kind", ["tied", "one cluster", "adaptive", "narrowing"])
@pytest.mark.parametrize("token", [V, V + 100, -2, -100])
def test_a_target_outside_the_vocabulary_is_refused(kind, token):
    vocabulary = dict(every_kind())[kind]
    with pytest.raises((IndexError, RuntimeError)):
        vocabulary.nll(torch.randn(1, 2, D), torch.tensor([[3, token]]))


@pytest.mark.parametrize("kind", ["tied", "one cluster", "adaptive", "narrowing"])
@pytest.mark.parametrize("token", [V, V + 100, -1])
def test_an_id_outside_the_vocabulary_is_refused(kind, token):
    vocabulary = dict(every_kind())[kind]
    with pytest.raises((IndexError, RuntimeError)):
        vocabulary(torch.tensor([[3, token]]))
