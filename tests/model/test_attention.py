"""One attention layer against loops over the equation, and what positions and masks promise."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from allattn.config import CHOICES
from allattn.model.attention import Attention
from allattn.model.positions import Visible, falling_distances, shift_by_query, sinusoids

CPU = torch.device("cpu")
EXACT = {"rtol": 0, "atol": 1e-10}
every_way = pytest.mark.parametrize("way", CHOICES["model.attention"])


class Fixed(nn.Module):
    """A gate that returns what it was given."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self) -> Tensor:
        return self.value


def attend(
    layer: Attention,
    h_BSD: Tensor,
    T: int,
    clamp_len: int | None = None,
    window: int | None = None,
    padding_B: Tensor | None = None,
) -> Tensor:
    """The layer, called as the model calls it."""
    _, S, D = h_BSD.shape
    positions = sinusoids(falling_distances(S, clamp_len, CPU), D, h_BSD.dtype)
    return layer(h_BSD, T, positions, Visible(T, S - T, window, padding_B, CPU))


def expected(
    layer: Attention,
    h_BSD: Tensor,
    T: int,
    clamp_len: int | None = None,
    window: int | None = None,
    padding_B: Tensor | None = None,
    gate_BN: Tensor | None = None,
) -> Tensor:
    """The same from the loops."""
    D = h_BSD.shape[2]
    weights = oracles.weights_of(layer)

    def vector(distance: int) -> np.ndarray:
        return oracles.sinusoid(distance if clamp_len is None else min(distance, clamp_len), D)

    rows = []
    for b, h in enumerate(h_BSD.detach().numpy()):
        empty = 0 if padding_B is None else int(padding_B[b])
        gate = None if gate_BN is None else gate_BN[b].tolist()
        rows.append(oracles.attention(h, T, weights, vector, window, empty, gate))
    return torch.from_numpy(np.array(rows))


@every_way
@settings(max_examples=25)
@given(
    T=st.integers(1, 5),
    M=st.integers(0, 5),
    P=st.integers(0, 4),
    N=st.integers(1, 3),
    H=st.integers(1, 4),
    clamp_len=st.none() | st.integers(1, 8),
    window=st.none() | st.integers(0, 6),
    share=st.none() | st.floats(0.05, 0.95),
    seed=st.integers(0, 1000),
)
def test_any_shape_equals_loops(tiny_model, way, T, M, P, N, H, clamp_len, window, share, seed):
    shape = {"n_heads": N, "d_head": H, "n_persistent": P}
    share = share if P else None
    model = tiny_model(seed, attention=way, n_layers=1, persistent_share=share, **shape)
    layer = model.layers[0].attention
    h = torch.randn(2, M + T, 8, dtype=torch.float64)
    actual = attend(layer, h, T, clamp_len, window)
    torch.testing.assert_close(actual, expected(layer, h, T, clamp_len, window), **EXACT)


@every_way
@pytest.mark.parametrize(
    ("T", "M", "P", "N"),
    [
        (6, 7, 5, 2),
        (6, 7, 0, 2),
        (6, 0, 5, 2),
        (6, 0, 0, 2),
        (1, 7, 5, 2),
        (1, 0, 5, 2),
        (6, 7, 5, 1),
    ],
)
def test_named_shapes_equal_loops(tiny_model, way, T, M, P, N):
    model = tiny_model(attention=way, n_layers=1, n_heads=N, n_persistent=P)
    layer = model.layers[0].attention
    h = torch.randn(3, M + T, 8, dtype=torch.float64)
    torch.testing.assert_close(attend(layer, h, T), expected(layer, h, T), **EXACT)


def test_one_token_without_memory_or_persistent_vectors_returns_its_own_value(tiny_model):
    layer = tiny_model(n_layers=1, n_persistent=0).layers[0].attention
    h = torch.randn(2, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(attend(layer, h, 1), layer.output(layer.value(h)), **EXACT)


@every_way
@pytest.mark.parametrize(("P", "share"), [(0, None), (3, None), (3, 0.5)])
@pytest.mark.parametrize("window", [None, 2])
def test_gradients_equal_finite_differences_of_the_loops(tiny_model, way, P, share, window):
    T, M = 3, 2
    shape = {"n_layers": 1, "d_model": 4, "n_heads": 2, "d_head": 2, "vocab_size": 2}
    model = tiny_model(attention=way, n_persistent=P, persistent_share=share, **shape)
    layer = model.layers[0].attention
    h = torch.randn(1, M + T, 4, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(1, T, 4, dtype=torch.float64)
    (attend(layer, h, T, window=window) * pull).sum().backward()

    arrays = {**oracles.weights_of(layer), "h": h.detach().numpy()[0].copy()}

    def loss() -> float:
        out = oracles.attention(arrays["h"], T, arrays, lambda d: oracles.sinusoid(d, 4), window)
        return float((out * pull.numpy()[0]).sum())

    gradients = {name: p.grad for name, p in layer.named_parameters()}
    gradients["h"] = h.grad[0]
    assert set(gradients) == set(arrays)
    step = 1e-5
    for name, array in arrays.items():
        slope = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            value = array[index]
            array[index] = value + step
            up = loss()
            array[index] = value - step
            slope[index] = (up - loss()) / (2 * step)
            array[index] = value
        actual = gradients[name].numpy()
        np.testing.assert_allclose(actual, slope, rtol=0, atol=1e-8, err_msg=name)


@every_way
def test_gradcheck(tiny_model, way):
    model = tiny_model(
        attention=way, n_layers=1, d_model=4, n_heads=2, d_head=2, n_persistent=3, vocab_size=2
    )
    layer = model.layers[0].attention
    layer.gate = Fixed(torch.tensor([0.3, 1.2], dtype=torch.float64, requires_grad=True))
    h = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    inputs = (h, layer.gate.value, *layer.parameters())
    padding = torch.tensor([0, 2])
    assert torch.autograd.gradcheck(lambda h, *_: attend(layer, h, 3, padding_B=padding), inputs)


def test_is_torch_sdpa_without_persistent_vectors_memory_and_positions(tiny_model):
    layer = tiny_model(n_layers=1, n_persistent=0).layers[0].attention
    with torch.no_grad():
        for weight in (layer.position.weight, layer.content_bias, layer.position_bias):
            weight.zero_()
    h = torch.randn(2, 6, 8, dtype=torch.float64)
    q, k, v = (split(linear(h), 2, 3) for linear in (layer.query, layer.key, layer.value))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(layer, h, 6), layer.output(join(heads)), **EXACT)


@pytest.mark.parametrize("M", [0, 4])
def test_is_torch_sdpa_with_the_positions_as_a_mask(tiny_model, M):
    T, N, H, D = 5, 2, 3, 8
    layer = tiny_model(n_layers=1, n_persistent=0).layers[0].attention
    h = torch.randn(2, M + T, D, dtype=torch.float64)
    q = split(layer.query(h[:, M:]), N, H)
    k, v = split(layer.key(h), N, H), split(layer.value(h), N, H)
    bias = torch.full((2, N, T, M + T), -math.inf, dtype=torch.float64)
    for i in range(T):
        for j in range(M + i + 1):
            distance = torch.from_numpy(oracles.sinusoid(M + i - j, D))
            r = (layer.position.weight @ distance).view(N, H)
            bias[:, :, i, j] = ((q[:, :, i] + layer.position_bias) * r).sum(-1) / math.sqrt(H)
    heads = F.scaled_dot_product_attention(q + layer.content_bias[:, None], k, v, attn_mask=bias)
    torch.testing.assert_close(attend(layer, h, T), layer.output(join(heads)), **EXACT)


def split(x_BTW: Tensor, N: int, H: int) -> Tensor:
    """To [B, N, T, H]."""
    return x_BTW.unflatten(-1, (N, H)).transpose(1, 2)


def join(x_BNTH: Tensor) -> Tensor:
    """To [B, T, N * H]."""
    return x_BNTH.transpose(1, 2).flatten(2)


@every_way
def test_gates_multiply_heads(tiny_model, way):
    layer = tiny_model(attention=way, n_layers=1, n_heads=3).layers[0].attention
    h = torch.randn(2, 6, 8, dtype=torch.float64)
    gate_BN = torch.tensor([[0.5, 0.0, 1.1], [1.0, -0.2, 0.7]], dtype=torch.float64)

    layer.gate = Fixed(gate_BN)
    torch.testing.assert_close(attend(layer, h, 4), expected(layer, h, 4, gate_BN=gate_BN), **EXACT)

    layer.gate = Fixed(gate_BN[0])  # one for all sequences
    same_for_all = expected(layer, h, 4, gate_BN=gate_BN[:1].expand(2, 3))
    torch.testing.assert_close(attend(layer, h, 4), same_for_all, **EXACT)

    layer.gate = Fixed(torch.ones(3))  # float32, whatever the rest is
    torch.testing.assert_close(attend(layer, h, 4), expected(layer, h, 4), **EXACT)


@every_way
def test_padding_and_window_equal_loops(tiny_model, way):
    layer = tiny_model(attention=way, n_layers=1).layers[0].attention
    h = torch.randn(4, 9, 8, dtype=torch.float64)
    padding = torch.tensor([0, 2, 6, 9])
    for window in (None, 3):
        actual = attend(layer, h, 5, window=window, padding_B=padding)
        wanted = expected(layer, h, 5, window=window, padding_B=padding)
        torch.testing.assert_close(actual, wanted, **EXACT)


@every_way
def test_what_is_masked_has_no_influence_and_no_gradient(tiny_model, way):
    layer = tiny_model(attention=way, n_layers=1).layers[0].attention
    h = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    out = attend(layer, h, 4, padding_B=torch.tensor([2]))
    out[:, 1].sum().backward()  # position 3: it sees positions 2 and 3
    seen = [bool(row.abs().sum() > 0) for row in h.grad[0]]
    assert seen == [False, False, True, True, False, False]


@every_way
def test_attention_dropout_acts_in_training_alone_and_keeps_the_mean(tiny_model, way):
    model = tiny_model(attention=way, n_layers=1, attn_dropout=0.4)
    layer = model.layers[0].attention
    h = torch.randn(1, 6, 8, dtype=torch.float64)
    wanted = expected(layer, h, 4)
    torch.testing.assert_close(attend(layer, h, 4), wanted, **EXACT)
    layer.train()
    with torch.no_grad():
        draws = attend(layer, h.expand(20_000, -1, -1), 4)
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - wanted[0]).abs() / (draws.std(0) / math.sqrt(len(draws)))
    assert error.max() < 5  # standard errors


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 5), (4, 4), (3, 7)])
def test_shift_takes_each_key_to_its_distance(T, S):
    scores = torch.randn(2, 3, T, S)
    shifted = shift_by_query(scores)
    assert shifted.shape == scores.shape
    for i in range(T):
        for j in range(S - T + i + 1):
            distance = S - T + i - j
            assert torch.equal(shifted[..., i, j], scores[..., i, S - 1 - distance])


@pytest.mark.parametrize("clamp_len", [None, 1, 3, 100])
def test_distances_fall_to_zero_and_are_clamped(clamp_len):
    wanted = [4, 3, 2, 1, 0]
    if clamp_len is not None:
        wanted = [min(distance, clamp_len) for distance in wanted]
    assert falling_distances(5, clamp_len, CPU).tolist() == wanted


@pytest.mark.parametrize("d_model", [2, 8, 10])
def test_sinusoids_equal_loops(d_model):
    distances = [0, 1, 7, 5000]
    actual = sinusoids(torch.tensor(distances), d_model, torch.float64)
    wanted = np.array([oracles.sinusoid(distance, d_model) for distance in distances])
    np.testing.assert_allclose(actual.numpy(), wanted, rtol=0, atol=1e-10)
    rounded = sinusoids(torch.tensor(distances), d_model, torch.float32)
    np.testing.assert_allclose(rounded.numpy(), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("window", [None, 0, 1, 4, 50])
@pytest.mark.parametrize(("T", "M"), [(1, 0), (4, 0), (1, 3), (4, 3)])
def test_visible_keys_equal_loops(T, M, window):
    padding = [0, 1, M + T]
    for actual, empties in (
        (Visible(T, M, window, None, CPU).mask, [0]),
        (Visible(T, M, window, torch.tensor(padding), CPU).mask, padding),
    ):
        wanted = [
            [[oracles.sees(M + i, j, window, empty) for j in range(M + T)] for i in range(T)]
            for empty in empties
        ]
        if actual is None:  # everything is visible
            actual = torch.ones(1, 1, T, M + T, dtype=torch.bool)
        assert actual[:, 0].tolist() == wanted


def test_same_length_gives_every_query_the_same_number_of_keys():
    visible = Visible(5, 6, 6, None, CPU).mask
    assert visible.sum(-1).unique().tolist() == [7]  # itself and the window
