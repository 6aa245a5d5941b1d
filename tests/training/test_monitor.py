"""What a run says: metrics.jsonl, TensorBoard tags, lines for people."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from runs import DENSE_END, HEADS, PRUNE_END, STEPS, Run, written_long_ago
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from allattn.cli import main
from allattn.pruning.schedule import lr_factor
from allattn.training.monitor import Monitor

TRAIN_KEYS = {
    "step", "stage", "split", "loss", "ppl", "tokens", "tokens_per_second", "lr", "grad_norm",
    "heads_open", "params",
}  # fmt: skip
PRUNING = range(DENSE_END + 1, PRUNE_END + 1)


@pytest.fixture(scope="module")
def run(finished_run) -> Run:
    return Run(finished_run)


@pytest.fixture(scope="module")
def board(finished_run) -> EventAccumulator:
    return EventAccumulator(str(finished_run / "tensorboard")).Reload()


def test_a_line_a_step(run):
    train = [row for row in run.lines if row.get("split") == "train"]
    assert [row["step"] for row in train] == list(range(1, STEPS + 1))
    for row in train:
        assert row.keys() >= TRAIN_KEYS
        assert row["stage"] == (
            "dense" if row["step"] <= DENSE_END else "prune" if row["step"] in PRUNING else "tune"
        )
        assert row["tokens"] == row["step"] * 4 * 16
        assert row["ppl"] == pytest.approx(2.718281828459045 ** row["loss"])
        assert row["tokens_per_second"] > 0 and row["grad_norm"] > 0
        assert 0 <= row["heads_open"] <= HEADS
        assert ("expected_heads" in row) == (row["step"] in PRUNING)


def test_evaluations(run):
    valid = [row for row in run.lines if row.get("split") == "valid"]
    assert [row["step"] for row in valid] == [DENSE_END, PRUNE_END, STEPS]
    assert all(row.keys() >= {"step", "stage", "split", "loss", "ppl"} for row in valid)
    assert [row["heads_open"] for row in valid] == [8, 4, 4]


def test_rates_follow_each_stages_schedule_and_the_gates_keep_their_ratio(make_config, run):
    config = make_config()
    for row in run.lines:
        if row.get("split") != "train":
            continue
        i = ["dense", "prune", "tune"].index(row["stage"])
        stage, first = config.stages[i], [0, DENSE_END, PRUNE_END][i]
        factor = lr_factor(stage.lr, row["step"] - 1 - first, stage.steps)
        assert row["lr"] == pytest.approx(config.train.optimizer.lr * factor)
        if stage.prune is not None:
            assert row["gate_lr"] / row["lr"] == pytest.approx(0.2 / config.train.optimizer.lr)


def test_gates_default_to_ten_times_the_rate_whatever_the_schedule(make_config, train):
    config = make_config(
        "stages[1].prune.gate_lr=null", "stages[1].lr.schedule=cosine",
        "stages[1].lr.warmup_steps=2", "stages[1].lr.peak=1e-3",
    )  # fmt: skip
    rows = [row for row in train(config).lines if "gate_lr" in row]
    assert len(rows) == len(PRUNING) and len({row["lr"] for row in rows}) > 3
    assert [row["gate_lr"] / row["lr"] for row in rows] == pytest.approx([10.0] * len(rows))
    assert max(row["lr"] for row in rows) == pytest.approx(1e-3)


def test_events(run):
    assert [(e["stage"], e["step"]) for e in run.events("stage")] == [
        ("dense", 1), ("prune", DENSE_END + 1), ("tune", PRUNE_END + 1),
    ]  # fmt: skip
    assert [e["step"] for e in run.events("removal")] == [PRUNE_END]


def test_every_promised_tag(board):
    tags = set(board.Tags()["scalars"])
    assert tags >= {
        "train/loss", "train/ppl", "valid/ppl", "train/lr", "train/grad_norm", "prune/sparsity",
        "prune/penalty", "prune/penalty_weight", "prune/expected_heads", "gates/layer_00/open",
        "gates/layer_01/open", "perf/tokens_per_second",
    }  # fmt: skip


def test_scalars_are_those_of_the_lines(run, board):
    def scalars(tag: str) -> dict[int, float]:
        return {event.step: event.value for event in board.Scalars(tag)}

    train = [row for row in run.lines if row.get("split") == "train"]
    pairs = {
        "train/loss": "loss", "train/ppl": "ppl", "train/lr": "lr", "train/grad_norm": "grad_norm",
        "prune/penalty": "penalty", "prune/penalty_weight": "penalty_weight",
        "prune/expected_heads": "expected_heads", "prune/sparsity": "sparsity",
    }  # fmt: skip
    for tag, key in pairs.items():
        expected = {row["step"]: row[key] for row in train if key in row}
        assert scalars(tag) == pytest.approx(expected, rel=1e-6), tag
    valid = {row["step"]: row["ppl"] for row in run.lines if row.get("split") == "valid"}
    assert scalars("valid/ppl") == pytest.approx(valid, rel=1e-6)
    open_heads = [scalars(f"gates/layer_{i:02d}/open") for i in range(2)]
    for row in train:
        assert sum(layer[row["step"]] for layer in open_heads) == row["heads_open"]
        assert row["sparsity"] == pytest.approx(1 - row["heads_open"] / HEADS)


def test_a_killed_and_resumed_run_has_every_point_once(make_config, train):
    config = make_config(f"train.save_every={DENSE_END}")
    run = train(config, 7, to_end=False)
    shutil.rmtree(run.checkpoint(7))  # steps 5 to 7 will be done, and logged, again
    written_long_ago(run.folder)
    train(config, start=False)
    board = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [e.step for e in board.Scalars("train/loss")] == list(range(1, STEPS + 1))
    assert [e.step for e in board.Scalars("valid/ppl")] == [DENSE_END, PRUNE_END, STEPS]


def test_the_multiplier_climbs_with_the_gap(make_config, train):
    """What each line says of expected and wanted heads decides the next line's weight."""
    config = make_config()
    rows = [row for row in train(config).lines if "target_heads" in row]
    rate = config.stages[1].prune.lagrangian_lr
    assert len(rows) == len(PRUNING)
    for now, later in zip(rows, rows[1:], strict=False):
        gap = (now["expected_heads"] - now["target_heads"]) / HEADS
        for key, share in (("penalty_weight", gap), ("penalty_weight_quadratic", gap**2)):
            assert later[key] - now[key] == pytest.approx(rate * share, rel=1e-4, abs=1e-8)
    assert rows[-1]["penalty_weight"] != rows[0]["penalty_weight"]


def test_lines_after_the_step_are_dropped_and_half_lines_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x": 1}\n{"step": 3}\n{"step": 2, "y"')
    Monitor(tmp_path, 2, 10, active=True).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "x": 1}\n'


def test_json_has_no_nan(tmp_path):
    monitor = Monitor(tmp_path, 0, 10, active=True)
    monitor.event({"event": "x", "step": 1, "stage": "s", "loss": float("nan")}, "text")
    monitor.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda c: pytest.fail(c))["loss"] is None


def test_other_ranks_write_nothing(tmp_path, capsys):
    monitor = Monitor(tmp_path, 0, 10, active=False)
    monitor.train({"step": 1}, [1])
    monitor.evaluation({"step": 1}, None)
    monitor.begin(None, [], 0)
    monitor.event({"event": "x"}, "text")
    monitor.advance()
    monitor.flush()
    monitor.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")


def test_plain_lines_on_stderr_where_there_is_no_terminal(tiny_yaml, tmp_path, capsys):
    argv = ["train", str(tiny_yaml), f"run.dir={tmp_path}", "stages=[{name: only, steps: 3}]"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{tmp_path}/run/final: 8 of 8 heads"]
    assert "\r" not in err and "\x1b" not in err
    for step in (1, 2, 3):
        assert re.search(rf"^step +{step}  only  loss \d.*tokens/s$", err, re.MULTILINE)
    assert re.search(r"^step +3  only  valid ppl \d", err, re.MULTILINE)
