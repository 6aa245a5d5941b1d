"""Compare runs, checkpoints and exports: a table, and plots of perplexity against what it costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from allattn.inference.evaluate import evaluate_source
from allattn.inference.export import disk_megabytes
from allattn.inference.load import open_source
from allattn.model.transformer import flops_per_token
from allattn.training.state import write_json


def compare(
    paths: list[tuple[str, Path]],
    out: str | Path,
    data: str | Path | None = None,
    device: torch.device | None = None,
) -> list[dict[str, Any]]:
    """Evaluate each on valid and test; write `compare.json`, `compare.txt` and `compare.png`.

    Args:
        paths: the label and the folder of each.
        out: folder for the results.
        data: a prepared corpus, where it is not the one of training.
        device: where to evaluate.

    Returns:
        Rows as in `compare.json`.
    """
    out = Path(out)
    rows = [_row(label, path, data, device) for label, path in paths]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "compare.json", rows)
    (out / "compare.txt").write_text(table(rows) + "\n", encoding="utf-8")
    _plot(rows, out / "compare.png")
    return rows


def _row(
    label: str, folder: Path, data: str | Path | None, device: torch.device | None
) -> dict[str, Any]:
    source = open_source(folder)
    corpus = source.corpus(data)
    results = {
        split: evaluate_source(source, corpus, split, device=device)
        for split in ("valid", "test")
        if split in corpus.splits
    }
    if not results:
        raise ValueError(f"{corpus.dir}: has neither a valid nor a test split to compare on")
    best = results.get("test") or results["valid"]
    heads = source.config.heads
    return {
        "run": label,
        "family": source.config.family,
        "keep": sum(heads) / max(source.run["run_heads"], 1),
        "heads": heads,
        "params": best["params"],
        "params_non_embedding": best["params_non_embedding"],
        "flops_per_token": flops_per_token(source.config),
        "valid_ppl": results["valid"]["ppl"] if "valid" in results else None,
        "test_ppl": results["test"]["ppl"] if "test" in results else None,
        "word_ppl": best["word_ppl"],
        "tokens_per_second": best["tokens_per_second"],
        "megabytes": disk_megabytes(source.weights.path),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text; perplexities are per token, word_ppl per word of the test split."""
    head = [
        "run", "heads", "by layer", "params", "non-embedding", "MFLOPs/token", "valid ppl",
        "test ppl", "word ppl", "tokens/s", "MB",
    ]  # fmt: skip
    lines = [head]
    for row in rows:
        lines.append([
            row["run"], str(sum(row["heads"])), " ".join(map(str, row["heads"])),
            f"{row['params']:,}", f"{row['params_non_embedding']:,}",
            f"{row['flops_per_token'] / 1e6:,.2f}",
            _number(row["valid_ppl"]), _number(row["test_ppl"]), _number(row["word_ppl"]),
            f"{row['tokens_per_second']:,.0f}", f"{row['megabytes']:.2f}",
        ])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = {0, 2}
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# the costs that perplexity is drawn against: axis label, value of a row
COSTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "parameters outside the embeddings (millions)": lambda row: row["params_non_embedding"] / 1e6,
    "forward MFLOPs a token": lambda row: row["flops_per_token"] / 1e6,
    "measured evaluation, microseconds a token": lambda row: 1e6 / row["tokens_per_second"],
}


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    key = "test_ppl" if all(row["test_ppl"] is not None for row in rows) else "valid_ppl"
    figure, panels = plt.subplots(1, len(COSTS), figsize=(14, 4), layout="constrained", sharey=True)
    for axes, (title, cost) in zip(panels, COSTS.items(), strict=True):
        for family in sorted({row["family"] for row in rows}):
            members = sorted((row for row in rows if row["family"] == family), key=cost)
            axes.plot([cost(row) for row in members], [row[key] for row in members], "o-",
                      label=family)  # fmt: skip
            for row in members:
                label = axes.annotate(
                    row["run"],
                    (cost(row), row[key]),
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=7,
                )
                label.set_in_layout(False)  # a long name may leave the panel, not squeeze it
        axes.set_xlabel(title)
    panels[0].set_ylabel(f"{key.split('_')[0]} perplexity a token")
    panels[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
