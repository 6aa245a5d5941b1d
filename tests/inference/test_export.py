"""An export is a model of its own: whole, small, the same logits; and never over something else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
import torch
from killed import HANG
from runs import EDGE_GATES, HEADS, PRUNE_END, STEPS, Run
from safetensors.torch import load_file, save_file

import allattn
from allattn.cli import main
from allattn.data.checksum import sha256
from allattn.data.lock import alone
from allattn.inference import export as module
from allattn.inference.load import load_pretrained, open_source
from allattn.inference.travel import travelling_code
from allattn.training.state import load_weights


@pytest.fixture
def exported(finished_run, tmp_path) -> Path:
    assert main(["export", str(finished_run), "--out", str(tmp_path / "model")]) == 0
    return tmp_path / "model"


def log_probs(model) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    with torch.no_grad():
        first = model(ids)
        second = model(ids.flip(1), memory=first.memory)
    return torch.cat([first.log_probs, second.log_probs], dim=1)


def test_what_is_in_it(exported, finished_run):
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "README.md", "tokenizer_config.json",
        "tokenizer.model", *travelling_code(),
    }  # fmt: skip
    config = json.loads((exported / "config.json").read_text())
    assert config["model"]["n_heads"] == Run(finished_run).meta(STEPS)["model"]["n_heads"]
    weights = load_file(exported / "model.safetensors")
    assert sum(t.numel() for t in weights.values()) == oracles.parameters(
        open_source(exported).config
    )
    assert not any("log_alpha" in name for name in weights)
    card = (exported / "README.md").read_text()
    assert f"4 of {HEADS} attention heads" in card and "all-attention" in card
    assert all(stage in card for stage in ("dense", "prune", "tune"))


def test_same_logits_from_run_checkpoint_and_export(exported, finished_run):
    expected = log_probs(load_pretrained(finished_run))
    for path in (exported, finished_run / "checkpoints" / f"step_{STEPS:08d}"):
        assert torch.equal(log_probs(load_pretrained(path)), expected)


def test_same_logits_in_a_fresh_process_without_the_corpus(exported, tmp_path):
    """Only the package's public names, in another folder; the corpus is not asked for."""
    expected = log_probs(load_pretrained(exported))
    code = f"""
import torch, allattn
from safetensors.torch import save_file
model = allattn.load_pretrained({str(exported)!r})
tokenizer = allattn.load_tokenizer({str(exported)!r})
assert tokenizer.vocab_size == model.config.vocab_size
assert tokenizer.decode(tokenizer.encode("She had been\\n")) == "She had been\\n"
ids = torch.arange(24).view(2, 12) % model.config.vocab_size
with torch.no_grad():
    first = model(ids)
    second = model(ids.flip(1), memory=first.memory)
save_file({{"x": torch.cat([first.log_probs, second.log_probs], dim=1)}}, "out.safetensors")
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, timeout=HANG)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["x"], expected)


def test_an_export_of_an_export_is_the_same(exported, tmp_path, contents):
    assert main(["export", str(exported), "--out", str(tmp_path / "again")]) == 0
    assert contents(tmp_path / "again") == contents(exported)


def test_within_the_pruning_stage(make_config, train, tmp_path):
    """Gates are decided as evaluation decides them; the model loses them and what they close."""
    run = train(make_config(*EDGE_GATES, "train.save_every=1"), PRUNE_END - 1, to_end=False)
    n_open = {row["step"]: row["heads_open"] for row in run.lines if "heads_open" in row}
    step = next(s for s in sorted(n_open) if 0 < n_open[s] < HEADS)
    checkpoint, out = run.checkpoint(step), tmp_path / "out"
    assert any("log_alpha" in name for name in run.tensors(step, "parameters"))
    assert main(["export", str(checkpoint), "--out", str(out)]) == 0
    weights = load_file(out / "model.safetensors")
    assert not any("log_alpha" in name for name in weights)
    model = load_pretrained(out)
    assert sum(model.config.heads) == n_open[step]
    assert torch.equal(log_probs(model), log_probs(load_pretrained(checkpoint)))
    # each head is still known by its first number: its rows in the checkpoint are its rows here
    head_ids = load_weights(out).info["run"]["head_ids"]
    assert list(map(len, head_ids)) == model.config.heads
    before, d_head = run.tensors(step, "parameters"), model.config.d_head
    for i, ids in enumerate(head_ids):
        name = f"layers.{i}.attention.query.weight"
        if ids:
            rows = before[name].view(-1, d_head, before[name].shape[1])
            assert torch.equal(rows[ids].flatten(0, 1), weights[f"model.{name}"])


def test_all_heads_gone(make_config, train, tmp_path):
    run = train(make_config("stages[1].prune.keep=0"))
    assert main(["export", str(run.folder), "--out", str(tmp_path / "none")]) == 0
    assert load_pretrained(tmp_path / "none").config.heads == [0, 0]


def test_a_persistent_bias_goes_with_its_head(make_config, train, tmp_path):
    run = train(make_config("model.persistent_share=0.3"))
    assert main(["export", str(run.folder), "--out", str(tmp_path / "out")]) == 0
    model = load_pretrained(tmp_path / "out")
    assert (model.config.persistent_share, sum(model.config.heads)) == (0.3, HEADS // 2)
    found = {n: p for n, p in model.named_parameters() if n.endswith("persistent_bias")}
    assert [len(p) for p in found.values()] == [n for n in model.config.heads if n]
    assert len({float(x) for p in found.values() for x in p}) == HEADS // 2  # they were trained
    assert torch.equal(log_probs(model), log_probs(load_pretrained(run.folder)))


def test_changes_that_weights_do_not_depend_on(exported):
    model = load_pretrained(exported, seq_len=5, mem_len=40, clamp_len=9, same_length=True)
    assert (model.config.mem_len, model.config.clamp_len) == (40, 9)
    for change in ({"n_heads": 3}, {"d_model": 8}, {"nonsense": 1}):
        with pytest.raises(ValueError, match=next(iter(change))):
            load_pretrained(exported, **change)


def test_public_names(exported):
    assert isinstance(allattn.load_pretrained(exported), allattn.TransformerLM)
    assert allattn.load_tokenizer(exported).kind == "sentencepiece"


# Nothing is lost


def test_an_existing_export_is_refused_then_replaced(exported, finished_run, fails, contents):
    before = contents(exported)
    assert str(exported) in fails(1, "export", finished_run, "--out", exported)
    assert contents(exported) == before
    (exported / "README.md").write_text("old")
    assert main(["export", str(finished_run), "--out", str(exported), "--overwrite"]) == 0
    assert contents(exported) == before


@pytest.mark.parametrize("kind", ["text", "empty", "run", "corpus", "file", "another program's"])
@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_a_foreign_folder_stays(
    finished_run, tiny_corpus, tmp_path, fails, contents, kind, options
):
    out = tmp_path / "precious"
    if kind == "run":
        shutil.copytree(finished_run, out)
    elif kind == "corpus":
        shutil.copytree(tiny_corpus, out)
    elif kind == "file":
        out.write_text("precious")
    else:
        out.mkdir()
    if kind in ("text", "another program's"):
        (out / "thesis.txt").write_text("precious")
    if kind == "another program's":
        (out / "config.json").write_text('{"model_type": "bert"}')
        save_file({"w": torch.zeros(2)}, out / "model.safetensors")
    before = contents(tmp_path)
    line = fails(1, "export", finished_run, "--out", out, *options)
    assert str(out) in line
    assert contents(tmp_path) == before and out.exists()


def test_an_export_over_itself_is_refused(exported, fails, contents):
    before = contents(exported)
    fails(1, "export", exported, "--out", exported, "--overwrite")
    assert contents(exported) == before


@pytest.mark.parametrize("where", ["save_tensors", "write_json"])
def test_a_crash_leaves_the_old_export(
    exported, finished_run, monkeypatch, contents, where, tmp_path
):
    before = contents(exported)

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, where, crash)
    argv = ["export", str(finished_run), "--out", str(exported), "--overwrite"]
    assert main(argv) == 130
    assert contents(exported) == before
    assert main(["export", str(finished_run), "--out", str(tmp_path / "new")]) == 130
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert main(argv) == 0 and contents(exported) == before


# What cannot be exported or loaded


def believe(path: Path) -> None:
    """Make a changed file the one that was written, as far as its sha256 goes."""
    config = path.parent / "config.json"
    value = json.loads(config.read_text())
    value["sha256"] = {path.name: sha256(path)}
    config.write_text(json.dumps(value))


def damage(folder: Path, how: str) -> str:
    """Spoil an export; returns a word of the message to expect."""
    path = folder / "model.safetensors"
    config = folder / "config.json"
    tensors = load_file(path)
    name = "model.layers.0.attention.query.weight"
    name = name if name in tensors else "model.layers.1.attention.query.weight"
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "header only":
        path.write_bytes(path.read_bytes()[:9])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()
    elif how == "a tensor less":
        tensors.pop(name)
        save_file(tensors, path)
        believe(path)
        return name.removeprefix("model.")
    elif how == "a tensor more":
        save_file({**tensors, "extra": torch.zeros(1)}, path)
        believe(path)
        return "extra"
    elif how == "another shape":
        tensors[name] = tensors[name][:, :4].contiguous()
        save_file(tensors, path)
        believe(path)
        return name.removeprefix("model.")
    elif how == "config of another shape":
        value = json.loads(config.read_text())
        value["model"]["n_persistent"] += 1
        config.write_text(json.dumps(value))
        return "persistent_key"
    elif how == "config not json":
        config.write_text("{")
        return "config.json"
    elif how == "config with an unknown key":
        value = json.loads(config.read_text())
        value["model"]["n_layer"] = 2
        config.write_text(json.dumps(value))
        return "n_layer"
    elif how == "another version":
        value = json.loads(config.read_text())
        config.write_text(json.dumps({**value, "format_version": 99}))
        return "config.json"
    return "model.safetensors"


@pytest.mark.parametrize(
    "how",
    [
        "truncated", "header only", "empty", "missing", "a tensor less", "a tensor more",
        "another shape", "config of another shape", "config not json",
        "config with an unknown key", "another version",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["evaluate", "export", "generate"])
def test_a_damaged_export(exported, fails, contents, tmp_path, how, command):
    word = damage(exported, how)
    options = ["--out", str(tmp_path / "out")] if command == "export" else []
    before = contents(tmp_path)
    status = 2 if how == "config with an unknown key" else 1
    line = fails(status, command, exported, *options)
    assert word in line and str(exported) in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", ["evaluate", "export", "generate"])
def test_nothing_there(fails, tmp_path, contents, command):
    options = ["--out", str(tmp_path / "out")] if command == "export" else []
    line = fails(1, command, tmp_path / "missing", *options)
    assert str(tmp_path / "missing") in line and contents(tmp_path) == {}


def test_a_tokenizer_that_is_not_the_models(exported, fails):
    path = exported / "tokenizer_config.json"
    path.write_text('{"kind": "byte", "fingerprint": "x"}')
    assert str(path.parent) in fails(1, "generate", exported)


def test_two_at_once_and_a_source_inside(exported, finished_run, tmp_path, fails, contents):
    out = tmp_path / "out"
    with alone(out):
        assert "another process" in fails(1, "export", finished_run, "--out", out)
    assert not out.exists()
    assert main(["export", str(finished_run), "--out", str(out)]) == 0
    shutil.copytree(out, out / "inner")
    before = contents(out)
    line = fails(1, "export", out / "inner", "--out", out, "--overwrite")
    assert "inside" in line and contents(out) == before
    assert "inner" in fails(1, "export", finished_run, "--out", out, "--overwrite")
    assert contents(out) == before
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"out", "model"}, left  # no lock, no half of one


def test_a_link_is_followed(finished_run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        argv = ["export", str(finished_run), "--out", str(tmp_path / "link"), "--overwrite"]
        assert main(argv) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()


def test_a_corpus_that_moved(make_config, train, tiny_corpus, tmp_path, capsys, fails):
    """Tokenizer and proof come from --data."""
    moved = tmp_path / "moved"
    shutil.copytree(tiny_corpus, moved)
    run = train(make_config(f"data.dir={moved}"))
    moved.rename(tmp_path / "elsewhere")
    assert "--data" in fails(1, "export", run.folder, "--out", tmp_path / "out")
    argv = ["export", run.folder, "--out", tmp_path / "out", "--data", tmp_path / "elsewhere"]
    assert main([str(a) for a in argv]) == 0
    assert "without evaluation" not in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| perplexity a token |" in card
    fails(1, "export", tmp_path / "out", "--out", tmp_path / "b", "--data", tmp_path / "nothing")
