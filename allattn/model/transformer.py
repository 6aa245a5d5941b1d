"""`TransformerLM`: all-attention and Transformer-XL in one class, with segment memory.

A block is attention, then a feed-forward block where `d_ff > 0`, each behind a LayerNorm and
around a residual connection. A layer without heads has no attention at all.
Shapes: B batch, T tokens of a segment, M remembered positions, S = M + T, D model width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allattn.config.schema import ModelConfig
from allattn.model.adaptive import AdaptiveVocabulary, SoftTargets, TiedVocabulary
from allattn.model.attention import Attention, KeyValues
from allattn.model.positions import Visible, falling_distances, sinusoids


@dataclass
class Memory:
    """What a stream left behind: the inputs of every layer at its last positions, no gradient.

    Attributes:
        hidden: for each layer [B, M, D]; None where the layer has no attention. A memory made for
            evaluation (`empty_cache`) holds the layer's keys and values instead, and is changed in
            place.
        length: M, at most mem_len; positions that never were are not there, so not attended to.
        padding: [B], how many of the M positions are empty in each sequence; None: none.
    """

    hidden: list[Tensor | KeyValues | None]
    length: int
    padding: Tensor | None = None


@dataclass
class Output:
    """Result of a forward pass."""

    memory: Memory
    nll: Tensor | None = None  # [B, T] nats, when targets were given
    log_probs: Tensor | None = None  # [B, T or 1, V], when they were not
    divergence: Tensor | None = None  # [B, T] nats, from soft targets, when these were given


class FeedForward(nn.Module):
    """Two linear maps with a ReLU (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, dropout: float):
        """Allocate."""
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        out: Tensor = self.outer(self.dropout(self.inner(x_BTD).relu()))
        return out


class Block(nn.Module):
    """One layer; `attention` is None without heads, `feed_forward` is None with d_ff = 0."""

    def __init__(self, config: ModelConfig, n_heads: int):
        """Allocate the parts that the head count and d_ff call for."""
        super().__init__()
        D = config.d_model
        self.attention: Attention | None = None
        self.feed_forward: FeedForward | None = None
        if n_heads:
            assert config.d_head is not None, "a validated config has it"
            self.attention_norm = nn.LayerNorm(D)
            self.attention = Attention(
                D,
                n_heads,
                config.d_head,
                config.n_persistent,
                config.attn_dropout,
                config.attention,
                config.persistent_share is not None,
            )
        if config.d_ff:
            self.feed_forward_norm = nn.LayerNorm(D)
            self.feed_forward = FeedForward(D, config.d_ff, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        memory: Tensor | KeyValues | None,
        positions_SD: Tensor,
        visible: Visible,
    ) -> Tensor:
        """From the segment's vectors, and the layer's memory, to the next layer's: [B, T, D]."""
        if self.attention is not None:
            h, cache = x_BTD, None
            if isinstance(memory, KeyValues):
                cache = memory
            elif memory is not None:
                h = torch.cat([memory, x_BTD], dim=1)
            h = self.attention_norm(h)
            attended = self.attention(h, x_BTD.shape[1], positions_SD, visible, cache)
            x_BTD = x_BTD + self.dropout(attended)
        if self.feed_forward is not None:
            x_BTD = x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return x_BTD


class TransformerLM(nn.Module):
    """A causal language model with Transformer-XL memory.

    Attributes:
        checkpoint_layers: recompute each layer in the backward pass instead of keeping what is in
            it (activation checkpointing).
    """

    def __init__(self, config: ModelConfig):
        """Build from a validated config whose vocab_size is known; weights are initialised."""
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size: needed to build a model; prepare the data first")
        self.config = config
        D = config.d_model
        self.vocabulary: TiedVocabulary | AdaptiveVocabulary
        if config.embedding == "adaptive":
            self.vocabulary = AdaptiveVocabulary(
                config.vocab_size, D, config.cutoffs, config.div_value
            )
        else:
            self.vocabulary = TiedVocabulary(config.vocab_size, D)
        if config.position == "learned":
            assert config.clamp_len is not None, "a validated config has it"
            self.position_table = nn.Parameter(torch.empty(config.clamp_len + 1, D))
        # torch does not say what a ModuleList holds
        blocks = nn.ModuleList(Block(config, n) for n in config.heads)
        self.layers = cast("Sequence[Block]", blocks)
        self.norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(config.dropout)
        self.checkpoint_layers = False
        self._sinusoids: Tensor | None = None
        self._masks: dict[tuple[int, int, int | None, torch.device], Visible] = {}
        init_weights(self)

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor | None = None,
        memory: Memory | None = None,
        padding_B: Tensor | None = None,
        last_only: bool = False,
        soft_targets: SoftTargets | None = None,
    ) -> Output:
        """Run one segment.

        Args:
            ids_BT: token ids.
            targets_BT: the ids to score; -1 is not scored.
            memory: what the last segment returned; None at the start of a stream.
            padding_B: at the start of a stream, how many of the first tokens are only padding.
            last_only: log-probabilities of the last position alone.
            soft_targets: with targets: what another model predicts, to learn from as well.

        Returns:
            nll with targets, else log_probs; and the memory for the next segment.
        """
        x, memory = self.hidden(ids_BT, memory, padding_B)
        x = self.dropout(self.norm(x))
        if targets_BT is not None:
            soft = None
            if soft_targets is not None:
                soft = self.vocabulary(x, "divergence", soft_targets)
            return Output(memory, nll=self.vocabulary(x, "nll", targets_BT), divergence=soft)
        x = x[:, -1:] if last_only else x
        return Output(memory, log_probs=self.vocabulary(x, "log_probs"))

    def empty_cache(self) -> Memory:
        """Memory for a stream to evaluate: holds keys and values, so none is computed twice."""
        layers: list[Tensor | KeyValues | None] = [
            None if a.attention is None else KeyValues(self.config.mem_len) for a in self.layers
        ]
        return Memory(layers, 0)

    def hidden(
        self, ids_BT: Tensor, memory: Memory | None, padding_B: Tensor | None
    ) -> tuple[Tensor, Memory]:
        """The last layer's output [B, T, D], before the final norm, and the new memory."""
        T = ids_BT.shape[1]
        M = memory.length if memory is not None else 0
        if memory is not None:
            padding_B = memory.padding
        x_BTD = self.dropout(self.vocabulary(ids_BT))
        positions_SD = self.dropout(self._positions(M + T, x_BTD.dtype))
        visible = self._visible(T, M, padding_B)
        kept = min(M + T, self.config.mem_len)
        remembered: list[Tensor | KeyValues | None] = []
        for i, layer in enumerate(self.layers):
            old = None if memory is None else memory.hidden[i]
            if layer.attention is None or isinstance(old, KeyValues):
                remembered.append(old)
            elif kept <= T:
                remembered.append(x_BTD[:, T - kept :].detach())
            else:
                both = x_BTD if old is None else torch.cat([old.to(x_BTD.dtype), x_BTD], dim=1)
                remembered.append(both[:, M + T - kept :].detach())
            if self.checkpoint_layers and self.training:
                x_BTD = checkpoint(layer, x_BTD, old, positions_SD, visible, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, old, positions_SD, visible)
        if padding_B is not None:
            padding_B = (padding_B - (M + T - kept)).clamp(min=0)
            padding_B = padding_B if padding_B.any() else None
        return x_BTD, Memory(remembered, kept, padding_B)

    def _visible(self, T: int, M: int, padding_B: Tensor | None) -> Visible:
        """The mask of these lengths, made once."""
        window = self.config.mem_len if self.config.same_length else None
        device = self.norm.weight.device
        if padding_B is not None:
            return Visible(T, M, window, padding_B, device)
        key = (T, M, window, device)
        if key not in self._masks:
            if len(self._masks) >= 4:
                self._masks.clear()  # a stream grows through a few lengths, then stays
            self._masks[key] = Visible(T, M, window, None, device)
        return self._masks[key]

    def _positions(self, S: int, dtype: torch.dtype) -> Tensor:
        config, device = self.config, self.norm.weight.device
        if config.position == "learned":
            return self.position_table[falling_distances(S, config.clamp_len, device)]
        table = self._sinusoids
        if table is None or len(table) < S or (table.dtype, table.device) != (dtype, device):
            distances = falling_distances(S, config.clamp_len, device)
            table = self._sinusoids = sinusoids(distances, config.d_model, dtype)
        return table[len(table) - S :]  # the last rows are the small distances


@contextlib.contextmanager
def watched(model: TransformerLM, watch: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Show a function every layer's attention weights; it returns those to go on with.

    Args:
        model: takes the reference attention meanwhile.
        watch: called with the layer's number and its weights [B, N, T, S + P].
    """
    attentions = [(i, a.attention) for i, a in enumerate(model.layers) if a.attention is not None]
    for i, attention in attentions:
        attention.watch = partial(watch, i)
    try:
        yield
    finally:
        for _, attention in attentions:
            attention.watch = None


@torch.no_grad()
def init_weights(model: TransformerLM) -> None:
    """The one place that gives weights their first values.

    Transformer-XL: normal(0.02), projections of clusters 0.01, as in Dai et al. 2019. All-attention
    needs sharper scores and louder persistent values, or its persistent vectors average to nothing:
    Wq, Wk, Wv, Wr at 1/sqrt(D), persistent keys at unit variance, values three times as large
    (71.0 against 93 token perplexity after 500 steps on WikiText-2, where Transformer-XL has 71.4).
    """
    config = model.config
    std = 0.02
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, TiedVocabulary):
            nn.init.normal_(module.embedding, std=std)
            nn.init.zeros_(module.bias)
        elif isinstance(module, AdaptiveVocabulary):
            for parameter in module.embeddings:
                nn.init.normal_(parameter, std=std)
            for parameter in module.projections:
                nn.init.normal_(parameter, std=0.01)
            if len(module.projections):
                nn.init.normal_(module.output_projection, std=0.01)
            for parameter in module.biases:
                nn.init.zeros_(parameter)
            if len(module.embeddings) > 1:
                nn.init.zeros_(module.cluster_weight)
                nn.init.zeros_(module.cluster_bias)
        if isinstance(module, Attention):
            nn.init.normal_(module.content_bias, std=std)
            nn.init.normal_(module.position_bias, std=std)
    if config.position == "learned":
        nn.init.normal_(model.position_table, std=std)
    if config.n_persistent:
        assert config.d_head is not None, "a validated config has it"
        for layer in model.layers:
            if layer.attention is None:
                continue
            a = layer.attention
            for linear in (a.query, a.key, a.value, a.position):
                nn.init.normal_(linear.weight, std=config.d_model**-0.5)
            nn.init.normal_(a.persistent_key, std=config.d_head**-0.5)
            nn.init.normal_(a.persistent_value, std=3 * config.n_persistent**-0.5)
            if a.persistent_bias is not None:
                assert config.persistent_share is not None, "they are there for its sake"
                # their share of a softmax over equal scores
                odds = config.persistent_share / (1 - config.persistent_share)
                bias = math.log(odds * config.content_keys / config.n_persistent)
                nn.init.constant_(a.persistent_bias, bias)


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part, from a model built without storage (so of the weights that are there)."""
    with torch.device("meta"):
        model = TransformerLM(config)
    parts = {"vocabulary": 0, "positions": 0, "attention": 0, "persistent": 0, "feed_forward": 0}
    parts["norms"] = 0
    for name, parameter in model.named_parameters():
        if "persistent_" in name:
            part = "persistent"
        elif "norm." in name:
            part = "norms"
        elif ".attention." in name:
            part = "attention"
        elif ".feed_forward." in name:
            part = "feed_forward"
        else:
            part = "positions" if name == "position_table" else "vocabulary"
        parts[part] += parameter.numel()
    return parts


def flops_per_token(config: ModelConfig) -> int:
    """Matrix-product FLOPs of scoring one token: forward, memory full, its keys and values cached.

    Two FLOPs a multiply-add. A query sees mem_len + (seq_len + 1) / 2 content keys on average.
    Positions are projected once for all sequences, and of an adaptive softmax every token needs
    only the head; neither positions nor rarer clusters are counted.
    """
    D = config.d_model
    layers = sum(config.heads) * head_flops(config) + config.n_layers * feed_forward_flops(config)
    first = config.cutoffs[0] + len(config.cutoffs) if config.cutoffs else config.vocab_size
    assert first is not None, "the vocabulary is known"
    projection = 4 * D * D if config.div_value > 1 else 0  # of the input and of the head
    return round(layers + 2 * D * first + projection)


def head_flops(config: ModelConfig) -> float:
    """What one head adds to `flops_per_token`."""
    D, H = config.d_model, config.d_head
    assert H is not None, "a validated config has it"
    return 8 * D * H + 6 * H * config.content_keys + 4 * H * config.n_persistent


def feed_forward_flops(config: ModelConfig) -> int:
    """What one layer's feed-forward block adds to `flops_per_token`."""
    return 4 * config.d_model * config.d_ff
