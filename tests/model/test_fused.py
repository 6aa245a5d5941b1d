"""The fused core against the explicit one, and cached keys and values against computing anew."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allattn.config import ModelConfig
from allattn.model import kernel
from allattn.model.attention import Attention, KeyValues
from allattn.model.generate import generate
from allattn.model.positions import Visible, falling_distances, sinusoids
from allattn.model.scoring import score_stream
from allattn.model.transformer import TransformerLM

CPU = torch.device("cpu")

both_cores = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "tiles"])


def core(compiled: bool):
    """The compiled kernel, which must be there, or the tiles that stand in for it."""
    if not compiled:
        return patch.object(kernel, "load", lambda: (None, "switched off"))
    loaded = kernel.load()
    if loaded[0] is None:
        pytest.skip(loaded[1])
    return patch.object(kernel, "load", lambda: loaded)


def make_layer(seed: int, N: int, H: int, P: int, size: float, biased=False) -> Attention:
    torch.manual_seed(seed)
    layer = Attention(6, N, H, P, dropout=0.0, persistent_bias=biased).double()
    for name, parameter in layer.named_parameters():
        scale = 1.0 if name.startswith(("persistent_key", "persistent_value")) else size
        torch.nn.init.normal_(parameter, std=scale * parameter.shape[-1] ** -0.5)
    if biased:
        torch.nn.init.normal_(layer.persistent_bias, mean=-1.0, std=size)
    return layer


def run(layer: Attention, implementation: str, dtype, h, T, window, padding, gate, weights):
    """Output and gradients of everything, in float64."""
    layer = layer.to(dtype)
    layer.zero_grad()
    layer.implementation = implementation
    h = h.detach().to(dtype, copy=True).requires_grad_()
    gate = gate.detach().to(dtype, copy=True).requires_grad_()
    layer.gate = lambda: gate
    S = h.shape[1]
    positions = sinusoids(falling_distances(S, None, CPU), 6, dtype).requires_grad_()
    out = layer(h, T, positions, Visible(T, S - T, window, padding, CPU))
    (out * weights.to(dtype)).sum().backward()
    grads = {"h": h.grad, "positions": positions.grad, "gate": gate.grad}
    grads |= {n: p.grad for n, p in layer.named_parameters()}
    return out.detach().double(), {
        n: torch.zeros(()) if g is None else g.double() for n, g in grads.items()
    }


def error(actual: torch.Tensor, wanted: torch.Tensor, scale: float) -> float:
    """Relative to the gradient's norm, or to the scale where the true one is rounding noise."""
    return float((actual - wanted).norm()) / max(float(wanted.norm()), scale)


shapes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.sampled_from([1, 2, 5, 17, 40]),
        "M": st.sampled_from([0, 1, 3, 16, 33]),
        "P": st.sampled_from([0, 1, 7, 50]),
        "N": st.integers(1, 5),
        "H": st.sampled_from([1, 3, 8]),
        "windowed": st.booleans(),
        "padded": st.booleans(),
        "by_sequence": st.booleans(),
        "biased": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


def case(c, size: float):
    layer = make_layer(c["seed"], c["N"], c["H"], c["P"], size, c["biased"] and c["P"] > 0)
    h = torch.randn(c["B"], c["M"] + c["T"], 6, dtype=torch.float64)
    weights = torch.randn(c["B"], c["T"], 6, dtype=torch.float64)
    window = c["M"] if c["windowed"] else None
    padding = torch.randint(0, c["M"] + 1, (c["B"],)) if c["padded"] else None
    gate = torch.rand((c["B"], c["N"]) if c["by_sequence"] else c["N"], dtype=torch.float64)
    return layer, (h, c["T"], window, padding, gate, weights)


@both_cores
@settings(max_examples=60)
@given(c=shapes)
def test_fused_equals_reference_on_any_shape(compiled, c):
    layer, inputs = case(c, size=1.0)
    wanted, wanted_grads = run(layer, "reference", torch.float64, *inputs)
    exact, exact_grads = run(layer, "fused", torch.float64, *inputs)
    assert error(exact, wanted, 1e-3) < 1e-11
    for name, grad in wanted_grads.items():
        assert error(exact_grads[name], grad, 1e-2) < 1e-10, name
    with core(compiled):
        single, single_grads = run(layer, "fused", torch.float32, *inputs)
    assert torch.isfinite(single).all()
    assert error(single, wanted, 0.1) < 1e-5
    # a sum over all positions cancels: its rounding is measured against what was summed
    size = max(float(g.norm()) for g in wanted_grads.values())
    for name, grad in wanted_grads.items():
        assert error(single_grads[name], grad, 0.1 * size) < 1e-5, name


@settings(max_examples=25)
@given(c=shapes)
def test_scores_in_the_hundreds(c):
    """exp of the raw scores would overflow: the rows' maxima are found and used."""
    layer, inputs = case(c, size=30.0)
    wanted, wanted_grads = run(layer, "reference", torch.float64, *inputs)
    exact, exact_grads = run(layer, "fused", torch.float64, *inputs)
    assert error(exact, wanted, 1e-3) < 1e-9
    size = max(float(g.norm()) for g in wanted_grads.values())
    for name, grad in wanted_grads.items():
        assert error(exact_grads[name], grad, 1e-3 * size) < 1e-8, name


@both_cores
@settings(max_examples=25)
@given(c=shapes)
def test_bfloat16_is_as_near_as_bfloat16_is(compiled, c):
    layer, inputs = case(c, size=1.0)
    wanted, wanted_grads = run(layer, "reference", torch.float64, *inputs)
    # where one key is visible the true gradient is 0 and the rest of a difference remains: noise of
    # bfloat16's own size, so errors are measured against the largest gradient
    size = 3 * max(float(g.norm()) for g in wanted_grads.values())
    own, own_grads = run(layer, "reference", torch.bfloat16, *inputs)
    with core(compiled):
        fused, fused_grads = run(layer, "fused", torch.bfloat16, *inputs)
    assert error(fused, wanted, 0.1) < max(0.03, 3 * error(own, wanted, 0.1))
    for name, grad in wanted_grads.items():
        limit = max(0.03, 3 * error(own_grads[name], grad, 0.1 * size))
        assert error(fused_grads[name], grad, 0.1 * size) < limit, name


@both_cores
def test_nothing_of_the_size_of_the_scores_is_kept(compiled):
    B, T, M, N, H, P = 2, 32, 32, 4, 8, 200
    layer = make_layer(0, N, H, P, 1.0).float()
    layer.implementation = "fused"
    h = torch.randn(B, M + T, 6, requires_grad=True)
    positions = sinusoids(falling_distances(M + T, None, CPU), 6, torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        with core(compiled):
            layer(h, T, positions, Visible(T, M, None, None, CPU))
    assert kept and max(kept) < B * N * T * (M + T)


def model_of(**changes) -> TransformerLM:
    torch.manual_seed(0)
    shape = dict(
        n_layers=2, d_model=16, n_heads=2, d_head=8, n_persistent=12, seq_len=8, mem_len=12,
        vocab_size=40, dropout=0.0,
    )  # fmt: skip
    return TransformerLM(ModelConfig(**{**shape, **changes})).double().eval()


@pytest.mark.parametrize("attention", ["reference", "fused", "auto"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"same_length": True},
        {"n_heads": [2, 0]},
        {"n_persistent": 0, "d_ff": 24},
        {"position": "learned", "clamp_len": 9},
        {"clamp_len": 5},
        {"mem_len": 0},
    ],
)
def test_cached_equals_recomputed(changes, attention):
    model = model_of(attention=attention, **changes)
    tokens = torch.randint(40, (333,)).numpy()
    losses = [
        float(score_stream(model, model, tokens, 1, seq_len=T, batch_size=b, cache=cache)[0])
        for cache in (True, False)
        for T, b in ((8, 1), (8, 3))
    ]
    assert max(losses) - min(losses) < 1e-9
    if changes.get("same_length") and attention != "auto":
        other = score_stream(model, model, tokens, 1, seq_len=5, batch_size=2)[0]
        assert abs(float(other) - losses[0]) < 1e-9


def test_a_sliding_buffer_holds_the_last_positions_and_does_not_grow():
    cache, everything = KeyValues(mem_len=5), torch.empty(2, 1, 2, 0, 3)
    addresses = set()
    for step in range(200):
        new = torch.randn(2, 1, 2, 1 + step % 3, 3)
        everything = torch.cat([everything, new], dim=3)
        held = cache.append(new)
        length = min(5, everything.shape[3] - new.shape[3]) + new.shape[3]
        assert torch.equal(held, everything[:, :, :, -length:])
        addresses.add(cache.buffer.data_ptr())
    assert len(addresses) <= 3 and cache.buffer.shape[3] <= 2 * 5 + 3


def test_a_batch_of_prompts_is_each_prompt_alone():
    model = model_of(vocab_size=40)
    prompts = [[3], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21, 22]]
    together = list(generate(model, prompts, max_new_tokens=30, temperature=0))
    for i, prompt in enumerate(prompts):
        alone = [ids[0] for ids in generate(model, [prompt], max_new_tokens=30, temperature=0)]
        if len(prompt) <= 8 or i == 1:  # the same segments of the prompt as alone
            assert [ids[i] for ids in together] == alone
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(model, [[1], []], max_new_tokens=1))


def test_activation_checkpointing_changes_no_gradient():
    model = model_of(dropout=0.3).train()
    ids = torch.randint(40, (3, 9))
    grads = []
    for on in (False, True):
        model.checkpoint_layers = on
        torch.manual_seed(5)
        model.zero_grad()
        model(ids[:, :-1], ids[:, 1:]).nll.mean().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_a_large_tied_vocabulary_is_scored_in_parts(monkeypatch):
    model = model_of()
    ids = torch.randint(40, (3, 9))
    results = []
    for limit in (1 << 24, 7 * 40):
        monkeypatch.setattr("allattn.model.adaptive._LOGITS", limit)
        model.zero_grad()
        nll = model(ids[:, :-1], ids[:, 1:].masked_fill(ids[:, 1:] == 3, -1)).nll
        nll.mean().backward()
        results.append([nll.detach()] + [p.grad.clone() for p in model.parameters()])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-13)
