"""`allattn analyze` as a user runs it: what is in the report, and what it depends on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from runs import HEADS, PRUNE_END, STEPS
from safetensors.torch import load_file, save_file

from allattn.cli import main
from allattn.data.checksum import sha256
from allattn.data.lock import alone

KEYS = {
    "layer", "head", "relevance", "confidence", "offset", "offset_share", "rare_share",
    "persistent_share", "ablation_delta_ppl", "roles",
}  # fmt: skip
CONLLU = "\n".join([
    "1\tAnne\t_\tPROPN\t_\t_\t2\tnsubj\t_\t_",
    "2\tsaw\t_\tVERB\t_\t_\t0\troot\t_\t_",
    "3\told\t_\tADJ\t_\t_\t4\tamod\t_\t_",
    "4\tfriends\t_\tNOUN\t_\t_\t2\tobj\t_\t_",
    "", "",
])  # fmt: skip


def analyze(path: Path, out: Path, *options: object) -> dict:
    arguments = ["analyze", path, "--out", out, "--tokens", 100, "--states", 0, *options]
    assert main([str(a) for a in arguments]) == 0
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def without_paths(report: dict) -> dict:
    return {**report, "model": {k: v for k, v in report["model"].items() if k != "path"}}


@pytest.fixture(scope="module")
def report(finished_run, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("analysis")
    (folder / "a.conllu").write_text(CONLLU, encoding="utf-8")
    out = folder / "out"
    return out, analyze(finished_run, out, "--states", 2, "--conllu", folder / "a.conllu")


def test_what_is_in_the_report(report):
    _, found = report
    assert len(found["heads"]) == HEADS // 2 and all(KEYS <= row.keys() for row in found["heads"])
    ids = [[] for _ in found["model"]["heads"]]
    for row in found["heads"]:
        ids[row["layer"]].append(row["head"])
    assert ids == found["model"]["head_ids"]
    for layer in range(len(ids)):
        shares = [row["relevance"] for row in found["heads"] if row["layer"] == layer]
        assert not shares or sum(shares) == pytest.approx(1)
    seen = {(row["relation"], row["direction"]): row["n"] for row in found["syntax"]}
    assert seen["nsubj", "h->d"] == seen["obj", "d->h"] == seen["amod", "h->d"] == 1
    assert sum(seen.values()) == 3
    assert [state["step"] for state in found["states"]][-1] == STEPS
    assert any(len(state["heads"]) == HEADS for state in found["states"])  # the last dense one
    fates = found["survival"]["fates"].values()
    assert sum(f["survived"] for f in fates) >= HEADS // 2
    closed = [step for row in found["survival"]["closed_at"] for step in row]
    assert closed.count(None) == HEADS // 2
    assert {step for step in closed if step is not None} <= set(range(5, PRUNE_END + 1))
    for state in found["curves"]:
        assert {"importance", "random", "gates"} == set(state["orders"])
        assert state["orders"]["importance"][-1]["kept"] == 0
    assert found["text"]["tokens"] == 96  # whole segments of six lanes


def test_the_page_stands_alone(report):
    out, found = report
    page = (out / "report.html").read_text(encoding="utf-8")
    sources = re.findall(r'src="([^"]*)"', page)
    assert sources and all(s.startswith("data:image/png;base64,") for s in sources)
    assert not re.search(r"<link|<script|@import|https?://", page)
    for row in found["heads"]:
        assert f"<td>{row['layer']}</td><td>{row['head']}</td>" in page
    pictures = {p.name for p in out.glob("*.png")}
    assert pictures == {"heads.png", "survivors.png", "roles.png", "curves.png"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_batch_size_changes_nothing(finished_run, report, tmp_path):
    conllu = report[0].parent / "a.conllu"
    first, again, other = (
        without_paths(
            analyze(finished_run, tmp_path / name, "--conllu", conllu, "--batch-size", size)
        )
        for name, size in (("first", 8), ("again", 8), ("other", 4))
    )
    assert again == first
    assert close(other, first)
    assert first["heads"] == report[1]["heads"]  # whatever other states are looked at


def close(a, b) -> bool:
    """The same but for rounding."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, rel=1e-4, abs=1e-5) if isinstance(a, float) else a == b


def test_a_dead_head_shows(finished_run, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(finished_run / "final", export)
    weights = load_file(export / "model.safetensors")
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    layer = next(i for i, n in enumerate(config["model"]["n_heads"]) if n > 1)
    weights[f"model.layers.{layer}.attention.output.weight"][:, : config["model"]["d_head"]] = 0
    save_file(weights, export / "model.safetensors")
    config["sha256"]["model.safetensors"] = sha256(export / "model.safetensors")
    (export / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = analyze(export, tmp_path / "out")
    first = config["run"]["head_ids"][layer][0]
    (dead,) = [r for r in found["heads"] if (r["layer"], r["head"]) == (layer, first)]
    assert dead["relevance"] == 0
    assert dead["ablation_delta_ppl"] == 0 and dead["ablation_p_value"] == 1
    assert found["survival"] is None and len(found["states"]) == 1  # it left its run


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.n_persistent=0", "model.d_ff=24"],
        ["stages[1].prune.keep=0"],
        ["model.embedding=adaptive", "model.cutoffs=[40,90]", "model.div_value=2"],
    ],
)
def test_other_models(make_config, train, tmp_path, overrides):
    run = train(make_config(*overrides))
    found = analyze(run.folder, tmp_path / "out")
    assert len(found["heads"]) == sum(found["model"]["heads"])
    assert "</html>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_dense_checkpoint_has_no_survival(finished_run, tmp_path):
    found = analyze(finished_run / "checkpoints" / "step_00000004", tmp_path / "out")
    assert found["survival"] is None and len(found["heads"]) == HEADS


def test_refusals(finished_run, report, tmp_path, fails, contents):
    out = report[0]
    before = contents(out)
    assert "--overwrite" in fails(1, "analyze", finished_run, "--out", out)
    assert contents(out) == before
    assert "--tokens" in fails(2, "analyze", finished_run, "--out", tmp_path / "x", "--tokens", 0)
    assert "no such" in fails(
        1, "analyze", finished_run, "--out", tmp_path / "x", "--conllu", tmp_path / "nothing"
    )
    (tmp_path / "bad.conllu").write_text("1\tword\n", encoding="utf-8")
    line = fails(
        1, "analyze", finished_run, "--out", tmp_path / "x", "--conllu", tmp_path / "bad.conllu"
    )
    assert "bad.conllu, line 1" in line
    assert "no split" in fails(
        1, "analyze", finished_run, "--out", tmp_path / "x", "--split", "spam"
    )
    (tmp_path / "file").write_text("")
    fails(1, "analyze", finished_run, "--out", tmp_path / "file" / "x")
    assert not (tmp_path / "x" / "report.json").exists()


def test_nothing_of_others_is_replaced(finished_run, tmp_path, fails, contents):
    out = tmp_path / "out"
    out.mkdir()
    (out / "heads.png").write_text("mine")
    before = contents(out)
    assert "heads.png" in fails(1, "analyze", finished_run, "--out", out)
    with alone(tmp_path / "busy"):
        assert "another process" in fails(1, "analyze", finished_run, "--out", tmp_path / "busy")
    assert contents(out) == before and not (tmp_path / "busy").exists()


def test_what_is_missing_is_said(finished_run, tmp_path, capsys):
    """A moved export knows its first heads; a run without its log has states, and says so."""
    shutil.copytree(finished_run / "final", tmp_path / "moved é")
    found = analyze(tmp_path / "moved é", tmp_path / "out")
    assert found["model"]["first_heads"] == [HEADS // 2] * 2
    assert "No run" in found["notes"][0] and "No run" in capsys.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "metrics.jsonl").unlink()
    found = analyze(run, tmp_path / "again")
    assert "metrics.jsonl" in found["notes"][0] and found["survival"] is None
    assert found["model"]["first_heads"] == [HEADS // 2] * 2
    page = (tmp_path / "again" / "report.html").read_text(encoding="utf-8")
    assert "Left out" in page


def test_without_a_dense_checkpoint_heads_still_go(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    for path in sorted((run / "checkpoints").iterdir())[:-2]:
        shutil.rmtree(path)
    found = analyze(run, tmp_path / "out")
    assert found["survival"]["fates"]["none"]["heads"] == HEADS
    assert "before pruning" in found["notes"][0]
