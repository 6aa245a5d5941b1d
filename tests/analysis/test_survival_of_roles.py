"""Which heads went when: by hand, from a small run, and the pictures."""

import dataclasses
import json

import pytest
from runs import DENSE_END, HEADS, PRUNE_END, STEPS

from allattn.analysis.survival import (
    RoleFate,
    by_first_number,
    draw_head_map,
    draw_survivors,
    read_metrics,
    states,
    survival,
)

ROLES = [[["positional"], ["positional", "nsubj h->d"], []], [["rare"]], []]


def evaluated(step, n_open, p_open=None, stage="prune"):
    line = {"step": step, "stage": stage, "split": "valid", "heads_open": n_open, "loss": 1.0}
    return line | ({} if p_open is None else {"p_open": p_open})


def removed(step, head_ids):
    return {"event": "removal", "step": step, "stage": "prune", "head_ids": head_ids}


LINES = [
    {"event": "stage", "step": 1, "stage": "dense"},
    {"step": 5, "stage": "dense", "split": "train", "heads_open": 4},
    evaluated(10, 4, [[1.0, 1.0, 1.0], [1.0], []], "dense"),
    evaluated(20, 2, [[0.4, 0.9, 0.3], [0.8], []]),
    # 0 is open again, 2 closed for good since step 20; 3 is removed between two evaluations
    evaluated(30, 3, [[0.7, 0.9, 0.2], [0.6], []]),
    removed(35, [[0, 1], [], []]),
    evaluated(40, 1, [[0.1, 0.9, None], [None], []]),
    {"event": "decision", "step": 50, "stage": "prune", "heads": [1, 0, 0]},
    removed(50, [[1], [], []]),
    evaluated(50, 1, [[None, 1.0, None], [None], []]),
]


def test_by_hand():
    result = survival(LINES, ROLES, later={40: [[[], ["rare"], []], [[]], []]})
    # layer 0: head 0 last open at 30, head 1 survives, head 2 last open at 10
    assert result.closed_at == [[35 + 5, None, 20], [35], []]
    assert result.order == [(0, 2), (1, 0), (0, 0), (0, 1)]
    kinds = ("nsubj h->d", "positional", "rare", "none")
    table = [(r["step"], r["heads"], *(r["roles"][kind] for kind in kinds)) for r in result.rows]
    assert table == [
        (10, 4, 1, 2, 1, 1),
        (20, 2, 1, 1, 1, 0),
        (30, 3, 1, 2, 1, 0),
        (35, 2, 1, 2, 0, 0),
        (40, 1, 1, 1, 0, 0),
        (50, 1, 1, 1, 0, 0),
    ]
    assert [r.get("roles_now") for r in result.rows] == [None] * 4 + [{"rare": 1, "none": 0}, None]
    assert result.fates == {
        "nsubj h->d": RoleFate(1, 1, None),
        "positional": RoleFate(2, 1, 40.0),
        "rare": RoleFate(1, 0, 35.0),
        "none": RoleFate(1, 0, 20.0),
    }
    json.dumps(dataclasses.asdict(result))  # plain values


def test_ties_go_by_the_last_probability():
    lines = [
        evaluated(10, 5, [[0.9, 0.6, 0.7, 0.95, 0.93]]),
        evaluated(20, 2, [[0.1, 0.2, 0.3, 0.9, 0.8]]),
        evaluated(30, 2, [[None, None, None, 1.0, 1.0]]),
    ]
    # closed at 20: by P at 10; survivors by P at 20, since all have 1 at the end
    assert survival(lines, [[[]] * 5]).order == [(0, 1), (0, 2), (0, 0), (0, 4), (0, 3)]


def test_lines_without_probabilities():
    """Older runs: a head is open until it is removed."""
    lines = [evaluated(10, 4), evaluated(20, 2), removed(25, [[0, 2], [0], []]), evaluated(30, 3)]
    result = survival(lines, ROLES)
    assert result.closed_at == [[None, 25, None], [None], []]
    assert [(r["step"], r["heads"]) for r in result.rows] == [(10, 4), (20, 4), (25, 3), (30, 3)]
    assert result.order == [(0, 1), (0, 0), (0, 2), (1, 0)]
    with pytest.raises(ValueError, match="no evaluation and no removal"):
        states(LINES[:2], [3, 1, 0])
    with pytest.raises(ValueError, match="step 10: heads .3, 1, 0., not .3, 2."):
        states(LINES, [3, 2])


def test_numbers_of_the_first_model():
    roles = by_first_number([[["a"], ["b"]], []], [[1, 3], []], [4, 2])
    assert roles == [[[], ["a"], [], ["b"]], [[], []]]


def test_a_real_run(finished_run):
    lines = read_metrics(finished_run / "metrics.jsonl")
    (removal,) = [line for line in lines if line.get("event") == "removal"]
    roles = [[["positional"]] * 4, [[]] * 4]
    result = survival(lines, roles)
    assert {row["step"]: row["heads"] for row in result.rows} == {
        DENSE_END: HEADS, PRUNE_END: HEADS // 2, STEPS: HEADS // 2
    }  # fmt: skip
    for layer, kept in enumerate(removal["head_ids"]):
        expected = [None if h in kept else PRUNE_END for h in range(4)]
        assert result.closed_at[layer] == expected
    kept = len(removal["head_ids"][0])
    assert result.fates["positional"] == RoleFate(4, kept, float(PRUNE_END) if kept < 4 else None)
    assert sorted(result.order) == [(i, h) for i in range(2) for h in range(4)]
    survivors = {(i, h) for i, ids in enumerate(removal["head_ids"]) for h in ids}
    assert set(result.order[HEADS // 2 :]) == survivors


def test_metrics_cut_short_by_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_metrics(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2: not a line of a run"):
        read_metrics(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_metrics(tmp_path / "none.jsonl")


def test_pictures(tmp_path):
    figure = draw_survivors(LINES, ROLES)
    axes = figure.axes[0]
    tops = [0.0] * 6
    for bars in axes.containers:
        tops = [top + bar.get_height() for top, bar in zip(tops, bars, strict=True)]
    assert tops == [4, 2, 3, 2, 1, 1]  # the open heads
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["positional", "syntactic", "rare", "none"]
    figure.savefig(tmp_path / "survivors.png")
    figure = draw_head_map(survival(LINES, ROLES), ROLES)
    written = {t.get_position(): t.get_text() for t in figure.axes[0].texts}
    assert written == {(0, 0): "40", (2, 0): "20", (0, 1): "35"}
    full = [p for p in figure.axes[0].patches if p.get_alpha() == 1]
    assert len(full) == 2 and len(figure.axes[0].patches) == 5  # the survivor has two kinds
    figure.savefig(tmp_path / "map.png")
    assert (tmp_path / "survivors.png").stat().st_size > 5000
    assert (tmp_path / "map.png").stat().st_size > 3000
