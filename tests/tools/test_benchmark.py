"""The benchmark tool's figures: counted FLOPs, and the keys that others read."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)  # found by the processes it starts, too
    module = importlib.import_module("benchmark")
    shape = {
        "n_layers": 2, "d_model": 16, "n_heads": 8, "d_head": 4, "n_persistent": 8, "seq_len": 16,
        "mem_len": 16, "vocab_size": 60, "cutoffs": [20, 40],
    }  # fmt: skip
    monkeypatch.setitem(module.SIZES, "small", (2, shape))
    monkeypatch.setattr(module.speed, "matmul_rate", lambda device, dtype, budget: 1e11)
    return module


def arguments(**changes) -> argparse.Namespace:
    common = {"size": "small", "precision": ["fp32"], "batch": None, "repeats": 2, "tokens": 400}
    return argparse.Namespace(**{**common, **changes})


def test_train(tool, monkeypatch):
    monkeypatch.setattr(tool, "peak_memory_mb", lambda *args: 100.0)
    result = tool.benchmark_train(arguments())
    assert result.keys() >= {
        "size", "precision", "device", "params", "flops_per_token", "matmul_peak_gflops", "ratio",
    }  # fmt: skip
    assert [row["attention"] for row in result["rows"]] == ["reference", "fused"]
    reference, fused = result["rows"]
    assert result["ratio"] == pytest.approx(reference["milliseconds"] / fused["milliseconds"])
    for row in result["rows"]:
        assert row["tokens_per_second"] == pytest.approx(32 / row["milliseconds"] * 1000)
        assert row["mfu"] == pytest.approx(
            result["flops_per_token"] * row["tokens_per_second"] / 1e11
        )
        assert row["peak_memory_mb"] == 100.0


def test_flops_of_a_training_step(tool):
    """By hand: forward with the memory's keys and values projected again, three times over."""
    _, config = tool.size_config("small")
    keys = 16 + 17 / 2  # of memory, and on average of the segment
    head = 2 * 16 * 4 * 2 + 2 * 2 * 16 * 4 * 2 + 3 * 2 * 4 * keys + 2 * 2 * 4 * 8
    forward = 2 * 8 * head + 2 * 16 * 22 + 2 * 16 * 16 * 2
    assert tool.train_flops_per_token(config) == 3 * round(forward)


def test_the_others(tool):
    evaluated = tool.benchmark_evaluate(arguments())
    assert [row["memory"] for row in evaluated["rows"]] == ["cached", "recomputed"]
    assert evaluated["ratio"] > 0
    generated = tool.benchmark_generate(arguments())
    assert [row["position"] for row in generated["rows"]] == [144, 400]
    scaled = tool.benchmark_scaling(arguments())["rows"]
    assert [r["value"] for r in scaled if r["what"] == "keep"] == [1.0, 0.75, 0.5, 0.25]
    assert all(r["train_share"] > 0 and r["evaluate_share"] > 0 for r in scaled)
    assert "milliseconds" in tool.table(scaled)


def test_data(tool, monkeypatch, capsys):
    options = ["data", "--megabytes", "0.1", "--workers", "1", "--corpus-tokens", "20000", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *options])
    monkeypatch.setattr(importlib.import_module("benchmark_data"), "KINDS", ("word",))
    assert tool.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["tokenizer"] for row in result["rows"]] == ["word"]
    for row in result["rows"]:
        assert row["megabytes"] > 0 and row["megabytes_per_core_second"] > 0
        assert row["memory_mb"] > 10 and row["megabytes_per_second"] > 0
    assert result["corpus_tokens"] == 20_000
    assert result["seconds_to_first_batch"] > 0 and result["batch_milliseconds"] > 0


def test_peak_memory_is_that_of_a_process_of_its_own(tool):
    _, config = tool.size_config("small")
    assert 50 < tool.peak_memory_mb(config, 2, "fp32") < 5000
