"""Relevance by hand: the z rule, neuron by neuron, in float64 and without gradients.

Of z_k = sum_j W_kj x_j + b_k, input j takes x_j W_kj / z_k of k's relevance (see the rules in
`allattn/analysis/relevance.py`). For one sequence: T tokens, M remembered positions.
"""

from __future__ import annotations

import math

import numpy as np
import oracles
import torch

from allattn.model.transformer import Memory, TransformerLM, watched

Array = np.ndarray


def linear_rule(x: Array, W: Array, z: Array, R: Array) -> Array:
    """From the relevance R of z = W x + b to that of x."""
    result = np.zeros(len(x))
    for k in range(len(z)):
        if R[k] != 0:
            for j in range(len(x)):
                result[j] += x[j] * W[k, j] / z[k] * R[k]
    return result


def norm_map(x: Array, weights: oracles.Weights) -> Array:
    """LayerNorm with a constant scale, as a matrix [D, D]."""
    D = len(x)
    scale = 1 / math.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
    return weights["weight"][:, None] * scale * (np.eye(D) - 1 / D)


def top_logit(y: Array, weights: oracles.Weights, config) -> tuple[Array, float]:
    """Weights and value of the logit of the most likely token."""
    if config.embedding == "tied":
        logits = weights["embedding"] @ y + weights["bias"]
        return weights["embedding"][logits.argmax()], logits.max()
    edges = [0, *config.cutoffs, config.vocab_size]
    top = int(oracles.adaptive_log_probs(y, weights, edges).argmax())
    c = max(i for i in range(len(edges) - 1) if edges[i] <= top)
    down = weights["output_projection" if c == 0 else f"projections.{c}"]
    row = down @ weights[f"embeddings.{c}"][top - edges[c]]
    bias = weights[f"biases.{c}"][top - edges[c]]
    if c:
        row = row + weights["output_projection"] @ weights["cluster_weight"][c - 1]
        bias += weights["cluster_bias"][c - 1]
    return row, row @ y + bias


class Segment:
    """One segment of one sequence, run forward with everything kept."""

    def __init__(self, model: TransformerLM, ids: list[int], memory: Memory | None):
        """Attention weights and the memory are the model's; they are constants of the rules."""
        self.config, self.weights = model.config, oracles.weights_of(model)
        config, D, T = self.config, model.config.d_model, len(ids)
        seen: dict[int, Array] = {}

        def look(layer, weights):
            seen[layer] = weights[0].numpy()
            return weights

        with torch.no_grad(), watched(model, look):
            _, self.memory = model.hidden(torch.tensor([ids]), memory, None)
        vocabulary = oracles.part(self.weights, "vocabulary.")
        if config.embedding == "adaptive":
            edges = [0, *config.cutoffs, config.vocab_size]
            x = np.array([oracles.adaptive_embedding(i, vocabulary, edges) for i in ids])
        else:
            x = math.sqrt(D) * vocabulary["embedding"][ids]
        self.layers = []
        for i, layer in enumerate(model.layers):
            block = oracles.part(self.weights, f"layers.{i}.")
            now = {"x": x, "block": block}
            if layer.attention is not None:
                past = [] if memory is None else [memory.hidden[i][0].numpy()]
                both = np.concatenate([*past, x])
                norm = oracles.part(block, "attention_norm.")
                normed = np.array([oracles.layer_norm(row, norm) for row in both])
                a = seen[i]
                N, H, S = len(a), config.d_head, len(both)
                v = (normed @ block["attention.value.weight"].T).reshape(S, N, H)
                o = np.einsum("ntj,jnh->tnh", a[:, :, :S], v)
                if config.n_persistent:
                    value = math.sqrt(config.n_persistent) * block["attention.persistent_value"]
                    o += np.einsum("ntp,nph->tnh", a[:, :, S:], value)
                o = o.reshape(T, N * H)
                attended = o @ block["attention.output.weight"].T
                now |= {"both": both, "normed": normed, "a": a, "v": v, "o": o, "att": attended}
                x = x + attended
            if config.d_ff:
                norm = oracles.part(block, "feed_forward_norm.")
                normed = np.array([oracles.layer_norm(row, norm) for row in x])
                pre = (
                    normed @ block["feed_forward.inner.weight"].T + block["feed_forward.inner.bias"]
                )
                inner = np.maximum(pre, 0)
                f = inner @ block["feed_forward.outer.weight"].T + block["feed_forward.outer.bias"]
                now |= {"mid": x, "ff_normed": normed, "pre": pre, "inner": inner, "f": f}
                x = x + f
            now["out"] = x
            self.layers.append(now)

    def relevance(self, t: int) -> list[list[float]]:
        """Of each head, for the top logit of the prediction at position t."""
        out = self.layers[-1]["out"]
        R = np.zeros_like(out)
        norm = oracles.part(self.weights, "norm.")
        y = oracles.layer_norm(out[t], norm)
        row, logit = top_logit(y, oracles.part(self.weights, "vocabulary."), self.config)
        R_y = linear_rule(y, row[None], np.array([logit]), np.array([logit]))
        R[t] = linear_rule(out[t], norm_map(out[t], norm), y, R_y)
        rows: list[list[float]] = []
        for now in reversed(self.layers):
            if self.config.d_ff:
                R = self._through_feed_forward(now, R)
            heads: list[float] = []
            if "a" in now:
                heads, R = self._through_attention(now, R)
            rows.insert(0, heads)
        return rows

    def _through_feed_forward(self, now, R_TD: Array) -> Array:
        block, result = now["block"], np.zeros_like(R_TD)
        for i, R in enumerate(R_TD):
            mid, f = now["mid"][i], now["f"][i]
            result[i] = mid / now["out"][i] * R
            W2, W1 = block["feed_forward.outer.weight"], block["feed_forward.inner.weight"]
            R_inner = linear_rule(now["inner"][i], W2, f, f / now["out"][i] * R)
            R_normed = linear_rule(now["ff_normed"][i], W1, now["pre"][i], R_inner)
            norm = norm_map(mid, oracles.part(block, "feed_forward_norm."))
            result[i] += linear_rule(mid, norm, now["ff_normed"][i], R_normed)
        return result

    def _through_attention(self, now, R_TD: Array) -> tuple[list[float], Array]:
        block, a, v = now["block"], now["a"], now["v"]
        S, N, H = v.shape
        M = S - len(R_TD)
        heads, result, R_v = np.zeros(N), np.zeros_like(R_TD), np.zeros_like(v)
        Wo, Wv = block["attention.output.weight"], block["attention.value.weight"]
        for i, R in enumerate(R_TD):
            summed = now["x"][i] + now["att"][i]
            result[i] = now["x"][i] / summed * R
            R_o = linear_rule(now["o"][i], Wo, now["att"][i], now["att"][i] / summed * R)
            for n in range(N):
                for h in range(n * H, (n + 1) * H):
                    heads[n] += R_o[h]
                    for j in range(S):
                        R_v[j, n, h - n * H] += (
                            a[n, i, j] * v[j, n, h - n * H] / now["o"][i, h] * R_o[h]
                        )
        for j in range(M, S):  # relevance of the memory stays there
            z = v[j].reshape(-1)
            R_normed = linear_rule(now["normed"][j], Wv, z, R_v[j].reshape(-1))
            norm = norm_map(now["both"][j], oracles.part(block, "attention_norm."))
            result[j - M] += linear_rule(now["both"][j], norm, now["normed"][j], R_normed)
        return heads.tolist(), result
