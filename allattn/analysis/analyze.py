"""All analyses of a model and of the states that its run went through, as one set of findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from allattn.analysis.ablation import ablate_each, ablation_tokens, best_single_heads
from allattn.analysis.conllu import Sentence
from allattn.analysis.curves import (
    curve_tokens,
    in_model_numbers,
    pruning_curves,
    removable_share,
)
from allattn.analysis.relevance import relevance
from allattn.analysis.roles import HeadView, count_tokens, view_heads
from allattn.analysis.sample import Sample, take_sample
from allattn.analysis.survival import Head, by_first_number, survival
from allattn.analysis.syntax import SyntaxView, syntactic_heads
from allattn.data.lanes import Corpus
from allattn.model.transformer import TransformerLM

TOLERANCE = 0.01  # of the loss: what "removable" allows


@dataclass
class State:
    """A model that a run went through.

    Attributes:
        name: for people, such as `step 300`.
        step: optimiser steps done.
        heads: by layer.
        head_ids: by layer, their numbers in the run's first model.
        load: gives the model, in evaluation mode, on the device to use.
    """

    name: str
    step: int
    heads: list[int]
    head_ids: list[list[int]]
    load: Callable[[], TransformerLM]


@dataclass
class History:
    """What is known of the run.

    Attributes:
        first_heads: head counts of its first model, by layer.
        states: to look at beside the subject, earliest first.
        dense: the last of them before pruning, if there is one.
        lines: its metrics.jsonl.
    """

    first_heads: list[int]
    states: list[State]
    dense: State | None
    lines: list[dict[str, Any]]


@dataclass
class Settings:
    """What to look at.

    Attributes:
        split: of the corpus; importance is scored on `train`.
        n_tokens: about so many of it.
        batch_size: lanes side by side; changes nothing but speed.
        seed: of random orders and of tests.
    """

    split: str
    n_tokens: int
    batch_size: int
    seed: int


class Analyzer:
    """Runs the analyses on one text."""

    def __init__(
        self,
        corpus: Corpus,
        sentences: list[Sentence] | None,
        settings: Settings,
        progress: Callable[[str, int], Any],
    ):
        """Prepare.

        Args:
            corpus: with the models' tokenizer.
            sentences: of a CoNLL-U file; None: no syntactic heads.
            settings: what to look at.
            progress: called with what begins and how much there is of it; gives a context manager
                with `update(n)`.
        """
        self.corpus, self.sentences, self.settings = corpus, sentences, settings
        self.progress = progress
        self.counts = count_tokens(corpus)

    def analyze(self, subject: State, history: History) -> dict[str, Any]:
        """Everything that `report.json` holds, beside what the caller knows of the model.

        Raises:
            RuntimeError: a loss, gradient or relevance that is not finite.
            ValueError: too little text; damaged lines of a run.
        """
        settings, model = self.settings, subject.load()
        text = self._sample(model, settings.split)
        views, syntax = self._roles(subject, model, text)
        common = {"seed": settings.seed, "batch_size": settings.batch_size}
        with self._part(subject, "relevance", text.n_tokens) as bar:
            shares = relevance(model, text, settings.batch_size, bar.update)
        n = ablation_tokens(model.config.heads, text)
        with self._part(subject, "each head removed", n) as bar:
            effects = ablate_each(model, text, **common, on_tokens=bar.update)
        with self._part(subject, "each head alone", n) as bar:
            singles = best_single_heads(model, text, **common, on_tokens=bar.update)
        by_head = {(e.layer, e.head): e for e in effects}
        heads = [
            row
            | {"relevance": shares[layer][h]}
            | {f"ablation_{k}": v for k, v in _effect(by_head[layer, h]).items()}
            for (layer, h), row in zip(by_head, self._rows(subject, views, syntax), strict=True)
        ]
        states, roles, dense_syntax = [], None, None
        for state in history.states:
            # sentences take a while: dense heads are asked which of them follow syntax
            found = self._roles(state, state.load(), text, with_syntax=state is history.dense)
            rows = self._rows(state, *found)
            states.append({"name": state.name, "step": state.step, "heads": rows})
            if state is history.dense:
                roles = _by_layer(rows, state, history.first_heads)
                dense_syntax = _syntax(found[1], state)
        states.append({"name": subject.name, "step": subject.step, "heads": heads})
        if roles is None:  # the checkpoint is gone: what went when, without roles
            roles = [[[] for _ in range(n)] for n in history.first_heads]
        now = _by_layer(heads, subject, history.first_heads)
        went = survival(history.lines, roles, {subject.step: now}) if history.lines else None
        if went and all(step is None for row in went.closed_at for step in row):
            went = None  # no head was closed
        order = went.order if went else []
        curves = [self._curves(state, order) for state in [*history.states, subject]]
        return {
            "text": {
                "split": settings.split,
                "tokens": text.n_tokens,
                "seq_len": model.config.seq_len,
                "mem_len": model.config.mem_len,
                "sentences": None if self.sentences is None else len(self.sentences),
                "seed": settings.seed,
            },
            "heads": heads,
            "syntax": _syntax(syntax, subject),
            "dense_syntax": dense_syntax,
            "single_heads": [
                asdict(s) | {"best": subject.head_ids[s.layer][s.best]} for s in singles
            ],
            "states": states,
            "survival": {"roles": roles} | asdict(went) if went else None,
            "curves": curves,
        }

    def _sample(self, model: TransformerLM, split: str) -> Sample:
        tokens = self.corpus.tokens(split)
        return take_sample(tokens, model.config.seq_len, self.settings.n_tokens)

    @contextmanager
    def _part(self, state: State, what: str, n: int) -> Iterator[Any]:
        with self.progress(f"{state.name}: {what}", n) as bar:
            yield bar

    def _roles(
        self, state: State, model: TransformerLM, text: Sample, with_syntax: bool = True
    ) -> tuple[list[list[HeadView]], SyntaxView | None]:
        eos, batch_size = self.corpus.tokenizer.eos_id, self.settings.batch_size
        with self._part(state, "what heads look at", text.n_tokens) as bar:
            views = view_heads(model, text, self.counts, eos, batch_size, bar.update)
        if self.sentences is None or not with_syntax:
            return views, None
        with self._part(state, "syntactic heads", len(self.sentences)) as bar:
            syntax = syntactic_heads(
                model, self.corpus.tokenizer, self.sentences, 2 * batch_size, bar.update
            )
        return views, syntax

    def _rows(
        self, state: State, views: list[list[HeadView]], syntax: SyntaxView | None
    ) -> list[dict[str, Any]]:
        """A row for each head, numbered as in the run's first model."""
        rows = []
        for layer, (ids, row) in enumerate(zip(state.head_ids, views, strict=True)):
            for h, (first, view) in enumerate(zip(ids, row, strict=True)):
                roles = view.roles + (syntax.roles[layer][h] if syntax else [])
                rows.append({"layer": layer, "head": first} | asdict(view) | {"roles": roles})
        return rows

    def _curves(self, state: State, order: list[Head]) -> dict[str, Any]:
        model = state.load()
        text, calibration = self._sample(model, self.settings.split), self._sample(model, "train")
        own = in_model_numbers(order, state.head_ids)
        n = curve_tokens(model.config.heads, text, calibration, own)
        with self._part(state, "pruning curves", n) as bar:
            curves = pruning_curves(
                model,
                text,
                calibration,
                own,
                seed=self.settings.seed,
                batch_size=self.settings.batch_size,
                on_tokens=bar.update,
            )
        return {
            "name": state.name,
            "step": state.step,
            "removable": {c.order: removable_share(c, TOLERANCE) for c in curves},
            "orders": {c.order: [asdict(point) for point in c.points] for c in curves},
        }


def _effect(effect: Any) -> dict[str, float]:
    values = asdict(effect)
    return {key: values[key] for key in ("delta_ppl", "delta_loss", "p_value", "p_corrected")}


def _by_layer(
    rows: Sequence[dict[str, Any]], state: State, first_heads: list[int]
) -> list[list[list[str]]]:
    """Roles by layer and head of the run's first model."""
    found = iter([row["roles"] for row in rows])
    own = [[next(found) for _ in ids] for ids in state.head_ids]
    return by_first_number(own, state.head_ids, first_heads)


def _syntax(view: SyntaxView | None, state: State) -> list[dict[str, Any]] | None:
    """Relations as JSON values, with the best accuracy of all heads."""
    if view is None:
        return None
    rows = []
    for relation in view.relations:
        row = asdict(relation)
        row["syntactic"] = [(layer, state.head_ids[layer][h]) for layer, h in relation.syntactic]
        flat = np.array([a for layer in relation.accuracy or [] for a in layer])
        rows.append(row | {"best_accuracy": float(flat.max()) if flat.size else None})
    return rows
