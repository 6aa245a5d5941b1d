"""The model as a program of plain tensors: what the formats `onnx` and `pt2` are made from.

A call takes ids and a state, and gives log-probabilities and the next state:

    (ids [B, T], wanted [K], *state) -> (log_probs [B, K, V], *next state)

`wanted` says which of the T positions to give log-probabilities of: all of them to score a text,
the last one to generate. The state is `padding` [B], then for each layer with heads its keys and
its values [B, N, M, H] at the last M = mem_len positions. M never changes; what there is not yet
counts as padding: at the start of a stream `padding` is M, and keys and values are zeros that
nothing attends to. A prompt padded on the left by n tokens has M + n. So every sequence of a batch
can be at its own place, and a server can start a new one in any row.

Shapes: B batch, T tokens, K wanted, V vocabulary, N heads, H head width, M memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allattn.data.lanes import Corpus
from allattn.model.adaptive import AdaptiveVocabulary, TiedVocabulary
from allattn.model.attention import Attention, KeyValues
from allattn.model.positions import Visible
from allattn.model.scoring import perplexity, score_stream
from allattn.model.transformer import Memory, Output, TransformerLM

TOLERANCE = 1e-4  # the most that a log-probability of an export may be off
_LOGITS = 1 << 25  # the most log-probabilities to hold at a time: 128 MB

# as `Program.forward`; a state is tensors, only that of `model_call` is its own affair
Call = Callable[[Tensor, Tensor, list[Any]], Sequence[Any]]


class Program(nn.Module):
    """A `TransformerLM` with all that depends on the weights alone computed once."""

    def __init__(self, model: TransformerLM):
        """Take a model over, in evaluation mode: it cannot be used otherwise afterwards.

        The longest call is the model's seq_len: vectors of relative positions are projected here,
        once, for the distances up to mem_len + seq_len.
        """
        super().__init__()
        config = model.config
        self.config = config
        self.vocabulary, self.norm = model.vocabulary, model.norm
        self.layers = model.layers
        dtype = model.norm.weight.dtype
        # a row more than is used: the part that is used is then never the whole table, which
        # torch.export would take for a case of its own
        table_SD = model._positions(config.mem_len + config.seq_len + 1, dtype)
        fixed = nn.ModuleList(_Fixed(a, table_SD) for a in self.attentions())
        self.fixed = cast("Sequence[_Fixed]", fixed)

    def attentions(self) -> list[Attention]:
        """Those of the layers that have heads, and so a memory."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    def forward(self, ids: Tensor, wanted: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
        """One call; see the module. State tensors are not changed in place."""
        T, M = ids.shape[1], self.config.mem_len
        padding, held = state[0], list(state[1:])
        window = M if self.config.same_length else None
        visible = Visible(T, M, window, padding, ids.device)
        fixed = iter(self.fixed)
        following = [(padding - T).clamp(min=0)]
        x = embed(self.vocabulary, ids)
        for layer in self.layers:
            if layer.attention is None:
                x = layer(x, None, None, visible)
                continue
            memory = _Held(next(fixed), held.pop(0), held.pop(0), M + T)
            x = layer(x, memory, None, visible)
            # a program compiled ahead takes it that what it is given is contiguous
            kept = (memory.keys, memory.values)
            following += [held_BNSH.narrow(2, T, M).contiguous() for held_BNSH in kept]
        h = self.norm(x).index_select(1, wanted)
        # in two dimensions a matrix product with the vocabulary needs no transposed copy of it
        log_probs = self.vocabulary.log_probs(h.flatten(0, 1))
        return (log_probs.unflatten(0, (-1, wanted.shape[0])), *following)

    def start(self, batch: int) -> list[Tensor]:
        """The state of a stream at its start."""
        M = self.config.mem_len
        dtype = self.norm.weight.dtype
        state = [torch.full((batch,), M, dtype=torch.long)]
        for attention in self.attentions():
            shape = (batch, attention.n_heads, M, attention.d_head)
            state += [torch.zeros(shape, dtype=dtype) for _ in ("keys", "values")]
        return state

    def state_names(self) -> list[str]:
        """Names of the state's tensors, in order: padding, keys_00, values_00, ..."""
        names = ["padding"]
        for i, layer in enumerate(self.layers):
            if layer.attention is not None:
                names += [f"keys_{i:02d}", f"values_{i:02d}"]
        return names


class _Fixed(nn.Module):
    """What an attention layer computes from its weights alone; it then loses those weights."""

    def __init__(self, attention: Attention, table_SD: Tensor):
        super().__init__()
        self.positions: Tensor
        self.key: Tensor | None
        self.value: Tensor | None
        with torch.no_grad():
            key_NHP, value_NPH = attention._plain_persistent()
            # a parameter, since the ONNX exporter of PyTorch 2.6 fails on products with a buffer
            self.key_value = nn.Parameter(attention._key_value().clone())
            self.register_buffer("positions", attention._project(table_SD).contiguous())
            self.register_buffer("key", None if key_NHP is None else key_NHP.contiguous())
            self.register_buffer("value", None if value_NPH is None else value_NPH.clone())
        del attention.key, attention.value, attention.position
        if attention.n_persistent:
            del attention.persistent_key, attention.persistent_value


class _Held(KeyValues):
    """A layer's memory as tensors: instead of a buffer, new ones each time."""

    def __init__(self, fixed: _Fixed, keys_BNMH: Tensor, values_BNMH: Tensor, S: int):
        self.fixed, self.keys, self.values, self.S = fixed, keys_BNMH, values_BNMH, S

    def append(  # type: ignore[override]  # `_reference`, the only taker here, wants these two
        self, kv_2BNTH: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, kv_2BNTH[0]], dim=2)
        self.values = torch.cat([self.values, kv_2BNTH[1]], dim=2)
        return self.keys, self.values

    def once(self, name: str, make: Callable[[], object]) -> object:
        if name == "key_value":
            return self.fixed.key_value
        assert name == "plain_persistent", name
        return self.fixed.key, self.fixed.value

    def positions(self, positions_SD: Tensor | None, project: Callable[[Tensor], Tensor]) -> Tensor:
        table = self.fixed.positions
        return table.narrow(
            1, table.shape[1] - self.S, self.S
        )  # the last rows are the small distances


def embed(vocabulary: TiedVocabulary | AdaptiveVocabulary, ids_BT: Tensor) -> Tensor:
    """As `vocabulary.embed`, without shapes that depend on the ids: every cluster for every id."""
    if not isinstance(vocabulary, AdaptiveVocabulary):
        return vocabulary.embed(ids_BT)
    out: Tensor | None = None
    last = len(vocabulary.embeddings) - 1
    for c, embedding in enumerate(vocabulary.embeddings):
        # the ends are open, so that an id out of range fails in the embedding
        inside = ids_BT >= vocabulary.edges[c] if c else torch.ones_like(ids_BT, dtype=torch.bool)
        if c < last:
            inside = inside & (ids_BT < vocabulary.edges[c + 1])
        rows = (ids_BT - vocabulary.edges[c]) * inside
        vectors = F.embedding(rows, embedding)
        if len(vocabulary.projections):
            vectors = F.linear(vectors, vocabulary.projections[c])
        out = vectors if out is None else torch.where(inside[..., None], vectors, out)
    assert out is not None, "there is at least one cluster"
    return out * math.sqrt(vocabulary.d_model)


def trace(program: Program) -> torch.export.ExportedProgram:
    """The program's operations, for any batch and any length up to the model's seq_len."""
    batch = torch.export.Dim("batch", min=1)
    length: torch.export.Dim | None = torch.export.Dim("length", min=1, max=program.config.seq_len)
    wanted = torch.export.Dim("wanted", min=1)
    if program.config.seq_len == 1:
        length = None  # then there is nothing to vary
    # a size of 1 would be taken for one that never changes
    state = program.start(2)
    ids = torch.zeros(2, min(3, program.config.seq_len), dtype=torch.long)
    return torch.export.export(
        program,
        (ids, torch.zeros(2, dtype=torch.long), state),
        dynamic_shapes=({0: batch, 1: length}, {0: wanted}, [{0: batch}] * len(state)),
        strict=False,
    )


def model_call(model: TransformerLM) -> Call:
    """A model as it is, called like a program; its state is a `Memory`."""

    def call(ids: Tensor, wanted: Tensor, state: list[Any]) -> list[Any]:
        memory = state[1] if len(state) == 2 and isinstance(state[1], Memory) else None
        padding_B = state[0] - model.config.mem_len if memory is None else None
        output = model(ids, memory=memory, padding_B=padding_B)
        return [output.log_probs.index_select(1, wanted), state[0], output.memory]

    return call


@torch.no_grad()
def worst_difference(call: Call, expected: Call, program: Program) -> float:
    """How far two programs' log-probabilities are apart at most.

    With several batches and lengths, segments one after the other, from an empty memory to a full
    one, and sequences that are padded by different numbers of tokens.

    Args:
        call: what to check.
        expected: what it should be.
        program: for its sizes and its state at the start.
    """
    config, worst = program.config, 0.0
    assert config.vocab_size is not None, "a model has it"
    generator = torch.Generator().manual_seed(0)
    longest = min(config.seq_len, max(1, _LOGITS // (3 * config.vocab_size)))
    full = -(-config.mem_len // longest) + 1  # segments that fill the memory, and one more
    for batch, lengths in ((1, [1, longest, 1]), (3, [longest, 1, (longest + 1) // 2])):
        padding = torch.arange(batch).clamp(max=lengths[0] - 1)
        state, other = program.start(batch), program.start(batch)
        state[0] += padding
        other[0] += padding
        for T in [*lengths, *[longest] * full]:
            ids = torch.randint(config.vocab_size, (batch, T), generator=generator)
            found, *state = call(ids, torch.arange(T), state)
            wanted, *other = expected(ids, torch.arange(T), other)
            real = torch.arange(T) >= padding[:, None]
            padding = torch.zeros_like(padding)
            difference = (found - wanted).abs()[real].max().item()
            worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


def check(call: Call, expected: Call, program: Program, what: str) -> None:
    """Refuse a program that is not the model.

    Raises:
        ValueError: log-probabilities differ by more than TOLERANCE.
    """
    worst = worst_difference(call, expected, program)
    if not worst <= TOLERANCE:
        raise ValueError(
            f"{what}: its log-probabilities are off by up to {worst:.2g}, more than {TOLERANCE}; "
            "nothing was exported"
        )


def program_perplexity(call: Call, program: Program, corpus: Corpus, split: str) -> float:
    """Token perplexity of a split, each token scored once, as `allattn evaluate` gives it."""
    nats, n = program_nats(call, program, corpus, split)
    return perplexity(nats / n)


def program_nats(call: Call, program: Any, corpus: Corpus, split: str) -> tuple[float, int]:
    """Total loss of a split in nats, and the number of tokens.

    Args:
        call: what runs.
        program: a `Program`, or what has its `config`, `start` and a parameter.
        corpus: with the model's tokenizer.
        split: of it.
    """
    config = program.config

    def forward(ids_BT: Tensor, targets_BT: Tensor, memory: Memory | None) -> Output:
        B, T = ids_BT.shape
        state: list[Any] = program.start(B) if memory is None else [memory.padding, *memory.hidden]
        log_probs, *state = call(ids_BT, torch.arange(T), state)
        nll = -log_probs.gather(2, targets_BT.clamp(min=0)[..., None]).squeeze(2)
        return Output(Memory(state[1:], config.mem_len, state[0]), nll=nll)

    batch = max(1, min(8, _LOGITS // (config.seq_len * config.vocab_size)))
    nats, n = score_stream(
        forward,
        program,
        corpus.tokens(split),
        corpus.tokenizer.eos_id,
        seq_len=config.seq_len,
        batch_size=batch,
        cache=False,
    ).tolist()
    return nats, int(n)
