"""Slow, obvious float64 answers that the model is held to: loops over the equations of 1901.02860
and 1907.01470, on numpy arrays. Nothing here calls the model's code; weights are read by name.

Everything is for one sequence: shapes have no batch axis. S = M + T as in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import nn

from allattn.config import ModelConfig

Array = np.ndarray
Weights = Mapping[str, Array]


def weights_of(module: nn.Module) -> dict[str, Array]:
    """The parameters of a module, by name, as float64 arrays that share nothing with it."""
    return {name: p.detach().double().numpy().copy() for name, p in module.named_parameters()}


def part(weights: Weights, prefix: str) -> dict[str, Array]:
    """The weights under `prefix`, with it taken off."""
    return {k[len(prefix) :]: w for k, w in weights.items() if k.startswith(prefix)}


# Attention


def softmax(scores: Sequence[float]) -> list[float]:
    """Of a list of numbers."""
    top = max(scores)
    terms = [math.exp(score - top) for score in scores]
    return [term / math.fsum(terms) for term in terms]


def sinusoid(distance: int, d_model: int) -> Array:
    """The vector of one distance: all the sines, then all the cosines."""
    angles = [distance / 10000 ** (2 * k / d_model) for k in range(d_model // 2)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def sees(query: int, key: int, window: int | None = None, empty: int = 0) -> bool:
    """Whether the query at one position sees the key at another; positions count from 0 to S-1."""
    if key == query:
        return True
    if key > query or key < empty:
        return False
    return window is None or query - key <= window


def attention(
    h_SD: Array,
    T: int,
    weights: Weights,
    distance_vector: Callable[[int], Array],
    window: int | None = None,
    empty: int = 0,
    gate_N: Sequence[float] | None = None,
) -> Array:
    """One attention layer, before the residual connection: [T, D].

    Args:
        h_SD: normalised memory and segment.
        T: number of queries, the last T positions.
        weights: of the layer, by the model's names (`query.weight`, ..., `persistent_value`).
        distance_vector: from query - key to a vector [D].
        window: how far back a query sees; None: all the way.
        empty: how many of the first positions hold nothing.
        gate_N: a multiplier for each head.
    """
    M = len(h_SD) - T
    N, H = weights["content_bias"].shape
    P = weights["persistent_key"].shape[1] if "persistent_key" in weights else 0
    out = []
    for i in range(M, M + T):
        heads = []
        for n in range(N):
            rows = slice(n * H, (n + 1) * H)
            Wq, Wk = weights["query.weight"][rows], weights["key.weight"][rows]
            Wv, Wr = weights["value.weight"][rows], weights["position.weight"][rows]
            u, w = weights["content_bias"][n], weights["position_bias"][n]
            q = Wq @ h_SD[i]
            scores, values = [], []
            for j in range(len(h_SD)):
                if sees(i, j, window, empty):
                    content = (q + u) @ (Wk @ h_SD[j])
                    position = (q + w) @ (Wr @ distance_vector(i - j))
                    scores.append((content + position) / math.sqrt(H))
                    values.append(Wv @ h_SD[j])
            for p in range(P):
                key = math.sqrt(H) * weights["persistent_key"][n, p]
                bias = weights["persistent_bias"][n] if "persistent_bias" in weights else 0.0
                scores.append(q @ key / math.sqrt(H) + bias)
                values.append(math.sqrt(P) * weights["persistent_value"][n, p])
            head = np.zeros(H)
            for a, value in zip(softmax(scores), values, strict=True):
                head += a * value
            heads.append(head if gate_N is None else gate_N[n] * head)
        out.append(weights["output.weight"] @ np.concatenate(heads))
    return np.array(out)


# Vocabulary


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Of a list of numbers."""
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - total for x in logits]


def adaptive_embedding(token: int, weights: Weights, edges: Sequence[int]) -> Array:
    """The input vector [D] of a token: its cluster's row, projected, times sqrt(D)."""
    for c in range(len(edges) - 1):
        if edges[c] <= token < edges[c + 1]:
            vector = weights[f"embeddings.{c}"][token - edges[c]]
            if f"projections.{c}" in weights:
                vector = weights[f"projections.{c}"] @ vector
            return math.sqrt(len(vector)) * vector
    raise IndexError(token)


def adaptive_log_probs(h_D: Array, weights: Weights, edges: Sequence[int]) -> Array:
    """Log-probabilities [V]: of the head's words, and cluster by cluster of the others."""

    def logits(c: int) -> list[float]:
        down = h_D
        if "output_projection" in weights:
            name = "output_projection" if c == 0 else f"projections.{c}"
            down = weights[name].T @ h_D
        rows, biases = list(weights[f"embeddings.{c}"]), list(weights[f"biases.{c}"])
        if c == 0 and "cluster_weight" in weights:
            rows += list(weights["cluster_weight"])
            biases += list(weights["cluster_bias"])
        return [row @ down + bias for row, bias in zip(rows, biases, strict=True)]

    head = log_softmax(logits(0))
    result = head[: edges[1]]
    for c in range(1, len(edges) - 1):
        result += [head[edges[1] + c - 1] + log_p for log_p in log_softmax(logits(c))]
    return np.array(result)


# The whole model


def layer_norm(x: Array, weights: Weights) -> Array:
    """Of one vector [D]."""
    centred = x - x.mean()
    return centred / math.sqrt((centred**2).mean() + 1e-5) * weights["weight"] + weights["bias"]


def feed_forward(x: Array, weights: Weights) -> Array:
    """Of one vector [D]."""
    inner = np.maximum(weights["inner.weight"] @ x + weights["inner.bias"], 0)
    return weights["outer.weight"] @ inner + weights["outer.bias"]


def language_model(
    segments: Sequence[Sequence[int]], weights: Weights, config: ModelConfig
) -> list[Array]:
    """Log-probabilities [T, V] of each segment of a stream, memory passing on to the next."""
    D = config.d_model
    edges = [0, *config.cutoffs, config.vocab_size]
    vocabulary = part(weights, "vocabulary.")

    def distance_vector(distance: int) -> Array:
        if config.clamp_len is not None:
            distance = min(distance, config.clamp_len)
        if config.position == "learned":
            return weights["position_table"][distance]
        return sinusoid(distance, D)

    memory: list[list[Array]] = [[] for _ in range(config.n_layers)]
    results = []
    for ids in segments:
        if config.embedding == "adaptive":
            x = [adaptive_embedding(token, vocabulary, edges) for token in ids]
        else:
            x = [math.sqrt(D) * vocabulary["embedding"][token] for token in ids]
        for layer in range(config.n_layers):
            block = part(weights, f"layers.{layer}.")
            both = memory[layer] + x
            memory[layer] = both[max(0, len(both) - config.mem_len) :]
            if config.heads[layer]:
                normed = [layer_norm(h, part(block, "attention_norm.")) for h in both]
                window = config.mem_len if config.same_length else None
                attended = attention(
                    np.array(normed), len(ids), part(block, "attention."), distance_vector, window
                )
                x = [a + b for a, b in zip(x, attended, strict=True)]
            if config.d_ff:
                inputs = [layer_norm(h, part(block, "feed_forward_norm.")) for h in x]
                outputs = [feed_forward(h, part(block, "feed_forward.")) for h in inputs]
                x = [a + b for a, b in zip(x, outputs, strict=True)]
        final = [layer_norm(h, part(weights, "norm.")) for h in x]
        if config.embedding == "adaptive":
            rows = [adaptive_log_probs(h, vocabulary, edges) for h in final]
        else:
            E, b = vocabulary["embedding"], vocabulary["bias"]
            rows = [np.array(log_softmax(list(E @ h + b))) for h in final]
        results.append(np.array(rows))
    return results


# Sizes


def head_parameters(config: ModelConfig) -> int:
    """Of one head: Wq, Wk, Wv, Wr, Wo; u and w; the persistent keys, values and their bias."""
    D, H, P = config.d_model, config.d_head, config.n_persistent
    return 5 * D * H + 2 * H + 2 * P * H + (config.persistent_share is not None)


def layer_parameters(config: ModelConfig, n_heads: int) -> int:
    """Of one layer; without heads it has no attention and no norm before it."""
    D, F = config.d_model, config.d_ff
    attention_part = n_heads * head_parameters(config) + 2 * D if n_heads else 0
    feed_forward_part = (D * F + F) + (F * D + D) + 2 * D if F else 0
    return attention_part + feed_forward_part


def vocabulary_parameters(config: ModelConfig) -> int:
    """Of the token embedding and the output."""
    V, D = config.vocab_size, config.d_model
    if config.embedding == "tied":
        return V * D + V
    edges = [0, *config.cutoffs, V]
    total = 0
    for c in range(len(edges) - 1):
        words, width = edges[c + 1] - edges[c], D // config.div_value**c
        total += words * width + words
        if config.div_value > 1:
            total += (
                D * width * (2 if c == 0 else 1)
            )  # the first cluster's projections are not tied
    return total + len(config.cutoffs) * (D + 1)


def parameters(config: ModelConfig) -> int:
    """Of the whole model."""
    table = (config.clamp_len + 1) * config.d_model if config.position == "learned" else 0
    layers = sum(layer_parameters(config, n) for n in config.heads)
    return vocabulary_parameters(config) + table + layers + 2 * config.d_model


def flops_per_token(config: ModelConfig) -> float:
    """Forward matrix products of one token on average over a segment, the memory being full."""
    D, H, F = config.d_model, config.d_head, config.d_ff
    total = 0
    for i in range(config.seq_len):
        query = config.mem_len + i
        window = config.mem_len if config.same_length else None
        keys = sum(sees(query, key, window) for key in range(config.mem_len + config.seq_len))
        for n in config.heads:
            for _ in range(n):
                total += 4 * 2 * D * H  # q, k, v, output
                total += keys * 3 * 2 * H  # content score, position score, value
                total += config.n_persistent * 2 * 2 * H
            total += 2 * 2 * D * F
        if config.embedding == "tied":
            total += 2 * D * config.vocab_size
        else:
            edges = [0, *config.cutoffs, config.vocab_size]
            total += 2 * D * (edges[1] + len(config.cutoffs))
            if config.div_value > 1:
                total += 2 * (2 * D * D)  # into and out of the first cluster
    return total / config.seq_len
