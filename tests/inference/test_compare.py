"""Runs side by side: a table, a plot, and rows that say what evaluation said."""

from __future__ import annotations

import json

import oracles
import pytest
from runs import DENSE_END, STEPS

from allattn.cli import main
from allattn.inference.evaluate import evaluate_source
from allattn.inference.load import open_source
from allattn.model.transformer import flops_per_token

KEYS = {
    "run", "family", "keep", "params", "params_non_embedding", "flops_per_token", "valid_ppl",
    "test_ppl", "word_ppl", "tokens_per_second",
}  # fmt: skip


def test_rows_table_and_plot(finished_run, tmp_path, capsys):
    dense = finished_run / "checkpoints" / f"step_{DENSE_END:08d}"
    out = tmp_path / "out" / "compare"
    argv = ["compare", f"dense={dense}", str(finished_run), "--out", str(out), "--json"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    rows = json.loads((out / "compare.json").read_text())
    assert printed.count("\n") == 1 and json.loads(printed)["rows"] == rows
    assert [row["run"] for row in rows] == ["dense", str(finished_run)]
    assert [row["keep"] for row in rows] == [1.0, 0.5]
    for row, path in zip(rows, (dense, finished_run), strict=True):
        assert row.keys() >= KEYS
        source = open_source(path)
        valid, test = (evaluate_source(source, source.corpus(), s) for s in ("valid", "test"))
        assert row["family"] == "all-attention"
        assert row["valid_ppl"] == pytest.approx(valid["ppl"])
        assert row["test_ppl"] == pytest.approx(test["ppl"])
        assert row["word_ppl"] == pytest.approx(test["word_ppl"])
        assert row["params"] == oracles.parameters(source.config)
        assert row["params_non_embedding"] == test["params_non_embedding"]
        assert row["flops_per_token"] == flops_per_token(source.config)
        assert row["tokens_per_second"] > 0
    assert rows[1]["params_non_embedding"] < rows[0]["params_non_embedding"]
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    table = (out / "compare.txt").read_text()
    assert all(f"{row['params']:,}" in table and row["run"] in table for row in rows)


def test_the_table_is_what_is_printed(finished_run, tmp_path, capsys):
    assert main(["compare", f"run={finished_run}", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2 and all(len(line) < 160 for line in out.splitlines()[:1])


def test_something_missing_writes_nothing(finished_run, tmp_path, fails):
    out = tmp_path / "out"
    fails(1, "compare", finished_run, tmp_path / "missing", "--out", out)
    assert not out.exists()


def test_two_families(make_config, train, tmp_path):
    run = train(make_config("model.n_persistent=0", "model.d_ff=24", name="xl"))
    other = train(make_config(name="all"))
    paths = [str(run.checkpoint(STEPS)), str(other.checkpoint(STEPS))]
    assert main(["compare", *paths, "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["family"] for row in rows] == ["transformer-xl", "all-attention"]
