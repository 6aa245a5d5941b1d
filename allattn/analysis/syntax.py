"""Syntactic heads: whose largest weight follows a dependency (Voita et al. 2019, section 5.2).

A word's query is its last piece, with which the model has seen all of it. A head follows a relation
where the largest of that query's weights lies on a piece of the other word. Content keys alone
count: persistent vectors are no words, and an end-of-line token is left out, as in the paper, since
heads with nothing to do look there. The piece of a space belongs to the word after it.

A causal model sees only what lies to the left, so of each relation only one direction can be seen:
from the later word to the earlier one. The other is counted as left out.

Subtypes belong to their relation (`nsubj:pass` to `nsubj`), and `dobj` is `obj`. Shapes: R queries,
N heads, S content keys, K relations and directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from allattn.analysis.conllu import Sentence
from allattn.data.base import Tokenizer
from allattn.model.transformer import Memory, TransformerLM, watched

RELATIONS = ("nsubj", "obj", "amod", "advmod")
DIRECTIONS = ("d->h", "h->d")  # from the dependent to its head, from the head to its dependent
# The paper asks for 10% more than the baseline and leaves open of what. Percentage points are the
# stricter reading: a tenth of a low baseline would make heads syntactic by chance.
BAR_PERCENT = 10
_SAME = {"dobj": "obj"}  # the name before Universal Dependencies 2
KINDS = [(relation, direction) for relation in RELATIONS for direction in DIRECTIONS]


@dataclass
class RelationView:
    """How well each head follows a relation in one direction.

    Attributes:
        relation: one of `RELATIONS`.
        direction: one of `DIRECTIONS`.
        n: relations looked at.
        to_the_right: left out, since the other word comes later.
        out_of_reach: left out, since memory ends before the other word (a long sentence).
        unmapped: left out, since the tokens do not show the words.
        offset: most frequent place of the other word among the n, in words: -1 is the one before.
            Of equally frequent ones the nearest; None where n is 0.
        baseline: share of the n where the other word is there; None where n is 0.
        accuracy: by layer and head, the share of the n where the largest weight is on the other
            word; None where n is 0.
        syntactic: layers and heads whose accuracy is at least 10 percentage points above that.
    """

    relation: str
    direction: str
    n: int = 0
    to_the_right: int = 0
    out_of_reach: int = 0
    unmapped: int = 0
    offset: int | None = None
    baseline: float | None = None
    accuracy: list[list[float]] | None = None
    syntactic: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The role of its syntactic heads, such as `nsubj h->d`."""
        return f"{self.relation} {self.direction}"


@dataclass
class SyntaxView:
    """What `syntactic_heads` found.

    Attributes:
        relations: one view for each of `KINDS`.
        sentences: how many were given.
        unmapped_sentences: of them skipped, since some piece belongs to two words.
        roles: by layer and head, the names of the relations that it is syntactic for.
    """

    relations: list[RelationView]
    sentences: int
    unmapped_sentences: int
    roles: list[list[list[str]]]


@dataclass
class _Query:
    """Where a word's query is, and the pieces [low, high) of the other word."""

    kind: int
    place: int
    low: int
    high: int


def syntactic_heads(
    model: TransformerLM,
    tokenizer: Tokenizer,
    sentences: Sequence[Sentence],
    batch_size: int = 16,
    on_sentences: Callable[[int], object] = lambda n: None,
) -> SyntaxView:
    """Find the heads that follow dependencies.

    Each sentence stands alone after an end-of-line token; one of more than seq_len tokens is read
    in segments, with memory. Its words are joined by spaces, as tokenised corpora have them.

    Args:
        model: in evaluation mode; on any device.
        tokenizer: that it was trained with.
        sentences: as `read_conllu` gives them.
        batch_size: sentences side by side; changes nothing but time and memory.
        on_sentences: called with a number of sentences that are done, for progress.
    """
    assert not model.training
    views = [RelationView(*kind) for kind in KINDS]
    offsets: list[Counter[int]] = [Counter() for _ in KINDS]
    encoded: list[tuple[list[int], list[_Query]]] = []
    unmapped = 0
    for sentence in sentences:
        found = pieces_of_words(tokenizer, [word.form for word in sentence])
        unmapped += found is None
        ids, pieces = found or ([], [range(0)] * len(sentence))
        # one token later than in the sentence: the end of the line before comes first
        pieces = [range(p.start + 1, p.stop + 1) for p in pieces]
        queries = _queries(model, sentence, pieces, views, offsets)
        encoded.append(([tokenizer.eos_id, *ids], queries))
    hits = [torch.zeros(len(KINDS), n, dtype=torch.long) for n in model.config.heads]
    encoded.sort(key=lambda pair: len(pair[0]))  # like lengths together: little padding
    for first in range(0, len(encoded), batch_size):
        batch = encoded[first : first + batch_size]
        _count_hits(model, tokenizer.eos_id, batch, hits)
        on_sentences(len(batch))
    roles: list[list[list[str]]] = [[[] for _ in range(n)] for n in model.config.heads]
    for k, view in enumerate(views):
        _judge(view, offsets[k], [layer[k].tolist() for layer in hits])
        for layer, head in view.syntactic:
            roles[layer][head].append(view.name)
    return SyntaxView(views, len(sentences), unmapped, roles)


def pieces_of_words(
    tokenizer: Tokenizer, forms: Sequence[str]
) -> tuple[list[int], list[range]] | None:
    """Ids of words joined by spaces, and the places among them of each word's pieces.

    The words' ends are found by encoding one word more each time, which holds for any tokenizer;
    None where one does not encode the words one after the other, so that a piece spans two.
    """
    ids = tokenizer.encode(" ".join(forms))
    pieces, end = [], 0
    for n in range(1, len(forms) + 1):
        prefix = tokenizer.encode(" ".join(forms[:n]))
        if prefix != ids[: len(prefix)] or len(prefix) < end:
            return None
        pieces.append(range(end, len(prefix)))
        end = len(prefix)
    return ids, pieces


def _queries(
    model: TransformerLM,
    sentence: Sentence,
    pieces: list[range],
    views: list[RelationView],
    offsets: list[Counter[int]],
) -> list[_Query]:
    """What to look at in a sentence; counts it, and what is left out."""
    queries = []
    for dependent, word in enumerate(sentence):
        relation = word.relation.partition(":")[0]
        relation = _SAME.get(relation, relation)
        if relation not in RELATIONS or word.head is None:
            continue
        for direction in DIRECTIONS:
            kind = KINDS.index((relation, direction))
            view = views[kind]
            one, other = dependent, word.head
            if direction == "h->d":
                one, other = other, one
            if other > one:
                view.to_the_right += 1
                continue
            if not pieces[one] or not pieces[other]:
                view.unmapped += 1
                continue
            query = pieces[one][-1]
            if pieces[other][-1] < _first_seen(model, query):
                view.out_of_reach += 1
                continue
            view.n += 1
            offsets[kind][other - one] += 1
            queries.append(_Query(kind, query, pieces[other].start, pieces[other].stop))
    return queries


def _first_seen(model: TransformerLM, query: int) -> int:
    """The first place that a query sees."""
    config = model.config
    start = query - query % config.seq_len
    first = max(start - config.mem_len, 0)
    return max(first, query - config.mem_len) if config.same_length else first


@torch.no_grad()
def _count_hits(
    model: TransformerLM,
    eos_id: int,
    batch: list[tuple[list[int], list[_Query]]],
    hits: list[Tensor],
) -> None:
    """Run sentences side by side; add to hits, by layer [K, N], where the largest weight is."""
    device, seq_len = next(model.parameters()).device, model.config.seq_len
    # the longest is the last; padding comes after a sentence, where a causal model cannot see it
    length = len(batch[-1][0])
    ids_BL = torch.tensor([ids + [eos_id] * (length - len(ids)) for ids, _ in batch], device=device)
    flat = [(b, q.kind, q.place, q.low, q.high) for b, (_, qs) in enumerate(batch) for q in qs]
    memory: Memory | None = None
    for start in range(0, length, seq_len):
        if not any(row[2] >= start for row in flat):
            break  # only padding and words that nothing is asked of are left
        first = start if memory is None else start - memory.length
        end = min(start + seq_len, length)
        b_R, kind_R, place_R, low_R, high_R = torch.tensor(
            [row for row in flat if start <= row[2] < end], device=device, dtype=torch.long
        ).view(-1, 5).T  # fmt: skip
        asked = _Asked(
            b_R,
            place_R - start,
            (ids_BL[:, first:end] == eos_id)[b_R],
            low_R - first,
            high_R - first,
            kind_R,
        )
        with watched(model, partial(_count_layer, asked, hits)):
            _, memory = model.hidden(ids_BL[:, start:end], memory, None)


@dataclass
class _Asked:
    """The queries of a segment; places as the weights have them."""

    sequence_R: Tensor
    query_R: Tensor
    is_eos_RS: Tensor
    low_R: Tensor
    high_R: Tensor
    kind_R: Tensor


def _count_layer(asked: _Asked, hits: list[Tensor], layer: int, weights: Tensor) -> Tensor:
    """Add a layer's hits; the weights [B, N, T, S + P] go on as they are."""
    S = asked.is_eos_RS.shape[1]
    content_RNS = weights[asked.sequence_R, :, asked.query_R, :S]
    largest_RN, where_RN = content_RNS.masked_fill(asked.is_eos_RS[:, None], -1).max(dim=-1)
    is_inside_RN = (where_RN >= asked.low_R[:, None]) & (where_RN < asked.high_R[:, None])
    # where all of the weight is elsewhere, the largest is 0 and says nothing
    hit_RN = is_inside_RN & (largest_RN > 0)
    hits[layer].index_add_(0, asked.kind_R.cpu(), hit_RN.long().cpu())
    return weights


def _judge(view: RelationView, offsets: Counter[int], hits: list[list[int]]) -> None:
    """Fill in what follows from the counts."""
    if not view.n:
        return
    view.offset = min(offsets, key=lambda offset: (-offsets[offset], -offset))
    at_offset = offsets[view.offset]
    view.baseline = at_offset / view.n
    view.accuracy = [[count / view.n for count in layer] for layer in hits]
    view.syntactic = [
        (i, h)
        for i, layer in enumerate(hits)
        for h, count in enumerate(layer)
        if 100 * (count - at_offset) >= BAR_PERCENT * view.n  # whole numbers: no rounding
    ]
