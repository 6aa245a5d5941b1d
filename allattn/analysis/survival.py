"""Which kind of head was pruned when: a run's metrics.jsonl together with the roles of its heads.

Heads are numbered as in the run's first model throughout. In an evaluation line with `p_open` the
`heads_open` heads with the largest P(open) are open, which are those that the evaluation used; with
`subset` gates and `scope: layer` that is close, not exact, until the stage's decision. Lines of
older runs have no `p_open`: then a head counts as open until it is removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Head = tuple[int, int]  # layer and number in it
Roles = list[list[list[str]]]  # by layer and head
NO_ROLE = "none"
SYNTACTIC = "syntactic"


@dataclass
class State:
    """The heads of a run after a step.

    Attributes:
        step: optimiser steps done.
        stage: its name.
        open: the open heads.
        p_open: P(open) of the heads in the weights, where the line says so.
    """

    step: int
    stage: str
    open: set[Head]
    p_open: dict[Head, float]


@dataclass
class RoleFate:
    """What became of the heads with a role.

    Attributes:
        heads: how many there were.
        survived: of them open in the last state.
        mean_step: mean step at which the others were closed for good; None where all survived.
    """

    heads: int
    survived: int
    mean_step: float | None


@dataclass
class Survival:
    """Which heads went when; all JSON values.

    Attributes:
        rows: for each state `step, stage, heads` (open ones) and `roles`: of the heads with each
            role before pruning, how many are open. A head with two roles counts for both.
        closed_at: by layer and head, the step at which it was closed for good; None: it survived.
        order: all heads as the trained gates gave them up, survivors last: by the step at which a
            head was closed for good; of the same step by the last P(open) before, the smaller
            first; then by layer and head. Survivors go by their last P(open) below 1: once it is
            decided that they stay, all have 1.
        fates: by role.
    """

    rows: list[dict[str, Any]]
    closed_at: list[list[int | None]]
    order: list[Head]
    fates: dict[str, RoleFate]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last one that a kill cut short is left out.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: another line is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a run's folder has it")
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            if text.strip():
                line = json.loads(text)
                if not isinstance(line["step"], int):
                    raise ValueError
                if line.get("p_open") is not None and not isinstance(line["heads_open"], int):
                    raise ValueError
                lines.append(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            if number < len(texts):  # a whole line ends with a newline, so it is not the last text
                wrong = "not a line of a run; delete it to go on without it"
                raise ValueError(f"{path}, line {number}: {wrong}") from None
    return lines


def states(lines: Iterable[dict[str, Any]], heads: list[int]) -> list[State]:
    """The states that the lines tell of, one for each step with an evaluation or a removal.

    Args:
        lines: of metrics.jsonl, in order.
        heads: head counts of the run's first model, by layer (`model.n_heads` of its config).

    Raises:
        ValueError: lines of a model with other heads, or none to go by.
    """
    left = {(i, h) for i, n in enumerate(heads) for h in range(n)}
    is_open, knows_gates = left, False
    found: dict[int, State] = {}
    for line in lines:
        p: dict[Head, float] = {}
        if line.get("event") == "removal":
            left = {(i, h) for i, ids in enumerate(line["head_ids"]) for h in ids}
            is_open = is_open & left if knows_gates else left
        elif "event" in line or line.get("split") in (None, "train"):
            continue
        elif line.get("p_open") is not None:
            if [len(row) for row in line["p_open"]] != heads:
                counts = [len(row) for row in line["p_open"]]
                raise ValueError(f"metrics.jsonl, step {line['step']}: heads {counts}, not {heads}")
            rows = enumerate(line["p_open"])
            p = {(i, h): x for i, row in rows for h, x in enumerate(row) if x is not None}
            ranked = sorted(p, key=lambda head: (-p[head], head))
            is_open, knows_gates = set(ranked[: line["heads_open"]]), True
        else:
            is_open = left
        found[line["step"]] = State(line["step"], line["stage"], is_open, p)
    if not found:
        raise ValueError("metrics.jsonl: no evaluation and no removal; let the run evaluate once")
    return [found[step] for step in sorted(found)]


def closing_steps(history: list[State], heads: list[int]) -> list[list[int | None]]:
    """By layer and head, the first state after the last one that it was open in; None: survived."""
    closed: list[list[int | None]] = [[history[0].step] * n for n in heads]
    for state, following in zip(history, [*history[1:], None], strict=True):
        for layer, head in state.open:
            closed[layer][head] = None if following is None else following.step
    return closed


def _order(history: list[State], closed: list[list[int | None]]) -> list[Head]:
    def key(head: Head) -> tuple[float, float, Head]:
        at = closed[head[0]][head[1]]
        before = [s.p_open[head] for s in history if head in s.p_open and (not at or s.step < at)]
        if at is None:
            before = [p for p in before if p < 1]
        return (float("inf") if at is None else at, before[-1] if before else 1.0, head)

    return sorted(((i, h) for i, row in enumerate(closed) for h in range(len(row))), key=key)


def by_first_number(roles: Roles, head_ids: list[list[int]], heads: list[int]) -> Roles:
    """Roles of a later model's heads, numbered as in the run's first model; [] for heads gone.

    Args:
        roles: by layer and head of the later model.
        head_ids: by layer the first numbers of its heads (meta.json of its checkpoint).
        heads: head counts of the first model.
    """
    out: Roles = [[[] for _ in range(n)] for n in heads]
    for layer, ids, row in zip(out, head_ids, roles, strict=True):
        for head, names in zip(ids, row, strict=True):
            layer[head] = names
    return out


def survival(
    lines: Iterable[dict[str, Any]], roles: Roles, later: dict[int, Roles] | None = None
) -> Survival:
    """Follow the roles that heads had before pruning through a run.

    Args:
        lines: of metrics.jsonl.
        roles: in the last dense state, of every head of the run's first model.
        later: roles in other states, by step, numbered the same way; rows of these steps also get
            `roles_now`: how many open heads have each role by then.

    Raises:
        ValueError: as `states`.
    """
    heads = [len(row) for row in roles]
    history = states(lines, heads)
    closed = closing_steps(history, heads)
    rows = []
    for state in history:
        row = {"step": state.step, "stage": state.stage, "heads": len(state.open)}
        row["roles"] = _count(roles, state.open)
        if later and state.step in later:
            row["roles_now"] = _count(later[state.step], state.open)
        rows.append(row)
    everyone = {(i, h) for i, n in enumerate(heads) for h in range(n)}
    fates = {}
    for role, n in _count(roles, everyone).items():
        members = [closed[i][h] for i, h in everyone if role in (roles[i][h] or [NO_ROLE])]
        gone = [step for step in members if step is not None]
        fates[role] = RoleFate(n, n - len(gone), sum(gone) / len(gone) if gone else None)
    return Survival(rows, closed, _order(history, closed), fates)


def _count(roles: Roles, among: set[Head]) -> dict[str, int]:
    """How many of some heads have each of the roles that there are, in the order of their names."""
    names = sorted({name for row in roles for own in row for name in own}) + [NO_ROLE]
    return {
        name: sum(name in (roles[i][h] or [NO_ROLE]) for i, h in among)
        for name in names
    }  # fmt: skip


# ---- pictures ---------------------------------------------------------------------------------

_COLOURS = {
    "positional": "#3b75af", SYNTACTIC: "#529e3e", "rare": "#c53a32", "persistent": "#8d69b8",
    NO_ROLE: "#b0b0b0",
}  # fmt: skip
_OTHERS = ("#ef8636", "#84584e", "#d57dbe", "#bcbd45", "#5abdcd")


def _kinds(names: list[str]) -> list[str]:
    """What a head is coloured as: all syntactic relations are one kind."""
    return list(dict.fromkeys(SYNTACTIC if "->" in name else name for name in names)) or [NO_ROLE]


def _palette(roles: Roles) -> dict[str, str]:
    """A colour for each kind that there is, the same in every picture."""
    present = {kind for row in roles for names in row for kind in _kinds(names)}
    others = sorted(present - _COLOURS.keys())
    colours = _COLOURS | {kind: _OTHERS[i % len(_OTHERS)] for i, kind in enumerate(others)}
    return {kind: colour for kind, colour in colours.items() if kind in present}


def draw_survivors(lines: Iterable[dict[str, Any]], roles: Roles) -> Figure:
    """Open heads by step, stacked by what they were before pruning.

    A head of several kinds counts for each in equal parts, so that the height is the number of
    heads. Arguments as for `survival`.
    """
    from matplotlib.figure import Figure

    history = states(lines, [len(row) for row in roles])
    colours = _palette(roles)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(history))
    bottom = [0.0] * len(history)
    for kind, colour in colours.items():
        heights = []
        for state in history:
            own = [_kinds(roles[i][h]) for i, h in sorted(state.open)]
            heights.append(sum(1 / len(kinds) for kinds in own if kind in kinds))
        axes.bar(places, heights, bottom=bottom, color=colour, label=kind, width=0.85)
        bottom = [b + x for b, x in zip(bottom, heights, strict=True)]
    every = -(-len(history) // 16)  # more labels than that run into each other
    ticks = list(places)[::every]
    axes.set_xticks(ticks, [f"{history[i].step}\n{history[i].stage}" for i in ticks], fontsize=8)
    axes.set_xlabel("step, stage")
    axes.set_ylabel("open heads")
    axes.legend(title="before pruning", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_head_map(result: Survival, roles: Roles) -> Figure:
    """Layers and heads, coloured by role: survivors full, others pale with their closing step."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    colours = _palette(roles)
    n_layers, widest = len(roles), max(map(len, roles), default=0)
    size = (1.8 + 0.62 * widest, 1.2 + 0.42 * n_layers)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(roles):
        for h, names in enumerate(row):
            kinds = _kinds(names)
            step = result.closed_at[i][h]
            for k, kind in enumerate(kinds):
                x, width = h - 0.46 + 0.92 * k / len(kinds), 0.92 / len(kinds)
                alpha = 1.0 if step is None else 0.3
                axes.add_patch(
                    Rectangle((x, i - 0.44), width, 0.88, color=colours[kind], alpha=alpha, lw=0)
                )
            if step is not None:
                axes.text(h, i, str(step), ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, max(widest, 1) - 0.5)
    axes.set_ylim(max(n_layers, 1) - 0.5, -0.5)
    axes.set_xticks(range(widest))
    axes.set_yticks(range(n_layers))
    axes.set_xlabel("head (pale: closed for good at the step written in)")
    axes.set_ylabel("layer")
    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        fontsize=8,
    )
    return figure
