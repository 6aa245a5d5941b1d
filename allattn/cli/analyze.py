"""`allattn analyze`: finds the run around a model, and writes the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allattn.cli.commands import print_json
from allattn.config import ConfigError

if TYPE_CHECKING:
    import torch

    from allattn.analysis.conllu import Sentence
    from allattn.data.lanes import Corpus
    from allattn.inference.load import Source
    from allattn.model.transformer import TransformerLM


def analyze_command(args: argparse.Namespace) -> None:
    """What the heads do."""
    from allattn.analysis.conllu import read_conllu
    from allattn.analysis.report import start_report, table, write_report
    from allattn.data.lock import alone
    from allattn.inference.load import open_source, pick_device

    for name, low in (("tokens", 1), ("states", 0), ("batch_size", 1), ("seed", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(args, name)} is too small")
    if not args.out:
        raise ConfigError("--out: a folder is needed")
    device = pick_device(args.device)
    source = open_source(args.path)
    corpus = source.corpus(args.data)
    sentences = None if args.conllu is None else read_conllu(args.conllu)
    corpus.tokens(args.split)  # it is there
    with alone(Path(args.out).resolve()):
        start_report(args.out, args.overwrite)
        report, lines = _analyze(args, device, source, corpus, sentences)
        write_report(report, lines, args.out)
    if args.json:
        print_json(report)
        return
    print(table(report))
    print(Path(args.out) / "report.html")


def _analyze(
    args: argparse.Namespace,
    device: torch.device,
    source: Source,
    corpus: Corpus,
    sentences: list[Sentence] | None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report, and the lines of the run's metrics.jsonl that it goes by."""
    from allattn.analysis.analyze import Analyzer, History, Settings, State
    from allattn.analysis.survival import read_metrics
    from allattn.inference.evaluate import evaluate
    from allattn.inference.history import history_of
    from allattn.inference.load import build_model, open_source

    found = history_of(source, args.states)

    def state(name: str, of: Source) -> State:
        def load() -> TransformerLM:
            return build_model(of.weights).to(device)

        return State(name, of.run["step"], of.config.heads, of.run["head_ids"], load)

    subject = state("the model", source)
    history = History(source.run["first_heads"], [], None, [])
    for folder in found.checkpoints:
        earlier = open_source(folder)
        history.states.append(state(f"step {earlier.run['step']}", earlier))
        if folder == found.dense:
            history.dense = history.states[-1]
    notes = []
    if found.folder is None:
        notes.append("No run is around this model: its other states are not in here.")
    elif not (found.folder / "metrics.jsonl").is_file():
        notes.append(f"{found.folder} has no metrics.jsonl: what was pruned when is not known.")
    else:
        lines = read_metrics(found.folder / "metrics.jsonl")
        history.lines = [line for line in lines if line["step"] <= subject.step]
        if history.dense is None and subject.heads != history.first_heads:
            notes.append("No checkpoint from before pruning is left: roles then are not known.")
    for note in notes:
        print(f"allattn: {note}", file=sys.stderr)
    settings = Settings(args.split, args.tokens, args.batch_size, args.seed)
    P = source.config.n_persistent
    result = evaluate(subject.load(), corpus, args.split, args.batch_size)
    report = {
        "model": {
            "path": str(source.weights.path),
            "family": source.config.family,
            "step": subject.step,
            "head_ids": subject.head_ids,
            "first_heads": history.first_heads,
            "even_persistent_share": P / (P + source.config.content_keys),
            **{k: result[k] for k in ("heads", "params", "params_non_embedding", "loss", "ppl")},
        },
        "notes": notes,
    }
    return report | Analyzer(corpus, sentences, settings, _progress).analyze(
        subject, history
    ), history.lines


def _progress(what: str, n: int) -> Any:
    """A bar on a terminal, elsewhere a line."""
    from tqdm import tqdm

    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
    return tqdm(total=n, desc=what, disable=not sys.stderr.isatty(), unit_scale=True, leave=False)
