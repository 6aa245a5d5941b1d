"""The whole model: against loops, and what memory, padding, gates and head counts promise."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor, nn

from allattn.config import CHOICES
from allattn.model.transformer import (
    Memory,
    TransformerLM,
    count_parameters,
    flops_per_token,
    init_weights,
    watched,
)

EXACT = {"rtol": 0, "atol": 1e-10}
TRANSFORMER_XL = {"n_persistent": 0, "d_ff": 10}
FAMILIES = {
    "all-attention": {},
    "transformer-xl": TRANSFORMER_XL,
    "hybrid": {"d_ff": 10},
    "adaptive": {"embedding": "adaptive", "cutoffs": [4, 8], "div_value": 2},
    "pruned": {"n_layers": 4, "n_heads": [2, 0, 3, 1]},
    "pruned transformer-xl": {"n_layers": 3, "n_heads": [0, 1, 0], **TRANSFORMER_XL},
    "clamped": {"clamp_len": 3},
    "learned": {"position": "learned"},
    "learned, short table": {"position": "learned", "clamp_len": 3},
    "same_length": {"same_length": True},
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_way = pytest.mark.parametrize("way", CHOICES["model.attention"])


class Fixed(nn.Module):
    """A gate that returns what it was given."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self) -> Tensor:
        return self.value


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape)


def run(model: TransformerLM, ids_BT: Tensor, splits: list[int], **first) -> Tensor:
    """Log-probabilities [B, T, V] of a stream in segments of the given lengths."""
    parts, memory = [], None
    with torch.no_grad():
        for segment in ids_BT.split(splits, dim=1):
            out = model(segment, memory=memory, **(first if memory is None else {}))
            memory = out.memory
            parts.append(out.log_probs)
    return torch.cat(parts, dim=1)


# Against the loops


@every_way
@every_family
def test_segments_equal_loops(tiny_model, family, way):
    model = tiny_model(attention=way, **FAMILIES[family])
    ids = tokens(2, 12)
    actual = run(model, ids, [4, 5, 3])  # the memory of 6 is short, then full
    weights = oracles.weights_of(model)
    for row, log_probs in zip(ids, actual, strict=True):
        segments = [part.tolist() for part in row.split([4, 5, 3])]
        wanted = np.concatenate(oracles.language_model(segments, weights, model.config))
        np.testing.assert_allclose(log_probs.numpy(), wanted, rtol=0, atol=1e-10)


@every_family
def test_log_probs_sum_to_one_and_nll_picks_the_target(tiny_model, family):
    model = tiny_model(**FAMILIES[family])
    ids, targets = tokens(2, 5), tokens(2, 5)
    targets[0, 3] = targets[1, 0] = -1
    log_probs = model(ids).log_probs
    assert log_probs.shape == (2, 5, 11)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 5).double(), **EXACT)
    out = model(ids, targets)
    assert out.log_probs is None
    picked = -log_probs.gather(2, targets.clamp(min=0)[..., None]).squeeze(2)
    wanted = picked.masked_fill(targets == -1, 0)
    torch.testing.assert_close(out.nll, wanted, **EXACT)
    last = model(ids, last_only=True).log_probs
    torch.testing.assert_close(last, log_probs[:, -1:], **EXACT)


def test_gradcheck_of_the_loss_in_both_families(tiny_model):
    for shape in ({}, TRANSFORMER_XL):
        model = tiny_model(
            d_model=4, n_heads=[2, 1], d_head=2, vocab_size=3, **{"n_persistent": 2, **shape}
        )
        with torch.no_grad():
            memory = model(torch.tensor([[1, 2, 0]])).memory
        ids, targets = torch.tensor([[0, 2, 1]]), torch.tensor([[2, -1, 0]])

        def loss(*_, model=model, ids=ids, targets=targets, memory=memory):
            return model(ids, targets, memory).nll

        assert torch.autograd.gradcheck(loss, tuple(model.parameters()))


# Memory


@every_way
@every_family
@pytest.mark.parametrize("splits", [[6, 6], [4, 4, 4], [1] * 12, [1, 7, 4]])
def test_segments_with_memory_equal_one_long_pass(tiny_model, family, splits, way):
    model = tiny_model(attention=way, **{"mem_len": 12, **FAMILIES[family]})
    ids = tokens(2, 12)
    torch.testing.assert_close(run(model, ids, splits), run(model, ids, [12]), **EXACT)


@every_family
def test_under_same_length_any_split_is_the_same(tiny_model, family):
    model = tiny_model(**{**FAMILIES[family], "same_length": True, "mem_len": 3})
    ids = tokens(2, 14)
    whole = run(model, ids, [14])
    for splits in ([7, 7], [3, 3, 3, 3, 2], [5, 1, 8], [1] * 14):
        torch.testing.assert_close(run(model, ids, splits), whole, **EXACT)


def test_a_short_memory_forgets(tiny_model):
    model = tiny_model(mem_len=3, n_layers=1)
    ids = tokens(1, 8)
    changed = ids.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 11
    one, other = run(model, ids, [4, 4])[:, 4:], run(model, changed, [4, 4])[:, 4:]
    assert torch.equal(one, other)
    changed[0, 1] = (changed[0, 1] + 1) % 11
    assert not torch.allclose(one, run(model, changed, [4, 4])[:, 4:])


def test_memory_holds_layer_inputs_up_to_mem_len_without_gradient(tiny_model):
    model = tiny_model(n_heads=[2, 0])
    out = model(tokens(2, 4))
    assert out.memory.length == 4 and out.memory.padding is None
    assert out.memory.hidden[0].shape == (2, 4, 8)
    assert out.memory.hidden[1] is None
    ids = tokens(2, 4)
    following = model(ids, memory=out.memory).memory
    assert following.length == 6
    assert torch.equal(following.hidden[0][:, :2], out.memory.hidden[0][:, 2:])
    assert torch.equal(following.hidden[0][:, 2:], model.vocabulary(ids))
    assert not following.hidden[0].requires_grad
    assert model(tokens(2, 9)).memory.length == 6


def test_without_mem_len_segments_are_independent(tiny_model):
    model = tiny_model(mem_len=0)
    ids = tokens(2, 8)
    wanted = torch.cat([run(model, ids[:, :4], [4]), run(model, ids[:, 4:], [4])], dim=1)
    torch.testing.assert_close(run(model, ids, [4, 4]), wanted, **EXACT)
    assert model(ids).memory.length == 0


@every_family
def test_empty_memory_is_masked_and_not_attended_as_zeros(tiny_model, family):
    model = tiny_model(**FAMILIES[family])
    ids = tokens(1, 4)
    start = model(ids)
    weights = oracles.weights_of(model)
    wanted = oracles.language_model([ids[0].tolist()], weights, model.config)[0]
    np.testing.assert_allclose(start.log_probs[0].detach().numpy(), wanted, rtol=0, atol=1e-10)
    zeros = [None if h is None else torch.zeros_like(h) for h in start.memory.hidden]
    attended = model(ids, memory=Memory(zeros, start.memory.length))
    assert not torch.allclose(attended.log_probs, start.log_probs, atol=1e-3)
    # said to be padding, the zeros are masked and the result is that of no memory at all
    masked = model(ids, memory=Memory(zeros, start.memory.length, torch.tensor([4])))
    torch.testing.assert_close(masked.log_probs, start.log_probs, **EXACT)


@every_way
@every_family
def test_a_changed_future_token_changes_nothing_before_it(tiny_model, family, way):
    model = tiny_model(attention=way, **FAMILIES[family])
    ids = tokens(2, 9)
    before = run(model, ids, [4, 5])
    for at in (2, 6, 8):
        changed = ids.clone()
        changed[:, at] = (changed[:, at] + 1) % 11
        after = run(model, changed, [4, 5])
        torch.testing.assert_close(after[:, :at], before[:, :at], rtol=0, atol=1e-12)
        assert not torch.allclose(after[:, at], before[:, at], atol=1e-6)


def test_sequences_of_a_batch_do_not_mix(tiny_model):
    model = tiny_model()
    ids = tokens(3, 8)
    together = run(model, ids, [4, 4])
    for b in range(3):
        alone = run(model, ids[b : b + 1], [4, 4])
        torch.testing.assert_close(alone, together[b : b + 1], **EXACT)


# Padding


@every_way
@every_family
def test_left_padded_sequences_get_what_they_get_alone(tiny_model, family, way):
    model = tiny_model(attention=way, **FAMILIES[family])
    lengths = [5, 3, 1]
    ids = tokens(3, 5 + 4)
    padding = torch.tensor([5 - n for n in lengths])
    together = run(model, ids, [5, 4], padding_B=padding)
    for b, n in enumerate(lengths):
        alone = run(model, ids[b : b + 1, 5 - n :], [n, 4])
        torch.testing.assert_close(together[b : b + 1, 5 - n :], alone, **EXACT)
    ids[1, :2], ids[2, :4] = 0, 7  # what the padding is made of does not matter
    again = run(model, ids, [5, 4], padding_B=padding)
    for b, n in enumerate(lengths):
        torch.testing.assert_close(again[b, 5 - n :], together[b, 5 - n :], **EXACT)


def test_padding_leaves_the_memory_as_positions_do(tiny_model):
    model = tiny_model(mem_len=6)
    out = model(tokens(3, 4), padding_B=torch.tensor([0, 1, 4]))
    assert (out.memory.length, out.memory.padding.tolist()) == (4, [0, 1, 4])
    out = model(tokens(3, 2), memory=out.memory)  # 6 fit: none leaves
    assert (out.memory.length, out.memory.padding.tolist()) == (6, [0, 1, 4])
    out = model(tokens(3, 3), memory=out.memory)  # 3 of 9 leave
    assert (out.memory.length, out.memory.padding.tolist()) == (6, [0, 0, 1])
    out = model(tokens(3, 3), memory=out.memory)
    assert (out.memory.length, out.memory.padding) == (6, None)


def test_a_sequence_of_padding_alone_leaves_nothing_behind(tiny_model):
    model = tiny_model()
    ids = tokens(2, 8)
    together = run(model, ids, [4, 4], padding_B=torch.tensor([4, 0]))
    assert torch.isfinite(together).all()
    torch.testing.assert_close(together[:1, 4:], run(model, ids[:1, 4:], [4]), **EXACT)


# Gates and head counts


@every_way
@pytest.mark.parametrize("shape", [{}, TRANSFORMER_XL])
def test_a_closed_gate_is_a_removed_head(tiny_model, shape, way):
    model = tiny_model(attention=way, n_heads=3, **shape)
    open_heads = [[0, 2], [1]]
    smaller = tiny_model(attention=way, n_heads=[2, 1], **shape)
    kept = model.state_dict()
    for i, heads in enumerate(open_heads):
        rows = [3 * n + h for n in heads for h in range(3)]
        for name in ("query", "key", "value", "position"):
            key = f"layers.{i}.attention.{name}.weight"
            kept[key] = kept[key][rows]
        key = f"layers.{i}.attention.output.weight"
        kept[key] = kept[key][:, rows]
        for name in ("content_bias", "position_bias", "persistent_key", "persistent_value"):
            key = f"layers.{i}.attention.{name}"
            if key in kept:
                kept[key] = kept[key][heads]
        gate = torch.tensor([float(n in heads) for n in range(3)])
        model.layers[i].attention.gate = Fixed(gate)
    smaller.load_state_dict(kept)
    ids = tokens(2, 8)
    torch.testing.assert_close(run(model, ids, [4, 4]), run(smaller, ids, [4, 4]), **EXACT)


@pytest.mark.parametrize("shape", [{}, TRANSFORMER_XL])
def test_with_all_gates_closed_a_layer_is_one_without_heads(tiny_model, shape):
    model = tiny_model(**shape)
    model.layers[1].attention.gate = Fixed(torch.zeros(2))
    smaller = tiny_model(n_heads=[2, 0], **shape)
    missing, _ = smaller.load_state_dict(model.state_dict(), strict=False)
    assert missing == []
    ids = tokens(2, 8)
    torch.testing.assert_close(run(model, ids, [4, 4]), run(smaller, ids, [4, 4]), **EXACT)


def test_gates_for_each_sequence_are_those_of_the_sequences_alone(tiny_model):
    model = tiny_model()
    gates = torch.rand(2, 3, 2, dtype=torch.float64)  # layer, sequence, head
    ids = tokens(3, 8)
    for layer, gate in zip(model.layers, gates, strict=True):
        layer.attention.gate = Fixed(gate)
    together = run(model, ids, [4, 4])
    for b in range(3):
        for layer, gate in zip(model.layers, gates, strict=True):
            layer.attention.gate = Fixed(gate[b])
        alone = run(model, ids[b : b + 1], [4, 4])
        torch.testing.assert_close(alone, together[b : b + 1], **EXACT)


def test_an_all_attention_layer_without_heads_owns_nothing_and_is_an_identity(tiny_model):
    model = tiny_model(n_heads=[1, 0])
    layer = model.layers[1]
    assert list(layer.parameters()) == [] and list(layer.buffers()) == []
    x = torch.randn(2, 3, 8)
    assert torch.equal(layer(x, None, torch.empty(0), torch.empty(0)), x)


def test_a_transformer_xl_layer_without_heads_keeps_its_feed_forward(tiny_model):
    model = tiny_model(n_heads=[1, 0], **TRANSFORMER_XL)
    layer = model.layers[1]
    assert {name.partition(".")[0] for name, _ in layer.named_parameters()} == {
        "feed_forward_norm",
        "feed_forward",
    }
    x = torch.randn(2, 3, 8).double()
    weights = oracles.weights_of(layer)
    wanted = [
        h
        + oracles.feed_forward(
            oracles.layer_norm(h, oracles.part(weights, "feed_forward_norm.")),
            oracles.part(weights, "feed_forward."),
        )
        for h in x.view(-1, 8).numpy()
    ]
    actual = layer(x, None, torch.empty(0), torch.empty(0)).detach().view(-1, 8)
    np.testing.assert_allclose(actual.numpy(), np.array(wanted), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [{}, TRANSFORMER_XL])
def test_a_model_without_any_head_sees_each_token_alone(tiny_model, shape):
    model = tiny_model(n_heads=[0, 0], **shape)
    ids = tokens(2, 8)
    whole = run(model, ids, [4, 4])
    for t in range(8):
        alone = run(model, ids[:, t : t + 1], [1])
        torch.testing.assert_close(whole[:, t : t + 1], alone, **EXACT)


# Positions


def test_the_learned_table_has_a_row_for_each_distance_and_learns(tiny_model):
    model = tiny_model(position="learned")  # seq_len 4, mem_len 6: distances 0 to 9
    assert model.position_table.shape == (10, 8)
    with torch.no_grad():
        memory = model(tokens(1, 6)).memory
    model(tokens(1, 4), tokens(1, 4), memory).nll.sum().backward()
    assert (model.position_table.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_beyond_clamp_len_every_distance_counts_as_it(tiny_model, position):
    # the last query of one layer cannot tell the order of far keys, but that of near ones
    model = tiny_model(n_layers=1, position=position, clamp_len=2, mem_len=8)
    far = run(model, torch.tensor([[1, 2, 3, 4, 5, 6]]), [6])[:, -1]
    swapped = run(model, torch.tensor([[3, 1, 2, 4, 5, 6]]), [6])[:, -1]
    torch.testing.assert_close(swapped, far, **EXACT)
    near = run(model, torch.tensor([[1, 2, 3, 4, 6, 5]]), [6])[:, -1]
    other = run(model, torch.tensor([[1, 2, 3, 6, 4, 5]]), [6])[:, -1]
    assert not torch.allclose(near, other, atol=1e-6)


# Dropout


@every_family
def test_dropout_acts_in_training_alone(tiny_model, family):
    model = tiny_model(**{**FAMILIES[family], "dropout": 0.5, "attn_dropout": 0.5})
    ids = tokens(2, 4)
    without = tiny_model(**FAMILIES[family])
    assert torch.equal(model(ids).log_probs, without(ids).log_probs)
    model.train()
    assert not torch.equal(model(ids).log_probs, model(ids).log_probs)
    without.train()
    assert torch.equal(without(ids).log_probs, without(ids).log_probs)


def test_dropout_is_where_transformer_xl_has_it(tiny_model):
    model = tiny_model(d_ff=10, dropout=0.5)
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.5
            module.register_forward_hook(lambda m, i, o, n=name: seen.append((n, tuple(o.shape))))
    model(tokens(2, 4))
    vectors = (2, 4, 8)
    layers = [
        [
            (f"layers.{i}.dropout", vectors),  # after attention
            (f"layers.{i}.feed_forward.dropout", (2, 4, 10)),
            (f"layers.{i}.dropout", vectors),  # after the feed-forward block
        ]
        for i in range(2)
    ]
    # tokens, distances, and what the softmax gets
    ends = [("dropout", vectors), ("dropout", (4, 8))], [("dropout", vectors)]
    assert seen == [*ends[0], *layers[0], *layers[1], *ends[1]]


# Precision


@every_way
@every_family
def test_float32_and_bfloat16_autocast_stay_close(tiny_model, family, way):
    model = tiny_model(attention=way, **FAMILIES[family])
    ids = tokens(2, 8)
    exact = run(model, ids, [4, 4])
    model.float()
    single = run(model, ids, [4, 4])
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = run(model, ids, [4, 4])
        nll = model(ids, ids).nll
    assert mixed.dtype == nll.dtype == torch.float32
    assert (mixed - exact).abs().mean() < 0.1
    nll.sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.isfinite(p.grad).all(), name


@every_family
def test_under_autocast_residual_stream_and_memory_stay_float32(tiny_model, family):
    model = tiny_model(**FAMILIES[family]).float()
    with torch.autocast("cpu", torch.bfloat16):
        hidden, memory = model.hidden(tokens(2, 4), None, None)
    assert hidden.dtype == torch.float32
    assert {h.dtype for h in memory.hidden if h is not None} == {torch.float32}


# Sizes

SIZES = {
    **FAMILIES,
    "adaptive, one width": {"embedding": "adaptive", "cutoffs": [4, 8]},
    "adaptive, one cluster": {"embedding": "adaptive"},
    "adaptive, one projected cluster": {"embedding": "adaptive", "div_value": 2},
    "learned transformer-xl": {"position": "learned", **TRANSFORMER_XL},
    "no head": {"n_heads": [0, 0]},
    "persistent bias": {"persistent_share": 0.5, "n_heads": [2, 1]},
}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_follow_the_formula(tiny_config, size):
    config = tiny_config(**SIZES[size])
    model = TransformerLM(config)
    total = sum(p.numel() for p in model.parameters())
    assert total == oracles.parameters(config)
    for layer, n in zip(model.layers, config.heads, strict=True):
        assert sum(p.numel() for p in layer.parameters()) == oracles.layer_parameters(config, n)
    parts = count_parameters(config)
    assert sum(parts.values()) == total
    assert parts["vocabulary"] == oracles.vocabulary_parameters(config)
    assert parts["attention"] + parts["persistent"] == (
        sum(config.heads) * oracles.head_parameters(config)
    )
    vectors = 2 * config.n_persistent * config.d_head
    bias = config.persistent_share is not None
    assert parts["persistent"] == sum(config.heads) * (vectors + bias)
    assert parts["positions"] == (
        model.position_table.numel() if config.position == "learned" else 0
    )
    norms = 1 + sum(n > 0 for n in config.heads) + (config.n_layers if config.d_ff else 0)
    assert parts["norms"] == norms * 2 * config.d_model


def test_a_head_costs_the_same_wherever_it_is(tiny_config):
    one = sum(count_parameters(tiny_config(n_heads=[4, 1])).values())
    other = sum(count_parameters(tiny_config(n_heads=[2, 3])).values())
    fewer = sum(count_parameters(tiny_config(n_heads=[2, 2])).values())
    assert one == other
    assert other - fewer == oracles.head_parameters(tiny_config()) == 5 * 8 * 3 + 2 * 3 + 2 * 5 * 3


def test_counting_builds_nothing(tiny_config):
    config = tiny_config(n_layers=18, d_model=1024, n_heads=16, d_head=64, vocab_size=267_735)
    assert sum(count_parameters(config).values()) == oracles.parameters(config)


@pytest.mark.parametrize("size", SIZES)
def test_flops_follow_the_formula(tiny_config, size):
    config = tiny_config(**SIZES[size])
    assert abs(flops_per_token(config) - oracles.flops_per_token(config)) <= 0.5


def test_a_model_needs_to_know_its_vocabulary(tiny_config):
    with pytest.raises(ValueError, match="model.vocab_size"):
        TransformerLM(tiny_config(vocab_size=None))


# Initial values

BIG = {
    "n_layers": 2,
    "d_model": 128,
    "n_heads": 8,
    "d_head": 16,
    "n_persistent": 200,
    "vocab_size": 1000,
}


def stds(model: TransformerLM) -> dict[str, float]:
    """Standard deviation of every parameter, about zero."""
    return {name: p.pow(2).mean().sqrt().item() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["all-attention", "transformer-xl"])
def test_initial_values_of_the_family(tiny_config, family):
    shape = {"n_persistent": 0, "d_ff": 300} if family == "transformer-xl" else {}
    model = TransformerLM(tiny_config(**{**BIG, "position": "learned", **shape}))
    sharp = 0.02 if family == "transformer-xl" else 1 / math.sqrt(128)
    for name, std in stds(model).items():
        value = dict(model.named_parameters())[name]
        if "norm." in name:
            assert torch.equal(value, torch.full_like(value, float(name.endswith("weight")))), name
        elif name.endswith(("inner.bias", "outer.bias")) or name == "vocabulary.bias":
            assert not value.any(), name
        elif name.endswith(("query.weight", "key.weight", "value.weight", "position.weight")):
            assert std == pytest.approx(sharp, rel=0.05), name
        elif name.endswith("persistent_key"):
            assert std * math.sqrt(16) == pytest.approx(1, rel=0.05), name
        elif name.endswith("persistent_value"):
            assert std * math.sqrt(200) == pytest.approx(3, rel=0.05), name
        else:  # output, u and w, feed-forward, embedding, table
            assert std == pytest.approx(0.02, rel=0.2 if value.numel() < 1000 else 0.05), name
    assert any("persistent" in name for name in stds(model)) == (family == "all-attention")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_persistent_share_is_their_share_of_a_flat_softmax(tiny_config, share):
    config = tiny_config(persistent_share=share, same_length=True)  # all queries see as many keys
    model = TransformerLM(config).double()
    for layer in model.layers:
        torch.nn.init.zeros_(layer.attention.query.weight)
        torch.nn.init.zeros_(layer.attention.content_bias)
        torch.nn.init.zeros_(layer.attention.position_bias)
    memory = model(tokens(1, config.mem_len)).memory
    seen = []

    def look(_, weights):
        seen.append(weights[..., -config.n_persistent :].sum(-1))
        return weights

    with watched(model, look):
        model(tokens(1, config.seq_len), memory=memory)
    torch.testing.assert_close(torch.stack(seen), torch.full_like(torch.stack(seen), share))


@pytest.mark.parametrize("div_value", [1, 2])
def test_initial_values_of_the_adaptive_vocabulary(tiny_config, div_value):
    adaptive = {"embedding": "adaptive", "cutoffs": [300, 600], "div_value": div_value}
    vocabulary = TransformerLM(tiny_config(**{**BIG, **adaptive})).vocabulary
    for name, value in vocabulary.named_parameters():
        if "bias" in name or "cluster" in name:
            assert not value.any(), name
        else:
            wanted = 0.01 if "projection" in name else 0.02
            assert value.std().item() == pytest.approx(wanted, rel=0.05), name
    assert len(vocabulary.projections) == (3 if div_value > 1 else 0)


def test_every_weight_gets_its_first_value_from_the_seed(tiny_config):
    for values in FAMILIES.values():
        model = TransformerLM(tiny_config(**values))
        rounds = []
        for _ in range(2):
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(math.nan)
            torch.manual_seed(3)
            init_weights(model)
            rounds.append([p.detach().clone() for p in model.parameters()])
        for one, other in zip(*rounds, strict=True):
            assert torch.isfinite(one).all() and torch.equal(one, other)


@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_watched_weights_are_the_layer_s_own(tiny_model, implementation):
    """They sum to one, and giving others back changes the output; the core comes back after."""
    model = tiny_model(attention=implementation)
    ids = torch.arange(8).view(2, 4)
    plain = model(ids).log_probs
    seen = []

    def look(layer, weights_BNTS):
        seen.append((layer, weights_BNTS))
        return weights_BNTS

    with watched(model, look):
        torch.testing.assert_close(model(ids).log_probs, plain, **EXACT)
    assert [layer for layer, _ in seen] == [0, 1]
    for _, weights in seen:
        assert weights.shape == (2, 2, 4, 4 + 5)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))
    with watched(model, lambda layer, weights: weights * 0):
        assert not torch.allclose(model(ids).log_probs, plain)
    torch.testing.assert_close(model(ids).log_probs, plain, **EXACT)
