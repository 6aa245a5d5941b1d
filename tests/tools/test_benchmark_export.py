"""The comparison of exports: how much of the removed heads comes back as time, by hand."""

import argparse
import importlib
from pathlib import Path

import pytest

from allattn.cli import main
from allattn.inference.load import open_source

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)  # found by the processes it starts, too
    pytest.importorskip("onnx")
    return importlib.import_module("benchmark_export")


@pytest.fixture
def exports(finished_run, tmp_path) -> list[str]:
    """Eight heads, then four of them: half of each layer, and wherever chance left them."""
    dense = finished_run / "checkpoints" / "step_00000004"
    common = ["prune", str(dense), "--method", "random", "--keep", "0.5"]
    assert main(["export", str(dense), "--out", str(tmp_path / "dense")]) == 0
    assert main([*common, "--seed", "2", "--out", str(tmp_path / "uneven")]) == 0
    assert main([*common, "--scope", "layer", "--out", str(tmp_path / "even")]) == 0
    return [str(tmp_path / name) for name in ("dense", "uneven", "even")]


def test_shares_by_hand(tool, exports):
    sources = {path: open_source(path) for path in exports}
    dense, uneven, even = exports
    assert sources[even].config.heads == [2, 2] != sources[uneven].config.heads
    assert sum(sources[uneven].config.heads) == 4
    times = {dense: 10.0, uneven: 7.5, even: 5.0}
    assert tool.back(times, dense, dense, sources) is None
    assert tool.back(times, uneven, dense, sources) == pytest.approx(0.5)
    assert tool.back(times, even, dense, sources) == pytest.approx(1.0)
    assert tool.versus_even(times, uneven, sources) == pytest.approx(1.5)
    assert tool.versus_even(times, even, sources) is None
    assert tool.versus_even(times, dense, sources) is None
    row = {"export": "uneven", "heads": "1 3", "engine": "onnx", "batch": 8}
    (line,) = tool.slower([row | {"vs_even": v} for v in (None, 0.9, 1.04, 1.5)])
    assert "1.50 times" in line and "onnx, batch 8" in line


def test_without_heads(tool, exports):
    source = tool.without_heads(open_source(exports[0]))
    assert source.weights.build().config.heads == [0, 0]


@pytest.mark.slow
def test_the_table(tool, exports):
    args = argparse.Namespace(
        paths=exports, engine=["pytorch", "onnx", "int8"], batches=[1, 2], prompt=20, tokens=3,
        repeats=2, folder=None,
    )  # fmt: skip
    result = tool.benchmark_export(args)
    assert len(result["rows"]) == 3 * 2 * 3
    for row in result["rows"]:
        assert row["first_ms"] > 0 and row["tokens_per_second"] > 0 and row["file_mb"] > 0
        assert 50 < row["peak_mb"] < 5000
        assert (row["first_back"] is None) == (row["export"] == "dense")
        assert (row["vs_even"] is None) == (row["export"] != "uneven")
    assert "token_back" in importlib.import_module("measure").table(result["rows"])
