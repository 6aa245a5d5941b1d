"""Prune a trained model without an optimiser: score its heads, cut the worst, evaluate the rest.

For one share of heads it writes an export; for several also the curve of perplexity against size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from allattn.config import ConfigError, PruneConfig
from allattn.config.checks import check_prune
from allattn.data.lanes import Corpus, Lanes
from allattn.inference.evaluate import evaluate
from allattn.inference.export import export, export_info
from allattn.inference.load import Source
from allattn.model.transformer import flops_per_token
from allattn.pruning.budget import target_heads
from allattn.pruning.importance import Stream, head_scores
from allattn.pruning.methods import PruningState, Scored, build_method
from allattn.pruning.removal import cut_config, cut_tensors
from allattn.training.state import write_json

COLUMNS = ("keep", "heads", "by layer", "non-embedding", "loss", "ppl")


def prune(
    source: Source,
    corpus: Corpus,
    settings: PruneConfig,
    budget: str,
    shares: list[float],
    *,
    split: str = "valid",
    batch_size: int = 8,
    rescore: bool = False,
    seed: int = 1,
    device: torch.device | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
) -> list[dict[str, Any]]:
    """Prune to each share, the largest first, every one going on from the one before.

    Args:
        source: what to prune.
        corpus: to calibrate on (its train split; importance only) and to evaluate on.
        settings: method, scope, min_heads, batches, normalize.
        budget: `keep`, `keep_params` or `keep_flops`: what the shares are shares of, in the run's
            first model.
        shares: from 0 to 1.
        split: to evaluate on.
        batch_size: lanes to calibrate and evaluate with.
        rescore: score again what is left after each share, instead of once.
        seed: of `random`.
        device: where to compute.
        out: an export with one share; with several a folder of exports, table and plot; or None.
        overwrite: replace what is there.

    Returns:
        For each share a row: keep, heads (by layer), ppl, loss, tokens_per_second, params,
        params_non_embedding, flops_per_token.

    Raises:
        ConfigError, ValueError: what a user can mend, in one line.
    """
    shares = sorted(set(shares), reverse=True)
    if out is not None and Path(out).exists() and not overwrite:
        raise ValueError(f"{out}: exists; give another --out, or --overwrite to replace it")
    run_heads, weights = source.run["run_heads"], source.weights
    targets = []
    for share in shares:
        changed: dict[str, Any] = {budget: share}
        stage = dataclasses.replace(settings, **changed)
        check_prune("prune", stage)
        k = target_heads(stage, source.config, run_heads, "prune")
        assert k is not None, "there is a budget"
        if k > sum(source.config.heads):
            raise ConfigError(
                f"prune.{budget}: {share} are {k} of the run's {run_heads} heads, but "
                f"{weights.path} has {sum(source.config.heads)} left"
            )
        targets.append((share, stage, k))
    device = device or torch.device("cpu")
    method: Scored | None = None
    scores: list[list[float]] = []
    rows = []
    for share, stage, k in targets:
        if method is None:
            method = _open_all(stage, seed, source)
        if not scores or rescore:
            model = weights.build().to(device)
            method.attach(model)
            streams = partial(_streams, corpus, source, stage, batch_size)
            scores = head_scores(stage, model, streams, [seed, 0])
        kept = method.cut(scores, k)
        smaller = cut_source(source, kept)
        model = smaller.weights.build().to(device)
        result = evaluate(model, corpus, split, batch_size)
        rows.append(
            {"keep": share}
            | {key: result[key] for key in ("heads", "ppl", "loss", "tokens_per_second")}
            | {key: result[key] for key in ("params_non_embedding", "params")}
            | {"flops_per_token": flops_per_token(smaller.config), "split": split}
        )
        smaller.weights.info["run"]["history"].append(
            {
                "stage": f"prune ({stage.method})",
                "step": smaller.weights.info["run"]["step"],
                "heads": smaller.config.heads,
                "ppl": result["ppl"],
            }
        )
        smaller.weights.info["valid_ppl"] = (
            result["ppl"] if split == "valid" and corpus.dir == source.data_dir else None
        )
        if out is not None:
            folder = Path(out) if len(shares) == 1 else Path(out) / f"{budget}_{share:g}"
            export(smaller, folder, overwrite)
    if out is not None and len(shares) > 1:
        write_json(Path(out) / "prune.json", rows)
        (Path(out) / "prune.txt").write_text(table(rows) + "\n", encoding="utf-8")
        _plot(rows, settings.method, Path(out) / "prune.png")
    return rows


def _open_all(stage: PruneConfig, seed: int, source: Source) -> Scored:
    """A method at its start, every head open; without output scaling, as in Michel et al. 2019."""
    stage = dataclasses.replace(stage, output_scaling=False)
    heads = source.config.heads
    method = build_method(stage, seed, PruningState(list(heads), sum(heads), 0))
    assert isinstance(method, Scored)
    return method


def _streams(
    corpus: Corpus, source: Source, stage: PruneConfig, batch_size: int
) -> Iterator[Stream]:
    lanes = Lanes(corpus.tokens("train"), batch_size, source.config.seq_len)
    yield (lanes.batch(k, 0, batch_size) for k in range(min(stage.batches, lanes.n_segments)))


def cut_source(source: Source, kept: list[list[int]]) -> Source:
    """The source with these heads alone."""
    weights, info = source.weights, export_info(source)
    d_head = weights.config.d_head
    assert d_head is not None, "a validated config has it"
    run = info["run"]
    pairs = zip(run["head_ids"], kept, strict=True)
    run["head_ids"] = [[ids[h] for h in heads] for ids, heads in pairs]
    return dataclasses.replace(
        source,
        weights=dataclasses.replace(
            weights,
            config=cut_config(weights.config, kept),
            parameters=cut_tensors(weights.parameters, kept, d_head),
            info=info,
        ),
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    cells = [COLUMNS] + [
        (
            f"{row['keep']:g}", str(sum(row["heads"])), " ".join(map(str, row["heads"])),
            f"{row['params_non_embedding']:,}", f"{row['loss']:.5f}", f"{row['ppl']:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def _plot(rows: list[dict[str, Any]], method: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    axes.plot([sum(row["heads"]) for row in rows], [row["ppl"] for row in rows], "o-", label=method)
    axes.set_xlabel("heads left")
    axes.set_ylabel(f"{rows[0]['split']} perplexity a token")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
