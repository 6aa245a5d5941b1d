"""An export is what the run was, its card says so, and what is not is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from runs import STEPS, Run
from safetensors.torch import load_file, save_file

from allattn.cli import main
from allattn.data.checksum import sha256
from allattn.data.prepare import prepare
from allattn.data.tokenizers import load_tokenizer
from allattn.inference import export as module
from allattn.inference import proof
from allattn.inference.card import picture
from allattn.inference.evaluate import evaluate_source
from allattn.inference.load import load_pretrained, open_source
from allattn.training.state import load_weights


def export(*args: object) -> int:
    return main(["export", *map(str, args)])


@pytest.fixture
def checkpoint(finished_run, tmp_path) -> Path:
    """The last one of TINY_RUN, to be changed."""
    name = f"step_{STEPS:08d}"
    return Path(shutil.copytree(finished_run / "checkpoints" / name, tmp_path / name))


def change(checkpoint: Path, **values: object) -> None:
    path = checkpoint / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_fresh_process_finds_the_runs_perplexity(finished_run, tmp_path, fresh_process):
    out = tmp_path / "ä b" / "é"
    assert export(finished_run, "--out", out, "--license", "apache-2.0") == 0
    config = json.loads((out / "config.json").read_text())
    assert config["valid_ppl"] == pytest.approx(Run(finished_run).meta(STEPS)["valid_ppl"], 1e-5)
    source = open_source(out)
    result = evaluate_source(source, source.corpus(), "valid")
    card = (out / "README.md").read_text(encoding="utf-8")
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert "license: apache-2.0" in front and "pipeline_tag: text-generation" in front
    assert f"{result['ppl']:.3f} |" in body and f"{result['word_ppl']:.3f} |" in body
    assert f"{result['bits_per_byte']:.4f} |" in body and "seq_len, mem_len | 16, 16" in body
    assert f"{result['params']:,} |" in body and "4 of 8 attention heads" in body
    assert "0.1%" in body and str(source.data_dir) in body
    for layer, (n, ids) in enumerate(
        zip(config["num_attention_heads"], config["run"]["head_ids"], strict=True)
    ):
        row = next(x for x in body.splitlines() if x.startswith(f"layer  {layer}"))
        assert [i for i, block in enumerate(row.split()[2]) if block == "█"] == ids
        assert row.endswith(f"{n} of 4")


def test_a_run_ends_with_a_proof(finished_run):
    config = json.loads((finished_run / "final" / "config.json").read_text())
    assert config["valid_ppl"] == pytest.approx(Run(finished_run).meta(STEPS)["valid_ppl"], 1e-5)


@pytest.mark.parametrize("factor", [0.99, 1.002])
def test_another_perplexity_is_refused(checkpoint, tmp_path, fails, factor):
    """Nothing of the export is left."""
    ppl = json.loads((checkpoint / "meta.json").read_text())["valid_ppl"]
    change(checkpoint, valid_ppl=ppl * factor)
    before = sorted(tmp_path.iterdir())
    line = fails(1, "export", checkpoint, "--out", tmp_path / "out")
    assert str(tmp_path / "out") in line and f"{ppl:.4f}" in line and "--no-check" in line
    assert sorted(tmp_path.iterdir()) == before
    assert export(checkpoint, "--out", tmp_path / "out", "--no-check") == 0
    assert "Not evaluated at export" in (tmp_path / "out" / "README.md").read_text()


def test_what_a_fresh_process_cannot_read(exported, fresh_process):
    corpus = open_source(exported).corpus()
    (exported / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="a fresh process cannot evaluate it: .*config.json"):
        proof.evaluate_afresh(exported, corpus)


def test_weights_that_change_on_the_way_are_noticed(
    finished_run, tmp_path, fails, monkeypatch, contents
):
    """What reaches the disk is not what was trained."""
    real = module.save_tensors

    def spoil(path, tensors):
        real(path, {name: t * 0.9 for name, t in tensors.items()})

    monkeypatch.setattr(module, "save_tensors", spoil)
    line = fails(1, "export", finished_run, "--out", tmp_path / "out")
    assert "perplexity" in line and contents(tmp_path) == {}


@pytest.mark.parametrize("changes", [{"valid_ppl": None}, {"valid_ppl": float("nan")}])
def test_a_checkpoint_that_knows_no_perplexity(checkpoint, tmp_path, changes):
    """Then the model in this process is the measure."""
    expected = json.loads((checkpoint / "meta.json").read_text())["valid_ppl"]
    change(checkpoint, **changes)
    assert export(checkpoint, "--out", tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["valid_ppl"] == pytest.approx(expected, rel=1e-5)


def test_half_precision_in_training_is_not_the_measure(checkpoint, tmp_path):
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["config"]["train"]["precision"] = "bf16"
    change(checkpoint, config=meta["config"], valid_ppl=meta["valid_ppl"] * 1.01)
    assert export(checkpoint, "--out", tmp_path / "out") == 0


@pytest.mark.parametrize("how", ["gone", "another text", "no valid split"])
def test_without_the_corpus_the_card_says_so(exported, tmp_path, capsys, how):
    info = json.loads((exported / "config.json").read_text())
    text = tmp_path / "text.txt"
    text.write_text("One text or another.\n" * 9)
    if how != "gone":
        splits = {"train": [text]} | ({"valid": [text]} if how == "another text" else {})
        prepare(out=tmp_path / "data", tokenizer="byte", **splits)
    info["data"] = str(tmp_path / "data")
    (exported / "config.json").write_text(json.dumps(info))
    assert export(exported, "--out", tmp_path / "out") == 0
    error = capsys.readouterr().err
    assert "warning" in error and str(tmp_path / "data") in error and len(error.splitlines()) == 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Not evaluated at export" in card and str(tmp_path / "data") in card
    assert "valid_ppl" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_corpus_that_changed_is_no_measure(checkpoint, tmp_path, capsys):
    change(checkpoint, corpus="0" * 64)
    assert export(checkpoint, "--out", tmp_path / "out") == 0
    assert "has changed since" in capsys.readouterr().err


def test_a_licence_is_one_word(finished_run, tmp_path, fails):
    line = fails(2, "export", finished_run, "--out", tmp_path / "x", "--license", "a\nb: c")
    assert line.startswith("--license")


def test_the_picture():
    """By hand: a layer of four with 0 and 3 left, one of two without any."""
    assert picture([2, 0], [[0, 3], []], [4, 2]).splitlines() == [
        "layer  0  █░░█  2 of 4", "layer  1  ░░    0 of 2",
    ]  # fmt: skip


# Old and foreign files


@pytest.fixture
def exported(finished_run, tmp_path) -> Path:
    assert export(finished_run, "--out", tmp_path / "model") == 0
    return tmp_path / "model"


def as_version_3(folder: Path) -> None:
    """What exports were before: no prefix, a tokenizer.json, no code."""
    config = json.loads((folder / "config.json").read_text())
    keep = ("model_type", "model", "tokenizer", "data", "run")
    old = {"format_version": 3} | {key: config[key] for key in keep}
    old["run"].pop("first_heads")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {n.removeprefix("model."): t for n, t in tensors.items()}, folder / "model.safetensors"
    )
    old["sha256"] = {"model.safetensors": sha256(folder / "model.safetensors")}
    (folder / "config.json").write_text(json.dumps(old))
    open_source(folder).tokenizer().save(folder)
    for path in [*folder.glob("*.py"), folder / "tokenizer_config.json"]:
        path.unlink()


def test_an_export_of_version_3_is_read_and_exported_anew(exported, tmp_path, contents):
    as_version_3(shutil.copytree(exported, tmp_path / "old"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(
            load_pretrained(tmp_path / "old")(ids).log_probs,
            load_pretrained(exported)(ids).log_probs,
        )
    assert export(tmp_path / "old", "--out", tmp_path / "new") == 0
    assert contents(tmp_path / "new") == contents(exported)


@pytest.mark.parametrize(
    ("version", "word"), [(2, "export it again"), (99, "update allattn"), (None, "not an allattn")]
)
@pytest.mark.parametrize("command", ["evaluate", "export", "generate"])
def test_other_versions_say_what_to_do(exported, tmp_path, fails, command, version, word):
    config = json.loads((exported / "config.json").read_text()) | {"format_version": version}
    (exported / "config.json").write_text(json.dumps(config))
    options = ["--out", tmp_path / "out"] if command == "export" else []
    line = fails(1, command, exported, *options)
    assert word in line and str(exported / "config.json") in line


@pytest.mark.parametrize("how", ["exchanged", "renamed", "another tokenizer", "its vocabulary"])
def test_files_that_were_moved_about(exported, finished_run, tmp_path, fails, how):
    word = "model.safetensors"
    if how == "exchanged":
        dense = load_weights(finished_run / "checkpoints" / "step_00000001")
        save_file({f"model.{n}": t for n, t in dense.parameters.items()}, exported / word)
    elif how == "renamed":
        (exported / word).rename(exported / "weights.safetensors")
    else:
        text = tmp_path / "t.txt"
        text.write_text("some other words\n" * 3)
        prepare(out=tmp_path / "other", train=[text], tokenizer="word")
        if how == "another tokenizer":
            words = load_tokenizer(tmp_path / "other")
            words.save_content(exported)
            described = {key: words.describe()[key] for key in ("kind", "fingerprint")}
            (exported / "tokenizer_config.json").write_text(json.dumps(described))
            word = "tokenizer"
        else:
            (exported / "tokenizer.model").write_bytes(b"nonsense")
            word = "tokenizer.model"
    for command in ("generate", "export"):
        options = ["--out", tmp_path / "out"] if command == "export" else []
        line = fails(1, command, exported, *options)
        assert word in line and str(exported) in line
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written(finished_run, tmp_path, fails):
    (tmp_path / "file").write_text("")
    line = fails(1, "export", finished_run, "--out", tmp_path / "file" / "out")
    assert str(tmp_path / "file") in line
    if os.geteuid() != 0:  # root writes everywhere
        (tmp_path / "locked").mkdir(mode=0o555)
        line = fails(1, "export", finished_run, "--out", tmp_path / "locked" / "out")
        assert str(tmp_path / "locked") in line and "denied" in line
