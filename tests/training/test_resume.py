"""N steps = n + resume + (N - n), to the bit; what cannot be resumed is refused, with no loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import DENSE_END, PRUNE_END, STEPS
from safetensors.torch import load_file, save_file

from allattn.config import ConfigError
from allattn.data.checksum import sha256
from allattn.data.lanes import Corpus, Lanes
from allattn.data.prepare import TINY, prepare
from allattn.training.trainer import Trainer

WAYS = {
    "end": [],
    "never": ["stages[1].prune.remove=never"],
    "every": [
        "stages[1].prune.remove={every: 2}", "stages[1].prune.patience=1",
        "stages[1].prune.gate_lr=1.5", "stages[1].prune.keep=0.25",
    ],
    "penalty": [
        "stages[1].prune.keep=null", "stages[1].prune.penalty=0.5", "stages[1].prune.gate_lr=0.7",
        "stages[1].prune.sampling=straight_through", "stages[1].prune.output_scaling=false",
    ],
    "transformer-xl": ["model.n_persistent=0", "model.d_ff=24", "stages[1].prune.keep=0.2"],
    "adaptive": [
        "model.embedding=adaptive", "model.cutoffs=[40,100]", "model.div_value=2",
        "model.same_length=true", "train.micro_batch_size=2", "model.mem_len=24",
    ],
    "shift": ["data.shift=true"],
}  # fmt: skip
DROPOUT = ["model.dropout=0.1", "model.attn_dropout=0.1", "train.eval_every=3"]


def assert_same_state(a, b) -> None:
    """Everything a run leaves, at its end, is equal to the bit."""
    for kind in ("parameters", "optimizer", "memory"):
        x, y = a.tensors(STEPS, kind), b.tensors(STEPS, kind)
        assert x.keys() == y.keys()
        for name in x:
            assert x[name].shape == y[name].shape and (x[name] == y[name]).all(), (kind, name)
    own = ("config",)  # the run's name is in it
    metas = [{k: v for k, v in r.meta(STEPS).items() if k not in own} for r in (a, b)]
    assert metas[0] == metas[1]
    assert a.timeless() == b.timeless()


@pytest.mark.parametrize("way", WAYS)
def test_stopping_at_every_step_changes_nothing(make_config, train, way):
    options = [*WAYS[way], *DROPOUT]
    whole = train(make_config(*options, name="whole"))
    stopped = train(make_config(*options, name="stopped"), *range(1, STEPS))
    assert_same_state(whole, stopped)
    heads = whole.meta(STEPS)["model"]["n_heads"]
    if way == "every":
        removals = whole.events("removal")
        assert len(removals) >= 2 and removals[0]["step"] < PRUNE_END  # cut inside the stage
    if way not in ("never", "penalty"):
        assert heads != 4 and sum(heads) < 8
    assert all(row["loss"] > 0 for row in whole.lines if "loss" in row)


def test_stopping_once(make_config, train):
    """At a step whose checkpoint is the last that is there."""
    options = [*DROPOUT, "train.save_every=1"]
    whole = train(make_config(*options, name="whole"))
    for n in (1, DENSE_END - 1, DENSE_END, PRUNE_END - 1, PRUNE_END, PRUNE_END + 1, STEPS - 1):
        config = make_config(*options, name=f"stopped{n}")
        shutil.copytree(whole.folder, whole.folder.with_name(f"stopped{n}"))
        for later in range(n + 1, STEPS + 1):
            shutil.rmtree(
                whole.folder.with_name(f"stopped{n}") / "checkpoints" / f"step_{later:08d}"
            )
        assert_same_state(whole, train(config, start=False))


def test_the_runs_here_cross_the_end_of_a_pass(tiny_corpus):
    lanes = Lanes(Corpus(tiny_corpus).tokens("train"), 4, 16)
    assert DENSE_END < lanes.n_segments < STEPS


def test_a_killed_run_goes_on_from_its_last_checkpoint(make_config, train):
    """The lines and steps after it were lost or half done; they are made again, not twice."""
    for saved, killed in ((DENSE_END, 7), (6, 9), (PRUNE_END, 12)):
        name = f"whole{saved}"
        whole = train(make_config(*DROPOUT, f"train.save_every={saved}", name=name))
        config = make_config(*DROPOUT, f"train.save_every={saved}", name=f"killed{saved}")
        run = train(config, killed, to_end=False)
        checkpoints = sorted((run.folder / "checkpoints").iterdir())
        for folder in checkpoints:
            if int(folder.name[-8:]) > saved:
                shutil.rmtree(folder)
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 12, "sta')  # the kill cut a line short
        train(config, start=False)
        assert_same_state(whole, run)


def test_a_half_written_checkpoint_is_not_one(make_config, train):
    whole = train(make_config(name="whole"))
    config = make_config(name="killed")
    run = train(config, 5, to_end=False)
    partial = run.folder / "checkpoints" / ".partial_step_00000006"
    shutil.copytree(run.checkpoint(5), partial)
    (partial / "meta.json").unlink()
    train(config, start=False)
    assert_same_state(whole, run)


def test_resuming_a_finished_run_changes_nothing(make_config, train, contents):
    config = make_config()
    run = train(config)
    before = {k: v for k, v in contents(run.folder).items() if not k.startswith("tensorboard")}
    train(config, start=False)
    after = {k: v for k, v in contents(run.folder).items() if not k.startswith("tensorboard")}
    assert after == before


def test_resume_without_a_run_begins_one(make_config, train):
    whole = train(make_config(name="whole"))
    assert_same_state(whole, train(make_config(name="other"), start=False))


def test_a_later_stage_may_be_changed_and_the_split_of_lanes_too(make_config, train):
    run = train(make_config(), 6, to_end=False)
    changed = make_config("stages[2].steps=2", "train.micro_batch_size=2", "train.log_every=2")
    assert train(changed, start=False).folder == run.folder
    assert run.checkpoint(PRUNE_END + 2).is_dir()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.d_model=32", "model.d_model"),
        ("model.n_heads=2", "model.n_heads"),
        ("model.mem_len=8", "model.mem_len"),
        ("train.batch_size=2", "train.batch_size"),
        ("train.optimizer.lr=0.1", "train.optimizer"),
        ("run.seed=4", "run.seed"),
        ("stages[0].steps=5", "stages[0].steps"),
        ("stages[1].prune.keep=0.25", "stages[1].prune.keep"),
    ],
)
def test_what_a_run_began_with_stays(make_config, train, contents, override, key):
    run = train(make_config(), 6, to_end=False)
    before = contents(run.folder)
    with pytest.raises(ConfigError) as error:
        Trainer(make_config(override), resume=True)
    assert str(error.value).startswith(f"{key}: ") and "\n" not in str(error.value)
    assert contents(run.folder) == before


def test_another_tokenizer_of_the_same_size_is_refused(make_config, train, contents, tmp_path):
    text, size = TINY / "test.txt", Corpus(make_config().data.dir).vocab_size
    other = tmp_path / "other"
    prepare(out=other, train=[text], tokenizer="sentencepiece", vocab_size=size)
    run = train(make_config(), 2, to_end=False)
    before = contents(run.folder)
    with pytest.raises(ConfigError) as error:
        Trainer(make_config(f"data.dir={other}"), resume=True)
    assert str(error.value).startswith("data.dir: ") and "\n" not in str(error.value)
    assert contents(run.folder) == before


@pytest.mark.parametrize("name", ["parameters", "optimizer", "memory"])
def test_a_truncated_file_is_named(make_config, train, contents, name):
    run = train(make_config(), 6, to_end=False)
    path = run.checkpoint(6) / f"{name}.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    before = contents(run.folder)
    with pytest.raises(ValueError) as error:
        Trainer(make_config(), resume=True)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert contents(run.folder) == before


@pytest.mark.parametrize("damage", ["missing", "not json", "foreign", "empty"])
def test_a_damaged_meta_is_named(make_config, train, contents, damage):
    run = train(make_config(), 6, to_end=False)
    path: Path = run.checkpoint(6) / "meta.json"
    path.unlink()
    text = {"not json": "{", "foreign": '{"format_version": 99}', "empty": ""}
    if damage != "missing":
        path.write_text(text[damage])
    before = contents(run.folder)
    with pytest.raises(ValueError) as error:
        Trainer(make_config(), resume=True)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert contents(run.folder) == before


def test_a_meta_without_a_value_that_the_model_needs_is_named(make_config, train, contents):
    run = train(make_config(), 6, to_end=False)
    path: Path = run.checkpoint(6) / "meta.json"
    meta = json.loads(path.read_text())
    meta["model"]["d_head"] = None
    path.write_text(json.dumps(meta))
    before = contents(run.folder)
    with pytest.raises(ValueError) as error:
        Trainer(make_config(), resume=True)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert contents(run.folder) == before


def test_a_checkpoint_of_another_shape_is_refused(make_config, train, contents):
    run = train(make_config(), 6, to_end=False)
    path = run.checkpoint(6) / "parameters.safetensors"
    tensors = load_file(path)
    name = "layers.1.attention.query.weight"
    tensors[name] = tensors[name][:8].contiguous()
    save_file(tensors, path)
    meta = json.loads((path.parent / "meta.json").read_text())
    meta["sha256"][path.name] = sha256(path)
    (path.parent / "meta.json").write_text(json.dumps(meta))
    before = contents(run.folder)
    with pytest.raises(ValueError) as error:
        Trainer(make_config(), resume=True)
    assert str(path) in str(error.value) and name in str(error.value)
    assert "\n" not in str(error.value) and contents(run.folder) == before


def test_a_finished_run_without_checkpoints_is_not_trained_over(finished_run, tmp_path, fails):
    """Somebody deleted them to save space: the model that is left must stay."""
    shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    config = tmp_path / "run" / "config.yaml"
    line = fails(2, "train", config, f"run.dir={tmp_path}", "--resume")
    assert "finished model but no checkpoint" in line
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() == before


def test_flipped_bits_and_another_step_are_found(finished_run, tmp_path, fails):
    for name in ("parameters", "optimizer", "memory"):
        folder = tmp_path / name / "run"
        shutil.copytree(finished_run, folder)
        path = folder / "checkpoints" / f"step_{STEPS:08d}" / f"{name}.safetensors"
        data = bytearray(path.read_bytes())
        data[-40] ^= 4
        path.write_bytes(data)
        config = finished_run / "config.yaml"
        line = fails(1, "train", config, f"run.dir={folder.parent}", "--resume")
        assert f"{name}.safetensors: damaged" in line and "delete" in line
    folder = finished_run / "checkpoints" / f"step_{STEPS:08d}"
    moved = shutil.copytree(folder, tmp_path / "step_00000099")
    assert "not of this folder" in fails(1, "evaluate", moved)
