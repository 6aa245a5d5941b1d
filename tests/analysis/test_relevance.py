"""Relevance against the z rule by hand, what is conserved, and planted heads."""

from __future__ import annotations

import contextlib

import numpy as np
import planted
import pytest
import torch
from lrp import Segment
from torch import Tensor, nn

from allattn.analysis.relevance import PREDICTIONS, linear, relevance, top_logits
from allattn.analysis.sample import Sample, take_sample
from allattn.data.lanes import Lanes
from allattn.model.transformer import Memory, TransformerLM
from allattn.pruning.gates import MaskGate
from allattn.pruning.importance import put_probes

V, T = 11, 4
FAMILIES = {
    "all-attention": {"n_heads": [3, 2]},
    "transformer-xl": {"n_heads": [3, 0, 2], "n_layers": 3, "n_persistent": 0, "d_ff": 7},
    "both": {"n_heads": [2, 1], "d_ff": 6, "same_length": True},
    "adaptive": {"embedding": "adaptive", "cutoffs": [2, 6], "div_value": 2},
}
families = pytest.mark.parametrize("family", FAMILIES)


def text(n_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(V, size=n_tokens)


def three_lanes() -> Sample:
    return Sample(Lanes(text(3 * 3 * T + 1), 3, T), 3)


def assert_close(got: list[list[float]], wanted: list[list[float]], abs: float = 1e-9) -> None:
    assert list(map(len, got)) == list(map(len, wanted))
    for a, b in zip(got, wanted, strict=True):
        assert a == pytest.approx(b, abs=abs)


# Oracle


def by_hand(model: TransformerLM, sample: Sample) -> list[list[float]]:
    assert PREDICTIONS >= T  # so every position is a prediction
    shares: list[list[list[float]]] = []
    for lane in range(sample.lanes.n_lanes):
        memory = None
        for k in range(sample.n_segments):
            ids = sample.lanes.batch(k, lane, lane + 1)[0][0].tolist()
            segment = Segment(model, ids, memory)
            memory = segment.memory
            for t in range(T):
                rows = segment.relevance(t)
                shares.append([[abs(x) / sum(map(abs, row)) for x in row] for row in rows])
    n_layers = range(model.config.n_layers)
    return [list(np.mean([share[layer] for share in shares], axis=0)) for layer in n_layers]


@families
def test_relevance_equals_the_z_rule_by_hand(tiny_model, family):
    model = tiny_model(**FAMILIES[family])
    sample = three_lanes()
    got = relevance(model, sample)
    assert_close(got, by_hand(model, sample))
    assert min(x for row in got for x in row) > 1e-3
    for row in got:
        assert not row or sum(row) == pytest.approx(1)


# Conservation


class Streams:
    """The residual stream before each layer, before its feed-forward block, and at the end."""

    def __init__(self, model: TransformerLM, stack: contextlib.ExitStack):
        n = len(model.layers)
        self.into: list[Tensor] = [torch.empty(0)] * (n + 1)
        self.middle: list[Tensor] = [torch.empty(0)] * n
        self.fed: list[Tensor] = [torch.empty(0)] * n
        modules = [(layer, self.into, i) for i, layer in enumerate(model.layers)]
        modules.append((model.norm, self.into, n))
        for i, layer in enumerate(model.layers):
            if layer.feed_forward is not None:
                modules.append((layer.feed_forward_norm, self.middle, i))
                modules.append((layer.dropout, self.fed, i))  # the last that goes through it
        for module, place, i in modules:
            stack.callback(module.register_forward_pre_hook(keep_input(place, i)).remove)


def keep_input(place: list[Tensor], i: int):
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not args[0].requires_grad:
            args[0].requires_grad_()  # the embeddings
        place[i] = args[0]

    return hook


@families
@pytest.mark.parametrize("k", [0, T - 1])
def test_relevance_is_conserved_layer_by_layer(tiny_model, family, k):
    """Stream after = stream before, straight on + heads + feed-forward; and what each of them got
    is what it passed on to its inputs, its biases, its persistent values and the memory.
    """
    model = tiny_model(**FAMILIES[family])
    model.layers[0].attention.gate = MaskGate(model.config.heads[0], [0, 1], 1.5).double()
    ids = torch.from_numpy(text(2 * 2 * T)).view(2, 2 * T)
    with torch.no_grad():
        old = model(ids[:, :T]).memory
    hidden = [None if h is None else h.clone().requires_grad_() for h in old.hidden]
    with contextlib.ExitStack() as stack:
        stack.enter_context(linear(model))
        probes = put_probes(model)
        for probe in filter(None, probes):
            probe.start(2)
        names = ("attention.value.weight", "persistent_value", "norm.bias", "inner.bias")
        sources = {n: p for n, p in model.named_parameters() if n.endswith((*names, "outer.bias"))}
        for p in sources.values():
            p.requires_grad_()
        streams = Streams(model, stack)
        logits_BK, _ = top_logits(model, ids[:, T:], Memory(hidden, old.length))
    logit = logits_BK[:, k].sum()
    values = [probe.value for probe in probes if probe is not None]
    tensors = [*streams.into, *streams.middle, *streams.fed, *hidden, *values, *sources.values()]
    tensors = [x for x in tensors if x is not None and x.requires_grad]
    grads = torch.autograd.grad(logit, tensors, materialize_grads=True)
    grad = {id(x): g for x, g in zip(tensors, grads, strict=True)}

    def share(x: Tensor | None, at: Tensor | None = None) -> float:
        """Gradient times input; with `at`, of what passes on straight to there."""
        return 0.0 if x is None else float((x * grad[id(x if at is None else at)]).detach().sum())

    kept = 0.0  # by biases, persistent values and memory, of all layers
    for i, probe in enumerate(probes):
        weights = {
            n.removeprefix(f"layers.{i}."): p
            for n, p in sources.items()
            if n.startswith(f"layers.{i}.")
        }
        before, end = streams.into[i], streams.into[i + 1]
        if model.config.d_ff:
            middle, fed = streams.middle[i], share(streams.fed[i])
            assert share(end) == pytest.approx(share(middle, at=end) + fed, abs=1e-9)
            biases = sum(share(p) for n, p in weights.items() if n.startswith("feed_forward"))
            assert fed == pytest.approx(share(middle) - share(middle, at=end) + biases, abs=1e-9)
            kept, end = kept + biases, middle
        if probe is None:
            assert before is end
            continue
        heads, persistent = share(probe.value), weights.get("attention.persistent_value")
        assert share(end) == pytest.approx(share(before, at=end) + heads, abs=1e-9)
        own = share(weights["attention_norm.bias"]) + share(hidden[i]) + share(persistent)
        assert heads == pytest.approx(share(before) - share(before, at=end) + own, abs=1e-9)
        assert abs(heads) > 1e-3 and abs(share(hidden[i])) > 1e-3
        kept += own
        H, value = model.config.d_head, weights["attention.value.weight"]
        for n in range(model.config.heads[i]):
            # W dL/dW of a head's rows is v dL/dv of its content values
            passed = (value * grad[id(value)])[n * H : (n + 1) * H].sum()
            if persistent is not None:
                passed = passed + (persistent * grad[id(persistent)])[n].sum()
            got = (probe.value * grad[id(probe.value)])[:, n].sum()
            assert float(got.detach()) == pytest.approx(float(passed.detach()), abs=1e-9)
    last = share(sources["norm.bias"]) + bias_of_top(model, ids, old, k)
    assert float(logit.detach()) == pytest.approx(share(streams.into[-1]) + last, abs=1e-9)
    assert float(logit.detach()) == pytest.approx(share(streams.into[0]) + kept + last, abs=1e-9)


@torch.no_grad()
def bias_of_top(model: TransformerLM, ids: Tensor, memory: Memory, k: int) -> float:
    """The output biases of the top tokens, summed over sequences."""
    top_B = model(ids[:, T:], memory=memory).log_probs[:, k].argmax(-1)
    if model.config.embedding == "tied":
        return float(model.vocabulary.bias[top_B].sum())
    edges, total = model.vocabulary.edges, 0.0
    for top in top_B.tolist():
        c = max(i for i in range(len(edges) - 1) if edges[i] <= top)
        total += float(model.vocabulary.biases[c][top - edges[c]])
        total += float(model.vocabulary.cluster_bias[c - 1]) if c else 0.0
    return total


@families
def test_the_linear_model_gives_the_same_outputs(tiny_model, family):
    model = tiny_model(**FAMILIES[family])
    ids = torch.from_numpy(text(2 * T)).view(2, T)
    plain = model(ids).log_probs
    with linear(model):
        torch.testing.assert_close(model(ids).log_probs, plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(model(ids).log_probs, plain)


# Whatever the batch size


@families
def test_the_batch_size_changes_nothing(tiny_model, family):
    model = tiny_model(**FAMILIES[family])
    wanted = relevance(model, three_lanes(), 1)
    for batch_size in (2, 3, 8):
        assert_close(relevance(model, three_lanes(), batch_size), wanted)
        got = relevance(tiny_model(**FAMILIES[family]).float(), three_lanes(), batch_size)
        assert_close(got, wanted, abs=1e-4)


def test_long_segments_have_some_predictions_the_last_among_them(tiny_model):
    model = tiny_model(seq_len=30, mem_len=0)
    ids = torch.from_numpy(text(30))[None]
    logits_BK, _ = top_logits(model, ids, None)
    output = model.norm(model.hidden(ids, None, None)[0])
    logits = (output @ model.vocabulary.embedding.t() + model.vocabulary.bias).amax(-1)
    assert logits_BK.shape == (1, PREDICTIONS)
    torch.testing.assert_close(logits_BK, logits[:, [6, 14, 21, 29]])


# Planted


@families
def test_heads_that_write_nothing_are_exactly_irrelevant(tiny_model, family):
    model = tiny_model(**FAMILIES[family])
    with torch.no_grad():
        planted.dead()(model.layers[0].attention, 1)
    last = model.layers[-1].attention
    last.gate = MaskGate(last.n_heads, [0], 2.0)
    got = relevance(model, three_lanes())
    assert got[0][1] == 0.0 and got[0][0] > 0.01
    assert got[-1] == [1.0] + [0.0] * (last.n_heads - 1)
    last.gate = MaskGate(last.n_heads, [], 1.0)
    assert relevance(model, three_lanes())[-1] == [0.0] * last.n_heads


def test_the_head_that_makes_the_prediction_has_all_relevance(tiny_config):
    """It copies the rarest token's code to where the output reads it; another writes elsewhere."""
    config = tiny_config(n_layers=1, n_heads=2, d_head=4)
    counts = np.arange(V, 0, -1)
    model = planted.plant(TransformerLM(config).double(), counts, [planted.rarest()])
    attention = model.layers[0].attention
    with torch.no_grad():
        attention.output.weight.zero_()
        for j in range(4):
            attention.value.weight[j, j] = 1
            attention.output.weight[j, j] = 100
        attention.output.weight[5, 4] = 1e-3
    sample = three_lanes()
    (row,) = relevance(model, sample)
    assert row[0] > 0.999
    for stream in sample.streams(8):
        ids, _ = next(iter(stream))
        rarest = ids.cummax(1).values  # ids are in order of frequency
        assert torch.equal(model(ids).log_probs.argmax(-1), rarest)


# As it was


class Stop(Exception):
    """Not an error of ours."""


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(tiny_model, fails):
    model = tiny_model(n_heads=[2, 1]).train()
    model.layers[1].eval()
    model.norm.weight.requires_grad_(False)
    gate = model.layers[0].attention.gate = MaskGate(2, [0], 1.0)
    ids = torch.from_numpy(text(2 * T)).view(2, T)
    plain = model(ids).log_probs
    seen = []

    def on_tokens(n: int) -> None:
        seen.append(n)
        if fails:
            raise Stop

    with pytest.raises(Stop) if fails else contextlib.nullcontext():
        with torch.no_grad():
            relevance(model, three_lanes(), on_tokens=on_tokens)
    assert sum(seen) == (3 * T if fails else 9 * T)
    assert model.training and model.layers[0].training and not model.layers[1].training
    assert [layer.attention.gate for layer in model.layers] == [gate, None]
    assert all(layer.attention.watch is None for layer in model.layers)
    flags = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert flags == {"norm.weight"}
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(model(ids).log_probs, plain)


def test_no_heads_no_relevance(tiny_model):
    assert relevance(tiny_model(n_heads=[0, 0], d_ff=4), three_lanes()) == [[], []]


def test_a_model_that_has_diverged_is_refused(tiny_model):
    model = tiny_model()
    with torch.no_grad():
        model.layers[1].attention.value.weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="diverged"):
        relevance(model, take_sample(text(20), T, 16))


@pytest.mark.gpu
@families
def test_on_a_gpu_as_on_a_cpu(tiny_model, family):
    wanted = relevance(tiny_model(**FAMILIES[family]), three_lanes())
    got = relevance(tiny_model(**FAMILIES[family]).cuda(), three_lanes())
    assert_close(got, wanted)
