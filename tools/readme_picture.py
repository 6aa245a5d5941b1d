"""Draw the picture of the README, a dense model becoming a small one, and print its table.

    python tools/readme_picture.py RUNS/compare/compare.json RUNS/dense RUNS/keep_0.5 ... [--write]

`compare.json` is what `allattn compare RUN RUN ... --out RUNS/compare` wrote about the same runs,
in the same order, the dense one first. The runs' `metrics.jsonl` say which heads are left.
`tools/README.md` has the commands that make these runs. The figures go into a JSON file beside the
picture, the table to stdout as Markdown and, with `--write`, into README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

NEEDED = (
    "run", "keep", "heads", "params_non_embedding", "tokens_per_second", "valid_ppl", "test_ppl",
)  # fmt: skip
OUT = Path(__file__).resolve().parent / "pictures" / "demo.png"
PAGE = Path(__file__).resolve().parents[1] / "README.md"
BEGIN = "<!-- table: written by tools/readme_picture.py -->\n"
END = "\n<!-- end of the table -->"
COLOURS = ("#1f3a5f", "#2f6f9f", "#4fa3a5", "#e08e45", "#c0504d")
INK, GREY, PAPER = "#222222", "#9aa0a6", "#ffffff"


def heads_left(run: Path) -> list[list[bool]]:
    """Return, by layer and head of the run's first model, whether the head is still there.

    Raises:
        ValueError: the run has no evaluation with a map of its heads.
    """
    path = run / "metrics.jsonl"
    found = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path}:{number}: not a line of JSON") from None
        found = row.get("p_open", found) if isinstance(row, dict) else found
    if not found:
        raise ValueError(f"{path}: no evaluation is in it; train the run to its end first")
    return [[p is not None for p in layer] for layer in found]


def read_rows(compare: Path, runs: list[Path]) -> list[dict[str, Any]]:
    """Return the rows of a comparison, each with the map of its run's heads as `map`.

    Raises:
        ValueError: the comparison and the runs do not belong together.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(compare.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        raise ValueError(f"{compare}: not JSON; make it with allattn compare") from None
    n = len(rows) if isinstance(rows, list) else 0
    if n != len(runs):
        raise ValueError(f"{compare}: has {n} rows for {len(runs)} runs; name the same runs")
    for row, run in zip(rows, runs, strict=True):
        missing = [name for name in NEEDED if not isinstance(row, dict) or row.get(name) is None]
        if missing:
            raise ValueError(f"{compare}: a row has no {missing[0]}; make it with allattn compare")
        row["map"] = heads_left(run)
        if [sum(layer) for layer in row["map"]] != row["heads"]:
            raise ValueError(f"{run}: has other heads than {row['run']!r} in {compare}")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the README's table of sizes, speed and perplexity as Markdown."""
    lines = [
        "| heads kept | heads by layer | parameters | tokens/s | valid ppl | test ppl |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        heads = " ".join(map(str, row["heads"]))
        lines.append(
            f"| {row['keep']:.0%} | {heads} | {row['params_non_embedding']:,} | "
            f"{row['tokens_per_second']:,.0f} | {row['valid_ppl']:.2f} | {row['test_ppl']:.2f} |"
        )
    return "\n".join(lines)


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """Return a page with the table between its two markers.

    Raises:
        ValueError: the page does not have both markers, in this order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: the lines {BEGIN.strip()} and {END.strip()} are missing")
    return f"{before}{begin}{table(rows)}{end}{after}"


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw a map of the heads of each model, and under the maps what each model costs."""
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK, "font.size": 10})
    figure = plt.figure(figsize=(10, 5.3), facecolor=PAPER)
    top = figure.add_gridspec(
        1, len(rows), left=0.05, right=0.98, top=0.83, bottom=0.43, wspace=0.22
    )
    bottom = figure.add_gridspec(1, 3, left=0.05, right=0.98, top=0.30, bottom=0.02, wspace=0.14)
    figure.text(0.05, 0.945, "One model, fewer and fewer heads", fontsize=15, weight="bold")
    figure.text(
        0.98, 0.95, "a filled square is a head that is left", fontsize=10, color=GREY, ha="right"
    )
    for i, (row, colour) in enumerate(zip(rows, COLOURS, strict=False)):
        _map(figure.add_subplot(top[i]), row, colour, first=i == 0)
    measures = (
        ("parameters of the layers", "params_non_embedding", lambda x: x, "{:,.0f}"),
        ("time per token, in µs", "tokens_per_second", lambda x: 1e6 / x, "{:.0f}"),
        ("perplexity on test text", "test_ppl", lambda x: x, "{:.1f}"),
    )
    for i, (title, name, convert, form) in enumerate(measures):
        values = [convert(row[name]) for row in rows]
        _bars(figure.add_subplot(bottom[i]), title, rows, values, form)
    figure.savefig(out, dpi=150, facecolor=PAPER)
    plt.close(figure)


def _map(axes: Axes, row: dict[str, Any], colour: str, first: bool) -> None:
    """Draw a square per head, filled where the head is left; the first layer is at the bottom."""
    for layer, heads in enumerate(row["map"]):
        for head, is_left in enumerate(heads):
            square = FancyBboxPatch(
                (head + 0.14, layer + 0.14), 0.72, 0.72, boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=colour if is_left else "none", edgecolor=colour if is_left else "#d5d8dc",
                linewidth=1,
            )  # fmt: skip
            axes.add_patch(square)
    axes.set_xlim(0, max(map(len, row["map"])))
    axes.set_ylim(0, len(row["map"]))
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(f"{sum(row['heads'])} heads", fontsize=12, color=colour, weight="bold", pad=6)
    if first:
        axes.text(
            -0.5, len(row["map"]) / 2, "layers, first at the bottom",
            rotation=90, va="center", ha="center", fontsize=9, color=GREY,
        )  # fmt: skip


def _bars(
    axes: Axes, title: str, rows: list[dict[str, Any]], values: list[float], form: str
) -> None:
    """Draw a horizontal bar per model, from zero, with its value at the end."""
    for i, (value, row, colour) in enumerate(zip(values, rows, COLOURS, strict=False)):
        axes.barh(-i, value, height=0.66, color=colour)
        inside = value > 0.55 * max(values)
        axes.text(
            value - 0.02 * max(values) if inside else value + 0.02 * max(values), -i,
            form.format(value), va="center", ha="right" if inside else "left", fontsize=9.5,
            color=PAPER if inside else INK,
        )  # fmt: skip
        axes.text(-0.02 * max(values), -i, f"{sum(row['heads'])}", va="center", ha="right",
                  fontsize=9, color=GREY)  # fmt: skip
    axes.set_xlim(0, 1.02 * max(values))
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold", pad=4)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("compare", type=Path, metavar="COMPARE_JSON", help="of allattn compare")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="in the same order")
    parser.add_argument("--out", type=Path, default=OUT, help="the picture (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="also put the table into README.md")
    args = parser.parse_args(argv)
    if len(args.runs) > len(COLOURS):
        parser.error(f"RUN: at most {len(COLOURS)} runs fit into the picture")
    try:
        rows = read_rows(args.compare, args.runs)
        page = filled(PAGE.read_text(encoding="utf-8"), rows) if args.write else None
        draw(rows, args.out)
        figures = [{name: row[name] for name in (*NEEDED, "map")} for row in rows]
        lines = ",\n".join(json.dumps(row) for row in figures)
        args.out.with_suffix(".json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        if page is not None:
            PAGE.write_text(page, encoding="utf-8")
    except OSError as error:
        print(f"readme_picture: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"readme_picture: error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
