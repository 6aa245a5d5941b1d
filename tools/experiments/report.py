"""Tables and plots of an experiment, from its results alone: `table.md`, `plot.png`."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from experiment import Experiment, Run
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from measure import in_turn

from allattn.analysis.survival import read_metrics
from allattn.config import ModelConfig, PruneConfig, StageConfig
from allattn.data.lanes import Corpus
from allattn.inference.load import open_source
from allattn.inference.prune import prune
from allattn.model.scoring import score_stream
from allattn.model.transformer import TransformerLM
from allattn.training.state import checkpoints_of, read_json, write_json

Row = dict[str, Any]
PERPLEXITIES = ("valid_ppl", "test_ppl", "word_ppl")  # word_ppl: of the test split


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def run_table(results: dict[str, Any]) -> str:
    """Every run; perplexities are per token, word ppl per word of the test split; valid ones as at
    the end of training.
    """
    rows = [
        [
            f"{row['label']}, seed {row['seed']}", str(row["steps"]), str(sum(row["heads"])),
            " ".join(map(str, row["heads"])), f"{row['params_non_embedding']:,}",
            *("-" if row[key] is None else f"{row[key]:.2f}" for key in PERPLEXITIES),
            f"{row['train_seconds']:,.0f}",
            "-" if row["wall_seconds"] is None else f"{row['wall_seconds']:,.0f}",
        ]
        for row in results["runs"]
    ]  # fmt: skip
    head = ["run", "steps", "heads", "by layer", "parameters", "valid ppl", "test ppl", "word ppl",
            "train s, from step 0", "wall s, own part"]  # fmt: skip
    return markdown(head, rows)


def by_entry(results: dict[str, Any], key: str) -> list[list[Row]]:
    """Rows that have the key, those of one entry (its seeds) together."""
    found: dict[str, list[Row]] = {}
    for row in results["runs"]:
        if row[key] is not None:
            found.setdefault(row["name"], []).append(row)
    return list(found.values())


def mean(rows: list[Row], key: str) -> float:
    """Over the seeds of an entry."""
    return statistics.fmean(row[key] for row in rows)


def size(experiment: Experiment, results: dict[str, Any]) -> str:
    """Test perplexity against parameters outside the embeddings, a line a group, through the
    means over seeds; a dash is a seed.
    """
    figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    by_group: dict[str, list[list[Row]]] = {}
    for rows in by_entry(results, "test_ppl"):
        if rows[0]["group"]:
            by_group.setdefault(rows[0]["group"], []).append(rows)
    for group, entries in by_group.items():
        entries.sort(key=_millions)
        sizes, ppls = [_millions(e) for e in entries], [mean(e, "test_ppl") for e in entries]
        (line,) = axes.plot(sizes, ppls, "o-", label=group)
        for rows, x in zip(entries, sizes, strict=True):
            if len(rows) > 1:
                axes.plot(
                    [x] * len(rows), [r["test_ppl"] for r in rows], "_", color=line.get_color()
                )
    axes.set_xlabel("parameters outside the embeddings (millions)")
    axes.set_ylabel("test perplexity a token")
    if by_group:
        axes.legend()
    figure.savefig(experiment.folder / "plot.png", dpi=150)
    plt.close(figure)
    return share_table(results) + "\n" + run_table(results)


def mean_table(results: dict[str, Any]) -> str:
    """Valid perplexity of every entry, as training ended, over its seeds."""
    rows = [
        [
            rows[0]["label"], rows[0]["group"], "/".join(str(sum(row["heads"])) for row in rows),
            f"{mean(rows, 'valid_ppl'):.2f}", " ".join(f"{row['valid_ppl']:.2f}" for row in rows),
        ]
        for rows in by_entry(results, "valid_ppl")
        if rows[0]["group"]
    ]  # fmt: skip
    return markdown(["entry", "group", "heads", "mean valid ppl", "of each seed"], rows)


def _millions(rows: list[Row]) -> float:
    return rows[0]["params_non_embedding"] / 1e6


def share_table(results: dict[str, Any]) -> str:
    """Test perplexity of each group at each share of the full size, with parameters and seeds."""
    entries = [rows for rows in by_entry(results, "test_ppl") if rows[0]["share"]]
    groups = list(dict.fromkeys(rows[0]["group"] for rows in entries))
    cells: dict[tuple[float, str], str] = {}
    for rows in entries:
        seeds = f", {len(rows)} seeds" if len(rows) > 1 else ""
        text = f"{mean(rows, 'test_ppl'):.2f} ({_millions(rows):.2f}M{seeds})"
        cells[rows[0]["share"], rows[0]["group"]] = text
    table = [
        [f"{share:.0%}", *(cells.get((share, group), "-") for group in groups)]
        for share in sorted({share for share, _ in cells}, reverse=True)
    ]
    return markdown(["share", *groups], table)


def bars(experiment: Experiment, results: dict[str, Any]) -> str:
    """Valid perplexity of every entry, groups side by side; a bar is the mean, a mark a seed."""
    entries = [rows for rows in by_entry(results, "valid_ppl") if rows[0]["group"]]
    groups = list(dict.fromkeys(rows[0]["group"] for rows in entries))
    figure, panels = plt.subplots(
        1, max(len(groups), 1), figsize=(2 + 5 * max(len(groups), 1), 4.5), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axes, group in zip(panels[0], groups, strict=False):
        members = [rows for rows in entries if rows[0]["group"] == group]
        members.sort(key=lambda rows: -mean(rows, "valid_ppl"))
        means = [mean(rows, "valid_ppl") for rows in members]
        axes.barh([_bar(rows) for rows in members], means, color="lightsteelblue")
        for i, rows in enumerate(members):
            axes.plot([row["valid_ppl"] for row in rows], [i] * len(rows), "|", color="black")
        axes.set_xlim(0.95 * means[-1], None)
        axes.set_title(group)
        axes.set_xlabel("valid ppl a token")
    figure.savefig(experiment.folder / "plot.png", dpi=150)
    plt.close(figure)
    return mean_table(results) + "\n" + run_table(results)


def _bar(rows: list[Row]) -> str:
    """Name of a bar; a penalty ends with other numbers of heads than a budget."""
    return f"{rows[0]['label']} ({'/'.join(str(sum(row['heads'])) for row in rows)} heads)"


def heads(experiment: Experiment, results: dict[str, Any]) -> str:
    """How many heads each layer has open as training goes on, a panel an entry (its first seed)."""
    finished = [run for run in experiment.runs if experiment.finished(run) and run.after]
    shown = list({run.entry["name"]: run for run in reversed(finished)}.values())[::-1]
    figure, panels = plt.subplots(
        max(len(shown), 1), 1, figsize=(7, 1 + 1.9 * max(len(shown), 1)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    for axes, run in zip(panels[:, 0], shown, strict=False):
        _head_picture(axes, experiment, run)
    figure.savefig(experiment.folder / "plot.png", dpi=150)
    plt.close(figure)
    return mean_table(results) + "\n" + run_table(results)


def _head_picture(axes: Axes, experiment: Experiment, run: Run) -> None:
    begun = read_metrics(experiment.path(run) / "metrics.jsonl")
    dense = sum(stage.steps for stage in itertools.takewhile(_dense, run.config.stages))
    lines = [x for x in begun if "heads_by_layer" in x and x["step"] >= dense]
    steps = [line["step"] for line in lines]
    counts = [line["heads_by_layer"] for line in lines]
    layers = len(counts[0]) if counts else 0
    for layer in range(layers):  # a little apart, or equal counts would hide each other
        shifted = [by_layer[layer] + 0.03 * layer for by_layer in counts]
        axes.plot(steps, shifted, label=f"layer {layer}", color=plt.cm.viridis(layer / layers))
    axes.set_title(f"{run.label}, seed {run.seed}", fontsize=9)
    axes.set_ylabel("open heads", fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


def _dense(stage: StageConfig) -> bool:
    return stage.prune is None


def removable(experiment: Experiment, results: dict[str, Any]) -> str:
    """Heads that can go without training at under 1% of loss, checkpoint by checkpoint (Michel).

    What was found is kept beside each checkpoint: a second call only draws.
    """
    shares = [0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.5]
    shares = [0.75, 0.5] if experiment.smoke else shares
    figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    rows, curves = [], []
    for run in experiment.runs:
        if not experiment.finished(run):
            continue
        for checkpoint in checkpoints_of(experiment.path(run)):
            curve = _curve(checkpoint, run, [1.0, *shares])
            curves.append({"run": run.name, "step": curve[0]["step"], "curve": curve})
            dense = curve[0]
            last = _last_fine(curve)
            rows.append([
                f"{run.label}, seed {run.seed}", str(dense["step"]), f"{dense['ppl']:.2f}",
                f"{1 - sum(last['heads']) / sum(dense['heads']):.0%}", f"{last['ppl']:.2f}",
                f"{1 - last['flops_per_token'] / dense['flops_per_token']:.0%}",
                f"{1 - last['seconds'] / dense['seconds']:.0%}",
            ])  # fmt: skip
            axes.plot(
                [1 - sum(x["heads"]) / sum(dense["heads"]) for x in curve],
                [x["loss"] / dense["loss"] - 1 for x in curve],
                "o-",
                label=f"{run.label}, seed {run.seed}, step {dense['step']}",
            )
    axes.axhline(0.01, color="grey", lw=1)
    axes.set_ylim(-0.005, 0.1)
    axes.set_xlabel("share of heads removed, no training after")
    axes.set_ylabel("relative increase of the valid loss")
    if rows:
        axes.legend(fontsize=7)
    figure.savefig(experiment.folder / "plot.png", dpi=150)
    plt.close(figure)
    results["curves"] = curves
    head = ["model", "step", "ppl", "heads removable", "ppl then", "FLOPs saved", "time saved"]
    return markdown(head, rows) + "\n" + run_table(results)


def _last_fine(curve: list[Row]) -> Row:
    """The last share before the first that costs 1% or more, whatever lies beyond that."""
    limit = 1.01 * curve[0]["loss"]
    return list(itertools.takewhile(lambda x: x["loss"] < limit, curve))[-1]


def _curve(checkpoint: Path, run: Run, shares: list[float]) -> list[Row]:
    """Loss, size and evaluation time of a checkpoint at falling shares of heads."""
    named = "-".join(f"{share:g}" for share in shares)
    kept = checkpoint.parent.parent / f"removable_{checkpoint.name}_{named}.json"
    if not kept.exists():
        source, corpus = open_source(str(checkpoint)), Corpus(run.config.data.dir)
        batches = 1 if run.config.train.batch_size == 2 else 8
        settings = PruneConfig(method="importance", batches=batches)
        rows = prune(source, corpus, settings, "keep", shares)
        times = _evaluation_seconds(source.config, corpus, [row["heads"] for row in rows])
        step = int(checkpoint.name.removeprefix("step_"))
        both = zip(rows, times, strict=True)
        write_json(kept, [row | {"step": step, "seconds": time} for row, time in both])
    return read_json(kept)


def _evaluation_seconds(
    config: ModelConfig, corpus: Corpus, shapes: list[list[int]]
) -> list[float]:
    """Of a piece of valid with each head count by layer: medians of 9, timed in turn.

    Time goes with the shapes: the weights are drawn.
    """
    tokens = corpus.tokens("valid")[: 4 * 16 * config.seq_len]
    first = corpus.tokenizer.eos_id

    def score(heads: list[int]) -> Callable[[], Any]:
        model = TransformerLM(dataclasses.replace(config, n_heads=heads)).eval()
        lanes = {"seq_len": config.seq_len, "batch_size": 16}
        return lambda: score_stream(model, model, tokens, first, **lanes)

    return list(in_turn({str(i): score(h) for i, h in enumerate(shapes)}, 9).values())


def duration(experiment: Experiment, results: dict[str, Any]) -> str:
    """Training time of every run, and its throughput as training goes on."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    shown = [row for row in results["runs"] if row["group"]]
    left.barh(
        [f"{row['label']}, seed {row['seed']}" for row in shown],
        [row["train_seconds"] for row in shown],
    )
    left.set_xlabel("seconds of training, evaluation left out")
    for run in experiment.runs:
        if run.entry.get("group") and experiment.finished(run):
            lines = read_metrics(experiment.path(run) / "metrics.jsonl")
            lines = [x for x in lines if x.get("split") == "train"]
            right.plot(
                [x["step"] for x in lines],
                [x["tokens_per_second"] for x in lines],
                label=f"{run.label}, seed {run.seed}",
            )
    right.set_xlabel("step")
    right.set_ylabel("tokens a second")
    if shown:
        right.legend()
    figure.savefig(experiment.folder / "plot.png", dpi=150)
    plt.close(figure)
    return run_table(results)


REPORTS: dict[str, Callable[[Experiment, dict[str, Any]], str]] = {
    "size": size,
    "bars": bars,
    "heads": heads,
    "removable": removable,
    "time": duration,
}
