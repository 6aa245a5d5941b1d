"""From token ids to vectors and back to log-probabilities: plain tied, or adaptive by frequency.

Both classes have the same methods: `embed(ids)`, `nll(h, targets)`, `log_probs(h)`,
`logits_of(h, ids)` and `divergence(h, soft)`. They are called through `forward(x, "nll", targets)`:
ZeRO-3 shows a module's parameters only while it is called so, and once more in its backward pass.
Shapes: B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_LOGITS = 1 << 24  # the most logits to hold at a time: 64 MB in float32


class _Vocabulary(nn.Module):
    """What both kinds share."""

    vocab_size: int

    def log_probs(self, h_BTD: Tensor) -> Tensor:
        """Log-probabilities [B, T, V]."""
        raise AssertionError("each kind has its own")

    def forward(self, x: Tensor, task: str = "embed", *args: Any) -> Tensor:
        """One of the methods, by name."""
        out: Tensor = getattr(self, task)(x, *args)
        return out

    def divergence(self, h_BTD: Tensor, soft: SoftTargets) -> Tensor:
        """Distillation (Hinton et al. 2015): temperature^2 KL(soft || these), [B, T] in nats.

        Never a [tokens, vocabulary] matrix for all tokens: some at a time, as in `nll`.
        """
        size = max(_LOGITS // (4 * self.vocab_size), 1)
        h, soft_h = h_BTD.flatten(0, 1).split(size), soft.h_BTD.flatten(0, 1).split(size)
        rows = [
            checkpoint(self._divergence, *pair, soft, use_reentrant=False)
            for pair in zip(h, soft_h, strict=True)
        ]
        return torch.cat(rows).view(h_BTD.shape[:2])

    def _divergence(self, h: Tensor, soft_h: Tensor, soft: SoftTargets) -> Tensor:
        log_q = (self.log_probs(h) / soft.temperature).log_softmax(-1)
        with torch.no_grad():
            log_p = (soft.vocabulary.log_probs(soft_h) / soft.temperature).log_softmax(-1)
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        return soft.temperature**2 * kl


class TiedVocabulary(_Vocabulary):
    """One matrix for input and output (Press and Wolf 2017), with an output bias."""

    def __init__(self, vocab_size: int, d_model: int):
        """Allocate; `transformer.init_weights` gives values."""
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding = nn.Parameter(torch.empty(vocab_size, d_model))
        self.bias = nn.Parameter(torch.empty(vocab_size))

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Vectors [B, T, D], scaled by sqrt(D) as in Transformer-XL."""
        return F.embedding(ids_BT, self.embedding) * math.sqrt(self.embedding.shape[1])

    def log_probs(self, h_BTD: Tensor) -> Tensor:
        """Log-probabilities [B, T, V] in float32 (float64 for float64 input)."""
        return _wide(F.linear(h_BTD, self.embedding, self.bias)).log_softmax(-1)

    def nll(self, h_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Negative log-likelihood of each target, [B, T], in nats; 0 where the target is -1.

        Never a [tokens, vocabulary] matrix: with a large vocabulary some tokens at a time, and in
        the backward pass once more.
        """
        h, targets = h_BTD.flatten(0, 1), targets_BT.flatten()
        size = max(_LOGITS // len(self.embedding), 1)
        if len(h) <= size:
            return self._nll(h, targets).view(targets_BT.shape)
        parts = [
            checkpoint(self._nll, *part, use_reentrant=False)
            for part in zip(h.split(size), targets.split(size), strict=True)
        ]
        return torch.cat(parts).view(targets_BT.shape)

    def logits_of(self, h_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """One id's logit at each place, [B, T]: linear in h."""
        return (h_BTD * self.embedding[ids_BT]).sum(-1) + self.bias[ids_BT]

    def _nll(self, h: Tensor, targets: Tensor) -> Tensor:
        logits = _wide(F.linear(h, self.embedding, self.bias))
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


class AdaptiveVocabulary(_Vocabulary):
    """Adaptive input and adaptive softmax with tied clusters (Grave et al. 2017; Baevski and Auli
    2019; the tying of Transformer-XL on WikiText-103).

    Ids are sorted by frequency. Cluster c holds ids from cutoffs[c-1] to cutoffs[c] as vectors of
    width D / div_value**c, projected to D. The head softmax covers the first cluster and one entry
    for each other cluster. Vectors serve input and output; projections too, but the first cluster's
    (`output_projection`). With div_value 1 there are no projections.
    """

    def __init__(self, vocab_size: int, d_model: int, cutoffs: list[int], div_value: int):
        """Allocate; `transformer.init_weights` gives values."""
        super().__init__()
        self.vocab_size = vocab_size
        self.edges = [0, *cutoffs, vocab_size]
        self.d_model = d_model
        sizes = [high - low for low, high in zip(self.edges, self.edges[1:], strict=False)]
        widths = [d_model // div_value**c for c in range(len(sizes))]
        self.embeddings = nn.ParameterList(
            torch.empty(n, w) for n, w in zip(sizes, widths, strict=True)
        )
        self.biases = nn.ParameterList(torch.empty(n) for n in sizes)
        self.projections = nn.ParameterList(
            torch.empty(d_model, w) for w in (widths if div_value > 1 else ())
        )
        if div_value > 1:
            self.output_projection = nn.Parameter(torch.empty(d_model, widths[0]))
        if cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), widths[0]))
            self.cluster_bias = nn.Parameter(torch.empty(len(cutoffs)))

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Vectors [B, T, D], scaled by sqrt(D)."""
        ids = ids_BT.flatten()
        last = len(self.embeddings) - 1
        # not the projections' type: under autocast the residual stream stays float32
        out = self.embeddings[0].new_zeros(len(ids), self.d_model)
        for c, embedding in enumerate(self.embeddings):
            # the ends are open, so that an id out of range fails in the embedding
            inside = ids >= self.edges[c] if c else torch.ones_like(ids, dtype=torch.bool)
            if c < last:
                inside &= ids < self.edges[c + 1]
            rows = inside.nonzero().squeeze(1)
            vectors = F.embedding(ids[rows] - self.edges[c], embedding)
            if len(self.projections):
                vectors = F.linear(vectors, self.projections[c])
            out = out.index_add(0, rows, vectors.to(out.dtype))
        scaled: Tensor = out.view(*ids_BT.shape, self.d_model) * math.sqrt(self.d_model)
        return scaled

    def log_probs(self, h_BTD: Tensor) -> Tensor:
        """Log-probabilities [B, T, V] in float32 (float64 for float64 input)."""
        n_first = self.edges[1]
        head = self._head(h_BTD)
        parts = [head[..., :n_first]]
        for c in range(1, len(self.embeddings)):
            tail = _wide(self._logits(h_BTD, c)).log_softmax(-1)
            parts.append(tail + head[..., n_first + c - 1, None])
        return torch.cat(parts, dim=-1)

    def nll(self, h_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Negative log-likelihood of each target, [B, T], in nats; 0 where the target is -1.

        A rarer cluster is computed only for the tokens whose target lies in it.
        """
        h, targets = h_BTD.flatten(0, 1), targets_BT.flatten()
        n_first = self.edges[1]
        entry = targets.masked_fill(targets == -1, 0)  # an id out of range fails in gather below
        tails = []
        for c in range(1, len(self.embeddings)):
            low, high = self.edges[c], self.edges[c + 1]
            inside = (targets >= low) & (targets < high)
            entry = torch.where(inside, n_first + c - 1, entry)
            tails.append((c, inside.nonzero().squeeze(1)))
        loss: Tensor = -self._head(h).gather(1, entry[:, None]).squeeze(1)
        for c, rows in tails:
            tail = F.cross_entropy(
                _wide(self._logits(h[rows], c)), targets[rows] - self.edges[c], reduction="none"
            )
            loss = loss.index_add(0, rows, tail)
        return loss.masked_fill(targets == -1, 0.0).view(targets_BT.shape)

    def logits_of(self, h_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """One id's logit at each place, [B, T]: its log-probability without the normalisers.

        Linear in h. Of an id in a rarer cluster: the cluster's logit in the head, plus the id's
        logit within the cluster.
        """
        h, ids = h_BTD.flatten(0, 1), ids_BT.flatten()
        out = h.new_zeros(len(h))
        for c, (low, high) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            rows = ((ids >= low) & (ids < high)).nonzero().squeeze(1)
            logits = self._logits(h[rows], c).gather(1, ids[rows, None] - low).squeeze(1)
            if c:
                logits = logits + self._head_logits(h[rows])[:, self.edges[1] + c - 1]
            out = out.index_add(0, rows, logits)
        return out.view(ids_BT.shape)

    def _head(self, h: Tensor) -> Tensor:
        return _wide(self._head_logits(h)).log_softmax(-1)

    def _head_logits(self, h: Tensor) -> Tensor:
        logits = self._logits(h, 0)
        if len(self.embeddings) > 1:
            hidden = h @ self.output_projection if len(self.projections) else h
            clusters = F.linear(hidden, self.cluster_weight, self.cluster_bias)
            logits = torch.cat([logits, clusters], dim=-1)
        return logits

    def _logits(self, h: Tensor, c: int) -> Tensor:
        if len(self.projections):
            h = h @ (self.output_projection if c == 0 else self.projections[c])
        return F.linear(h, self.embeddings[c], self.biases[c])


@dataclass
class SoftTargets:
    """What another, frozen model predicts for the same tokens.

    Attributes:
        vocabulary: that model's.
        h_BTD: what it gives its vocabulary.
        temperature: softens both predictions.
    """

    vocabulary: TiedVocabulary | AdaptiveVocabulary
    h_BTD: Tensor
    temperature: float


def _wide(x: Tensor) -> Tensor:
    """Softmax statistics in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()
