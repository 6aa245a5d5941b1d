"""Finds the run around a model, and writes the report on what the heads of the model do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allattn.api.arguments import at_least, folder

if TYPE_CHECKING:
    import torch

    from allattn.analysis.analyze import History, State
    from allattn.analysis.conllu import Sentence
    from allattn.data.lanes import Corpus
    from allattn.inference.load import Source
    from allattn.model.transformer import TransformerLM


def analyze(
    path: str | Path,
    out: str | Path,
    *,
    conllu: str | Path | None = None,
    split: str = "valid",
    tokens: int = 8192,
    states: int = 3,
    batch_size: int = 8,
    seed: int = 1,
    overwrite: bool = False,
    data: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Look at what each head of a model does, and at what became of the heads during its run.

    Args:
        path: A run, a checkpoint or an export. The run around it, where there is one, gives the
            history.
        out: The folder for `report.html`, `report.json` and pictures.
        conllu: A treebank, to look for syntactic heads as well.
        split: The split of the corpus to look at.
        tokens: About how many of its tokens.
        states: How many earlier checkpoints to look at as well.
        batch_size: Streams side by side; it changes the speed only.
        seed: Of random orders and tests.
        overwrite: Replace a report there.
        data: A prepared corpus; None takes that of training.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        The content of `report.json`; its `heads` are a list with a row for each head.

    Raises:
        ArgumentError: An argument cannot be used.
        ValueError, OSError: The model, the corpus or the treebank is missing or damaged, or `out`
            exists.
    """
    from allattn.analysis.conllu import read_conllu
    from allattn.analysis.report import start_report, write_report
    from allattn.data.lock import alone
    from allattn.inference.load import open_source, pick_device

    lowest = {"tokens": (tokens, 1), "states": (states, 0), "batch_size": (batch_size, 1)}
    for name, (value, low) in {**lowest, "seed": (seed, 0)}.items():
        at_least(name, value, low)
    target = folder("out", out)
    where = pick_device(device)
    source = open_source(path)
    corpus = source.corpus(data)
    sentences = None if conllu is None else read_conllu(conllu)
    corpus.tokens(split)  # it is there
    with alone(target.resolve()):
        start_report(target, overwrite)
        report, lines = _report(
            source, corpus, sentences, where, states, (split, tokens, batch_size, seed)
        )
        write_report(report, lines, target)
    return report


def _report(
    source: Source,
    corpus: Corpus,
    sentences: list[Sentence] | None,
    device: torch.device,
    n_states: int,
    how: tuple[str, int, int, int],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make the report; also give the lines of the run's metrics.jsonl that it goes by."""
    from allattn.analysis.analyze import Analyzer, Settings
    from allattn.inference.evaluate import evaluate

    settings = Settings(*how)
    subject = _state("the model", source, device)
    history, notes = _history(source, subject, device, n_states)
    for note in notes:
        print(f"allattn: {note}", file=sys.stderr)
    result = evaluate(subject.load(), corpus, settings.split, settings.batch_size)
    report = {
        "model": _about(source, subject, history, result),
        "notes": notes,
    }
    analyzer = Analyzer(corpus, sentences, settings, _progress)
    return report | analyzer.analyze(subject, history), history.lines


def _state(name: str, source: Source, device: torch.device) -> State:
    """Describe a model of the run, which is loaded when it is its turn."""
    from allattn.analysis.analyze import State
    from allattn.inference.load import build_model

    def load() -> TransformerLM:
        return build_model(source.weights).to(device)

    return State(name, source.run["step"], source.config.heads, source.run["head_ids"], load)


def _history(
    source: Source, subject: State, device: torch.device, n_states: int
) -> tuple[History, list[str]]:
    """Read what the run around the model tells; also give notes on what it does not."""
    from allattn.analysis.analyze import History
    from allattn.analysis.survival import read_metrics
    from allattn.inference.history import history_of
    from allattn.inference.load import open_source

    found = history_of(source, n_states)
    history = History(source.run["first_heads"], [], None, [])
    for checkpoint in found.checkpoints:
        earlier = open_source(checkpoint)
        history.states.append(_state(f"step {earlier.run['step']}", earlier, device))
        if checkpoint == found.dense:
            history.dense = history.states[-1]
    if found.folder is None:
        return history, ["No run is around this model: its other states are not in here."]
    if not (found.folder / "metrics.jsonl").is_file():
        return history, [f"{found.folder} has no metrics.jsonl: what was pruned when is not known."]
    lines = read_metrics(found.folder / "metrics.jsonl")
    history.lines = [line for line in lines if line["step"] <= subject.step]
    if history.dense is None and subject.heads != history.first_heads:
        return history, ["No checkpoint from before pruning is left: roles then are not known."]
    return history, []


def _about(
    source: Source, subject: State, history: History, result: dict[str, Any]
) -> dict[str, Any]:
    """Describe the model itself."""
    n_persistent = source.config.n_persistent
    return {
        "path": str(source.weights.path),
        "family": source.config.family,
        "step": subject.step,
        "head_ids": subject.head_ids,
        "first_heads": history.first_heads,
        "even_persistent_share": n_persistent / (n_persistent + source.config.content_keys),
        **{k: result[k] for k in ("heads", "params", "params_non_embedding", "loss", "ppl")},
    }


def _progress(what: str, n: int) -> Any:
    """Show a bar on a terminal, and a line elsewhere."""
    from tqdm import tqdm

    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
    return tqdm(total=n, desc=what, disable=not sys.stderr.isatty(), unit_scale=True, leave=False)
