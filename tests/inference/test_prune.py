"""`allattn prune`: exact counts, the worst heads first, a curve in one call, exports that load."""

from __future__ import annotations

import json
from pathlib import Path

import oracles
import pytest
import torch
from runs import DENSE_END, HEADS, STEPS

from allattn.cli import main
from allattn.inference.export import export
from allattn.inference.load import load_pretrained, open_source
from allattn.training.state import read_json


@pytest.fixture(scope="module")
def dense(finished_run: Path) -> Path:
    return finished_run / "checkpoints" / f"step_{DENSE_END:08d}"


def rows_of(capsys: pytest.CaptureFixture[str], *argv: object) -> list[dict]:
    capsys.readouterr()
    assert main(["prune", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("method", ["importance", "magnitude", "random"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_curve_in_one_call(dense, capsys, tmp_path, method, scope):
    rows = rows_of(
        capsys, dense, "--method", method, "--keep", "0.25,1,0.5", "--scope", scope,
        "--out", tmp_path / "curve",
    )  # fmt: skip
    assert [row["keep"] for row in rows] == [1, 0.5, 0.25]
    assert [sum(row["heads"]) for row in rows] == [8, 4, 2]
    if scope == "layer":
        assert [row["heads"] for row in rows] == [[4, 4], [2, 2], [1, 1]]
    ids = []
    for row in rows:
        folder = tmp_path / "curve" / f"keep_{row['keep']:g}"
        model = load_pretrained(folder)
        assert model.config.heads == row["heads"]
        n = sum(p.numel() for p in model.parameters())
        assert n == row["params"] == oracles.parameters(model.config)
        assert main(["evaluate", str(folder), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["loss"] == pytest.approx(row["loss"], abs=1e-6)
        assert result["params_non_embedding"] == row["params_non_embedding"]
        ids.append(read_json(folder / "config.json")["run"]["head_ids"])
    for more, fewer in zip(ids, ids[1:], strict=False):  # one score for all: cuts are nested
        assert all(set(b) <= set(a) for a, b in zip(more, fewer, strict=True))
    assert json.loads((tmp_path / "curve" / "prune.json").read_text()) == rows
    assert (tmp_path / "curve" / "prune.png").stat().st_size > 1000


def test_nothing_removed_changes_nothing(dense, capsys):
    (row,) = rows_of(capsys, dense, "--method", "importance", "--keep", "1")
    assert main(["evaluate", str(dense), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(row["loss"], abs=1e-9)


@pytest.fixture
def planted(dense, tmp_path) -> tuple[Path, list[set[int]]]:
    """An export in which three heads write nothing into the residual stream."""
    source = open_source(dense)
    useless = [{1}, {0, 3}]
    H = source.config.d_head
    for layer, heads in enumerate(useless):
        weight = source.weights.parameters[f"layers.{layer}.attention.output.weight"].clone()
        for h in heads:
            weight[:, h * H : (h + 1) * H] = 0
        source.weights.parameters[f"layers.{layer}.attention.output.weight"] = weight
    return export(source, tmp_path / "planted", check=False), useless


@pytest.mark.parametrize("method", ["importance", "magnitude"])
@pytest.mark.parametrize("options", [[], ["--no-normalize"], ["--rescore"]])
def test_useless_heads_go_first(planted, capsys, tmp_path, method, options):
    path, useless = planted
    if method == "magnitude" and "--no-normalize" in options:
        options = []
    (row,) = rows_of(
        capsys, path, "--method", method, "--keep", 5 / 8, "--out", tmp_path / "out", *options
    )
    kept = read_json(tmp_path / "out" / "config.json")["run"]["head_ids"]
    assert kept == [sorted(set(range(4)) - gone) for gone in useless]
    (dense_row,) = rows_of(capsys, path, "--method", "random", "--keep", 1)
    assert row["loss"] == pytest.approx(dense_row["loss"], abs=1e-6)  # they did nothing


def test_random_is_seeded(dense, capsys):
    heads = {
        seed: rows_of(capsys, dense, "--method", "random", "--keep", 0.5, "--seed", seed)[0]["loss"]
        for seed in range(6)
    }
    again = rows_of(capsys, dense, "--method", "random", "--keep", 0.5, "--seed", 3)[0]["loss"]
    assert heads[3] == again and len(set(heads.values())) > 2


def test_budgets_agree_for_all_attention_and_min_heads_holds(dense, capsys):
    for share in (0.2, 0.5, 0.8):
        counts = {
            sum(rows_of(capsys, dense, "--method", "magnitude", f"--{budget}", share)[0]["heads"])
            for budget in ("keep", "keep-params", "keep-flops")
        }
        assert counts == {int(share * HEADS + 0.5)}
    (row,) = rows_of(capsys, dense, "--method", "random", "--keep", 0.25, "--min-heads", 1)
    assert row["heads"] == [1, 1]


def test_an_export_is_pruned_further_and_remembers(dense, capsys, tmp_path):
    rows_of(capsys, dense, "--method", "magnitude", "--keep", 0.75, "--out", tmp_path / "a")
    rows_of(capsys, tmp_path / "a", "--method", "magnitude", "--keep", 0.5, "--out", tmp_path / "b")
    direct = rows_of(capsys, dense, "--method", "magnitude", "--keep", 0.5, "--out", tmp_path / "c")
    run = [read_json(tmp_path / name / "config.json")["run"] for name in "bc"]
    assert run[0]["head_ids"] == run[1]["head_ids"]
    assert (
        run[0]["run_heads"] == HEADS
        and [h["stage"] for h in run[0]["history"]][-2:] == ["prune (magnitude)"] * 2
    )
    a, b = load_pretrained(tmp_path / "b"), load_pretrained(tmp_path / "c")
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert direct[0]["heads"] == a.config.heads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "subset", "--keep", "0.5"], "learned in training belong in a stage"),
        (["--method", "magnitud", "--keep", "0.5"], "importance, magnitude or random is needed"),
        (["--method", "random", "--keep", "1.5"], "share from 0 to 1"),
        (["--method", "random", "--keep", "half"], "--keep: shares such as"),
        (["--method", "random", "--keep", "0.5", "--min-heads", "3"], "min_heads"),
        (["--method", "random", "--keep", "0.5", "--batch-size", "0"], "--batch-size"),
        (["--method", "importance", "--keep", "0.5", "--batches", "0"], "batches"),
    ],
)
def test_wrong_use_is_one_line(dense, fails, options, message):
    assert message in fails(2, "prune", dense, *options)


def test_more_than_is_left_and_what_is_there_is_kept(finished_run, dense, fails, tmp_path):
    pruned = finished_run / "checkpoints" / f"step_{STEPS:08d}"
    options = ["--method", "random", "--keep"]
    assert "has 4 left" in fails(2, "prune", pruned, *options, 0.9)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep me")
    assert "exists" in fails(1, "prune", dense, *options, 0.5, "--out", tmp_path / "out")
    fails(1, "prune", dense, *options, 0.5, "--out", tmp_path / "out", "--overwrite")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep me"
