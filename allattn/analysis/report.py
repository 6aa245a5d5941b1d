"""The findings as a page for people: what every number means, tables and pictures."""

from __future__ import annotations

import json
import os
from operator import itemgetter
from pathlib import Path
from typing import Any

from allattn.analysis import figures
from allattn.analysis.page import Page, cell
from allattn.analysis.roles import PERSISTENT, POSITIONAL, RARE
from allattn.analysis.survival import Survival, draw_head_map, draw_survivors
from allattn.analysis.syntax import BAR_PERCENT

# quantities of a head that are drawn as maps: key of a row, title
MAPS = {
    "relevance": "relevance",
    "ablation_delta_ppl": "perplexity without it, change",
    "confidence": "confidence",
    "offset_share": "share at one offset",
    "persistent_share": "share to persistent vectors",
}


# all that a report may consist of
FILES = (
    "report.html", "report.json", "heads.png", "survivors.png", "roles.png", "curves.png",
)  # fmt: skip


def start_report(out: str | Path, overwrite: bool) -> None:
    """Make the folder, before the long work.

    Raises:
        ValueError: a report is there, and is not to be replaced.
        OSError: it cannot be written to.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; a folder is needed for --out")
    if (there := [name for name in FILES if (out / name).exists()]) and not overwrite:
        raise ValueError(
            f"{out}: has a {there[0]}; give another --out, or --overwrite to replace it"
        )
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise PermissionError(f"{out}: cannot be written to; give another --out")


def write_report(report: dict[str, Any], lines: list[dict[str, Any]], out: str | Path) -> None:
    """Write `report.html`, `report.json` and the pictures; see `build_page`."""
    page = build_page(report, lines)
    files = page.pictures | {
        "report.html": page.html().encode(),
        "report.json": (json.dumps(report, indent=1, allow_nan=False) + "\n").encode(),
    }
    assert files.keys() <= set(FILES), files.keys()
    for name in FILES:
        if name not in files:  # of an earlier report
            (Path(out) / name).unlink(missing_ok=True)
            continue
        partial = Path(out) / f".partial_{name}"
        partial.write_bytes(files[name])
        os.replace(partial, Path(out) / name)


_BARS = ("offset_share", "rare_share", "persistent_share")


def build_page(report: dict[str, Any], lines: list[dict[str, Any]]) -> Page:
    """A page for a report of `Analyzer.analyze`, joined with the caller's `model`.

    Args:
        report: as in `report.json`.
        lines: of the run's metrics.jsonl, for the picture of survivors.
    """
    page = Page(f"What the heads of {report['model']['path']} do")
    _summary(page, report)
    _heads(page, report)
    if report["syntax"] is not None:
        _syntax(page, report)
    if report["survival"] is not None:
        _survival(page, report["survival"], lines)
    _states(page, report)
    _single_heads(page, report)
    _curves(page, report)
    return page


def _summary(page: Page, report: dict[str, Any]) -> None:
    model, text = report["model"], report["text"]
    page.table(
        ["", "value"],
        [
            ["family", model["family"]],
            ["optimiser steps", model["step"]],
            ["heads by layer", " ".join(map(str, model["heads"]))],
            ["heads by layer of the run's first model", " ".join(map(str, model["first_heads"]))],
            ["parameters outside the embeddings", model["params_non_embedding"]],
            [f"{text['split']} perplexity a token", model["ppl"]],
            ["tokens looked at", text["tokens"]],
            ["segment, memory", f"{text['seq_len']}, {text['mem_len']}"],
        ],
    )
    for note in report["notes"]:
        page.section("Left out", note)
    page.section(
        "How to read this",
        "Heads keep the numbers that they had in the run's first model. All numbers are of the "
        f"{text['split']} split's first segments in lanes spread evenly over it, with memory from "
        "segment to segment, and of gates as evaluation has them. Perplexities below are of that "
        "sample. In the first segments of a lane memory is not full yet, so a small sample gives "
        "persistent vectors more weight.",
    )


def _heads(page: Page, report: dict[str, Any]) -> None:
    page.section(
        "Heads",
        "Relevance: a head's share of its layer's part in the logit of the most likely token, by "
        "layer-wise relevance propagation (Voita et al. 2019, section 4); a layer's shares add up "
        "to 1. Attention weights and the scales of the norms count as constants, sums share in "
        "proportion, biases, persistent values and memory keep what reaches them.",
        "Confidence: mean largest attention weight on a token, line ends left out. Offset: where "
        "the largest weight most often is (-1 is the token before), and how often. Rare: how "
        "often it is on the least frequent token in sight, against chance. Persistent: the mean "
        "share of attention that goes to persistent vectors (with equal scores everywhere it would "
        f"be {cell(report['model']['even_persistent_share'])}), and the entropy over these.",
        "Ablation: perplexity with this head alone removed, minus that of the whole model (Michel "
        "et al. 2019, section 3.2); p: paired sign-flip test over stretches of the text, corrected "
        "for the number of heads (Holm).",
        f"Roles: positional from a share of {POSITIONAL} at one offset, rare from {RARE} on the "
        f"least frequent token, persistent from {PERSISTENT} of attention, and the relations "
        "below.",
    )
    rows, model = report["heads"], report["model"]
    if rows and not any(row["roles"] for row in rows):
        best = (max(rows, key=itemgetter(k))[k] for k in _BARS)
        page.section(
            "No head reaches a bar",
            "The largest shares are: at one offset {}, on the least frequent token {}, to "
            "persistent vectors {}.".format(*map(cell, best)),
        )
    if not rows:
        page.section("No heads", "This model has no attention head left.")
        return
    maps = {}
    for key, title in MAPS.items():
        if key == "persistent_share" and not any(row[key] for row in rows):
            continue
        found = iter([row[key] for row in rows])
        maps[title] = [[next(found) for _ in ids] for ids in model["head_ids"]]
    page.picture(
        "heads",
        figures.head_maps(maps, model["head_ids"], model["first_heads"]),
        "Maps of layers and heads: " + ", ".join(maps),
    )
    page.table(
        [
            "layer", "head", "roles", "relevance", "ablation, ppl", "p", "confidence", "offset",
            "share at it", "rare", "rare by chance", "persistent", "entropy",
        ],
        [
            [
                row["layer"], row["head"], ", ".join(row["roles"]) or "–", row["relevance"],
                row["ablation_delta_ppl"], row["ablation_p_corrected"], row["confidence"],
                row["offset"], row["offset_share"], row["rare_share"], row["rare_chance"],
                row["persistent_share"], row["persistent_entropy"],
            ]
            for row in rows
        ],
    )  # fmt: skip


def _syntax(page: Page, report: dict[str, Any]) -> None:
    page.section(
        "Syntactic heads",
        "How often a head's largest weight, seen from the last piece of a word, lies on the word "
        "that the treebank names (d->h: from a dependent to its head; h->d: the other way). A "
        "causal model sees only what lies to the left: of each relation the one direction that "
        "looks back counts, the other is left out. The baseline always looks at the offset, in "
        f"words, that is right most often. Syntactic: at least {BAR_PERCENT} percentage points "
        "above it (Voita et al. 2019, section 5.2).",
    )
    dense = report["dense_syntax"] or [None] * len(report["syntax"])
    page.table(
        [
            "relation", "direction", "seen", "to the right", "out of reach", "unmapped",
            "best offset", "baseline", "best head", "syntactic heads", "best head, dense model",
        ],
        [
            [
                row["relation"], row["direction"], row["n"], row["to_the_right"],
                row["out_of_reach"], row["unmapped"], row["offset"], row["baseline"],
                row["best_accuracy"],
                ", ".join(f"{layer}:{head}" for layer, head in row["syntactic"]) or "–",
                before and before["best_accuracy"],
            ]
            for row, before in zip(report["syntax"], dense, strict=True)
        ],
    )  # fmt: skip


def _survival(page: Page, found: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    page.section(
        "Which heads were pruned when",
        "Roles are those in the last state before pruning; a head with several counts for each. "
        "In the map pale heads were closed at the step written in and did not open again up to "
        "this model's step; a pruning stage that goes on may still open them.",
    )
    roles = found["roles"]
    result = Survival(**{key: found[key] for key in ("rows", "closed_at", "order", "fates")})
    page.picture("survivors", draw_survivors(lines, roles), "Open heads by step and role")
    page.picture("roles", draw_head_map(result, roles), "Heads by role, with closing step")
    page.table(
        ["role before pruning", "heads", "survived", "mean step of closing"],
        [
            [role, fate["heads"], fate["survived"], fate["mean_step"]]
            for role, fate in found["fates"].items()
        ],
    )
    names = list(found["fates"])
    page.table(
        ["step", "stage", "heads", *names],
        [
            [str(row["step"]), row["stage"], row["heads"], *(row["roles"][n] for n in names)]
            for row in found["rows"]
        ],
    )


def _states(page: Page, report: dict[str, Any]) -> None:
    if len(report["states"]) < 2:
        return
    page.section(
        "Roles in the states of the run",
        "How many heads have each role in the states that were looked at. Syntactic heads are "
        "looked for in the last state before pruning and in the model itself only.",
    )
    names = sorted(
        {role for state in report["states"] for h in state["heads"] for role in h["roles"]}
    )
    page.table(
        ["state", "heads", *names, "mean confidence", "mean persistent share"],
        [
            [
                state["name"], len(state["heads"]),
                *(sum(name in head["roles"] for head in state["heads"]) for name in names),
                _mean([head["confidence"] for head in state["heads"]]),
                _mean([head["persistent_share"] for head in state["heads"]]),
            ]
            for state in report["states"]
        ],
    )  # fmt: skip


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _single_heads(page: Page, report: dict[str, Any]) -> None:
    page.section(
        "Layers reduced to their best single head",
        "Each layer with one head, the best of its heads, the other layers whole (Michel et al. "
        "2019, section 3.3). p as above. The head was chosen on the same text.",
    )
    page.table(
        ["layer", "heads", "best head", "perplexity, change", "loss, change", "p"],
        [
            [
                row["layer"], len(row["losses"]), row["best"], row["delta_ppl"],
                row["delta_loss"], row["p_corrected"],
            ]
            for row in report["single_heads"]
        ],
    )  # fmt: skip


def _curves(page: Page, report: dict[str, Any]) -> None:
    page.section(
        "How many heads can go without training",
        "Perplexity when heads are masked in an order: by importance (Michel et al. 2019, section "
        "2.3, scored once on the train split), at random (mean of the seeds), and in the order in "
        "which the run's own pruning closed them. Removable: the share of heads that can go before "
        "the loss is 1% higher.",
    )
    with_heads = [state for state in report["curves"] if state["orders"].get("importance")]
    if not with_heads:
        return
    groups = {
        state["name"]: {
            order: [(point["keep"], point["ppl"]) for point in points]
            for order, points in state["orders"].items()
        }
        for state in with_heads
    }
    page.picture("curves", figures.curves(groups), "Perplexity against the share of heads kept")
    orders = list(dict.fromkeys(o for state in report["curves"] for o in state["orders"]))
    page.table(
        ["state", "heads", "perplexity", *(f"removable, {o}" for o in orders)],
        [
            [
                state["name"], state["orders"]["importance"][0]["kept"],
                state["orders"]["importance"][0]["ppl"],
                *(state["removable"].get(o) for o in orders),
            ]
            for state in with_heads
        ],
    )  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """The heads as text, for a terminal."""
    columns = (
        "layer", "head", "relevance", "ablation_delta_ppl", "ablation_p_corrected", "confidence",
        "offset", "offset_share", "rare_share", "persistent_share", "roles",
    )  # fmt: skip
    lines = [list(columns)] + [
        [", ".join(row[c]) if c == "roles" else cell(row[c]) for c in columns]
        for row in report["heads"]
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(text.rjust(w) for text, w in zip(line[:-1], widths, strict=False))
        + f"  {line[-1]}".rstrip()
        for line in lines
    )
