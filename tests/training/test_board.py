"""TensorBoard and the pictures, read back from disk; and that nothing there ends a run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import DENSE_END, PRUNE_END, STEPS, Run, written_long_ago
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from allattn.config import load_config
from allattn.training.board import Board, hyperparameters
from allattn.training.monitor import Monitor
from allattn.training.pictures import head_map
from allattn.training.watch import Look

EVALUATIONS = [DENSE_END, PRUNE_END, STEPS]
LINE = {
    "step": 3, "stage": "s", "split": "valid", "loss": 1.0, "ppl": 2.7, "heads_open": 2,
    "keep": 0.5, "params_non_embedding": 10,
}  # fmt: skip


def read(folder: Path) -> EventAccumulator:
    keep_all = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    return EventAccumulator(str(folder / "tensorboard"), keep_all).Reload()


@pytest.fixture(scope="module")
def board(finished_run) -> EventAccumulator:
    return read(finished_run)


def steps(events: list) -> list[int]:
    return [event.step for event in events]


def a_look(log_alphas: list[torch.Tensor | None]) -> Look:
    return Look([[0.5, None], [0.0, 1.0]], log_alphas, [0.25, math.nan], "Anne ", "\nwas | *here*")


def test_scalars(board):
    tags = set(board.Tags()["scalars"])
    assert tags >= {
        "train/loss", "train/lr", "train/gate_lr", "train/grad_norm_weights",
        "train/grad_norm_gates", "prune/penalty", "prune/sparsity", "prune/target_sparsity",
        "perf/tokens_per_second", "perf/mfu", "perf/peak_memory_mb", "gates/layer_01/open",
        "persistent/layer_00", "persistent/layer_01", "valid/ppl", "size/params_non_embedding",
        "size/keep",
    }  # fmt: skip
    assert steps(board.Scalars("persistent/layer_00")) == EVALUATIONS
    assert 0 < board.Scalars("perf/mfu")[-1].value < 2
    assert 50 < board.Scalars("perf/peak_memory_mb")[-1].value < 1e5


def test_lines_and_scalars_agree(finished_run, board):
    rows = [row for row in Run(finished_run).lines if row.get("split") == "train"]
    for key in ("mfu", "grad_norm_gates", "grad_norm_weights", "target_sparsity"):
        expected = {row["step"]: row[key] for row in rows if key in row}
        assert expected and {e.step: e.value for e in board.Scalars(
            {"mfu": "perf/mfu", "target_sparsity": "prune/target_sparsity"}.get(key, f"train/{key}")
        )} == pytest.approx(expected, rel=1e-5)  # fmt: skip
    for row in rows:
        if "grad_norm_gates" in row:
            parts = math.hypot(row["grad_norm_gates"], row["grad_norm_weights"])
            assert parts == pytest.approx(row["grad_norm"], rel=1e-6)
            assert 0 < row["grad_norm_gates"] < row["grad_norm"]


def test_head_maps_are_images_and_files(finished_run, board):
    events = board.Images("heads")
    files = sorted((finished_run / "pictures").iterdir())
    assert steps(events) == EVALUATIONS
    assert [f.name for f in files] == [f"head_map_{s:08d}.png" for s in EVALUATIONS]
    rows = [row for row in Run(finished_run).lines if "p_open" in row]
    for event, file, row in zip(events, files, rows, strict=True):
        title = f"step {row['step']}, {row['stage']}: {row['heads_open']} heads open"
        expected = head_map(row["p_open"], title)
        assert np.array_equal(np.array(Image.open(file)), expected)
        assert (event.height, event.width) == expected.shape[:2]


def test_histograms_while_gates_learn(make_config, train):
    run = train(make_config("train.eval_every=2"))
    board = read(run.folder)
    assert set(board.Tags()["histograms"]) == {"log_alpha/layer_00", "log_alpha/layer_01"}
    events = board.Histograms("log_alpha/layer_00")
    assert steps(events) == [6, 8]  # between the stage's ends; decided there, gates are gone
    assert all(e.histogram_value.num == 4 for e in events)
    meta = [row["p_open"] for row in run.lines if row.get("split") == "valid" and row["step"] == 8]
    low, high = events[-1].histogram_value.min, events[-1].histogram_value.max
    p = [1 / (1 + math.exp(math.log(0.1 / 1.1) / 3 - a)) for a in (low, high)]
    assert [min(meta[0][0]), max(meta[0][0])] == pytest.approx(p, rel=1e-5)


def test_texts_layout_and_hyperparameters(finished_run, board):
    def text(tag: str, i: int = 0) -> str:
        return board.Tensors(f"{tag}/text_summary")[i].tensor_proto.string_val[0].decode()

    assert "n_layers: 2" in text("config") and "seed: 3" in text("config")
    assert "| prune | 5 to 10 |" in text("stages") and "4 of 8 heads stay" in text("stages")
    assert steps(board.Tensors("sample/text_summary")) == EVALUATIONS
    assert len({text("sample", i) for i in range(3)}) > 1  # the model has learned something
    layout = layout_pb2.Layout.FromString(
        board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )
    charts = {c.title: list(c.multiline.tag) for group in layout.category for c in group.chart}
    assert charts["sparsity: target and reached"] == [
        "^prune/sparsity$", "^prune/target_sparsity$",
    ]  # fmt: skip
    content = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["stages[1].prune.keep"].number_value == 0.5
    assert start.hparams["stages[1].prune.method"].string_value == "hard_concrete"
    content = board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    results = {metric.name.tag for metric in experiment.metric_infos}
    assert results == {"valid/ppl", "size/params_non_embedding", "size/keep"}
    assert results <= set(board.Tags()["scalars"])
    first = {info.name for info in experiment.hparam_infos if info.differs}
    assert first == {
        "run.seed", "stages[1].prune.keep", "stages[1].prune.method", "train.optimizer.lr",
    }  # fmt: skip
    assert {info.name for info in experiment.hparam_infos} == set(start.hparams)


def test_hyperparameters_are_named_as_overrides(tiny_yaml):
    config = load_config(tiny_yaml, ["stages[1].prune.keep=0.25"])
    named = hyperparameters(config)
    assert named["stages[1].prune.keep"] == 0.25 and named["train.optimizer.lr"] == 4e-3
    assert "stages[0].prune" not in named and None not in named.values()
    for key in ("model.n_layers", "train.batch_size", "stages[1].prune.keep"):
        again = load_config(tiny_yaml, [f"{key}={named[key]}"])
        assert hyperparameters(again)[key] == named[key]


def test_a_resumed_run_has_every_image_once(make_config, train):
    config = make_config("train.eval_every=2", f"train.save_every={DENSE_END}")
    run = train(config, 7, to_end=False)
    shutil.rmtree(run.checkpoint(7))  # step 6 was evaluated, and will be again
    stale = run.folder / "pictures" / "head_map_00000099.png"
    stale.write_bytes(b"")
    before = (run.folder / "pictures" / "head_map_00000004.png").read_bytes()
    written_long_ago(run.folder)
    train(config, start=False)
    wanted = list(range(2, STEPS + 1, 2))
    board = read(run.folder)
    assert steps(board.Images("heads")) == wanted
    assert steps(board.Scalars("persistent/layer_00")) == wanted
    assert steps(board.Histograms("log_alpha/layer_00")) == [6, 8]
    names = sorted(path.name for path in (run.folder / "pictures").iterdir())
    assert names == [f"head_map_{s:08d}.png" for s in wanted]
    assert (run.folder / "pictures" / "head_map_00000004.png").read_bytes() == before


def test_what_is_not_finite_is_logged_and_stops_nothing(tmp_path):
    monitor = Monitor(tmp_path, 0, 10, active=True)
    nan = torch.full((2,), math.nan)
    look = a_look([nan, torch.tensor([math.inf, 1.5])])
    look.p_open[1][0] = math.nan
    line = {**LINE, "loss": math.nan, "ppl": math.inf, "p_open": look.p_open}
    monitor.evaluation(line, look)
    train = {**line, "mfu": math.nan, "tokens_per_second": math.inf, "grad_norm_gates": math.nan}
    monitor.train(train, [1, 1])
    monitor.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[0], parse_constant=lambda c: pytest.fail(c))
    assert row["loss"] is None and row["p_open"] == [[0.5, None], [None, 1.0]]
    board = read(tmp_path)
    assert math.isnan(board.Scalars("valid/loss")[0].value)
    assert set(board.Tags()["histograms"]) == {"log_alpha/layer_01"}
    assert board.Histograms("log_alpha/layer_01")[0].histogram_value.max == 1.5
    assert len(board.Images("heads")) == 1


@pytest.mark.parametrize("blocked", ["pictures", "tensorboard"])
def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, capsys, blocked):
    (tmp_path / blocked).write_text("a file where the folder would be")
    monitor = Monitor(tmp_path, 0, 10, active=True)
    for step in (1, 2):
        monitor.event({"event": "stage", "step": step, "stage": "s"}, "begins")
        monitor.evaluation({**LINE, "step": step}, a_look([None, None]))
        monitor.flush()
    monitor.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert "warning" in capsys.readouterr().err
    other = {"pictures": "tensorboard", "tensorboard": "pictures"}[blocked]
    assert any((tmp_path / other).iterdir())


def test_a_writer_that_fails_is_left_out_until_the_next_evaluation(tmp_path):
    said: list[str] = []
    board = Board(tmp_path / "tensorboard", 0, said.append)
    board.text("a", "before", 1)
    worker = board.writer.file_writer.event_writer._async_writer._worker
    worker.exception = OSError(28, "No space left on device")  # as its thread leaves it
    board.text("a", "lost", 2)
    board.text("a", "lost too", 3)
    board.flush()
    assert len(said) == 1 and "No space left on device" in said[0]
    board.evaluation(LINE, a_look([None, None]), np.zeros((2, 2, 3), np.uint8))
    board.close()
    assert len(said) == 1
    assert steps(read(tmp_path).Scalars("valid/ppl")) == [3]
