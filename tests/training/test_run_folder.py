"""Who may write to a run, what it may be resumed on, and who can read what it leaves."""

import os
import shutil
import stat

import pytest
from runs import STEPS

from allattn.config import ConfigError
from allattn.data.prepare import prepare
from allattn.training.trainer import Trainer


def test_one_process_at_a_time(make_config, train, contents):
    config = make_config()
    run = train(config, 5, to_end=False)
    writer = Trainer(config, resume=True)  # holds the folder until its training ends

    def held() -> dict[str, bytes]:
        # TensorBoard's writer has a thread of its own, and its own time to write
        return {k: v for k, v in contents(run.folder).items() if "tensorboard" not in k}

    before = held()
    with pytest.raises(ConfigError, match="another process is writing"):
        Trainer(config, resume=True)
    assert held() == before
    writer.train(6)
    Trainer(config, resume=True).train(7)
    assert run.checkpoint(7).is_dir()


def test_resuming_on_another_text_is_refused(make_config, train, tmp_path):
    texts = {}
    for name, word in (("a", "apple pear "), ("b", "pear apple ")):
        text = tmp_path / f"{name}.txt"
        text.write_text((word * 20 + "\n") * 60)
        prepare(out=tmp_path / name, train=[text], valid=[text], tokenizer="byte")
        texts[name] = f"data.dir={tmp_path / name}"
    train(make_config(texts["a"]), 5, to_end=False)
    with pytest.raises(ConfigError, match="another text"):
        Trainer(make_config(texts["b"]), resume=True)
    Trainer(make_config(texts["a"]), resume=True).train(6)


def test_weights_of_another_tokenizer_are_refused(make_config, train, tmp_path):
    folders = []
    for name, word in (("a", "apple pear "), ("b", "grape plum ")):
        (text := tmp_path / f"{name}.txt").write_text((word * 20 + "\n") * 60)
        prepare(out=tmp_path / name, train=[text], valid=[text], tokenizer="word")
        folders.append(f"data.dir={tmp_path / name}")
    first = train(make_config(folders[0], name="first"), 5, to_end=False)
    start = f"run.init_from={first.folder}"
    with pytest.raises(ConfigError, match=r"run\.init_from: .* another tokenizer"):
        Trainer(make_config(folders[1], start, name="other"))
    assert Trainer(make_config(folders[0], start, name="same")).step == 0


def test_attention_is_computed_as_this_start_says(make_config, train):
    run = train(make_config(), 5, to_end=False)
    trainer = Trainer(make_config("model.attention=reference"), resume=True)
    layers = trainer.live.engine.module.layers
    assert {layer.attention.implementation for layer in layers} == {"reference"}
    trainer.train()
    trainer = Trainer(make_config(name="auto"))
    trainer.train()
    assert run.meta(STEPS)["model"]["attention"] == "reference"
    left = [layer.attention for layer in trainer.live.engine.module.layers if layer.attention]
    assert {a.implementation for a in left} == {"auto"}  # also after a removal


def test_a_structure_without_heads_has_nothing_to_prune(make_config, train):
    empty = train(make_config("stages[1].prune.keep=0", name="empty"))
    structure = f"run.init_structure={empty.folder}"
    with pytest.raises(ConfigError, match=r"init_structure: .* no head left.* stage prune"):
        Trainer(make_config(structure, name="other"))


def test_a_shift_belongs_to_a_run(make_config, train):
    plain = train(make_config("data.shift=false", name="plain"), 5, to_end=False)
    shifted = train(make_config("data.shift=true", name="shifted"), 5, to_end=False)
    assert plain.losses()["train", 1] != shifted.losses()["train", 1]
    for name, other in (("plain", "true"), ("shifted", "false")):
        with pytest.raises(ConfigError, match=r"data\.shift: .* began with"):
            Trainer(make_config(f"data.shift={other}", name=name), resume=True)


def test_weights_can_be_read_by_others(make_config, train):
    old = os.umask(0o022)
    try:
        run = train(make_config(), 5, to_end=False)
    finally:
        os.umask(old)
    for name in ("parameters", "optimizer", "memory"):
        mode = (run.checkpoint(5) / f"{name}.safetensors").stat().st_mode
        assert stat.S_IMODE(mode) == 0o644


def test_resuming_says_from_where(make_config, train, capsys):
    config = make_config()
    run = train(config, 5, to_end=False)
    Trainer(config, resume=True).train(6)
    assert "continuing after step 5" in capsys.readouterr().err
    shutil.rmtree(run.folder / "checkpoints")
    Trainer(config, resume=True).train(1)
    assert "no checkpoint to resume from" in capsys.readouterr().err


def test_a_damaged_checkpoint_says_how_to_go_on(make_config, train):
    config = make_config()
    run = train(config, 6, to_end=False)
    newest = sorted((run.folder / "checkpoints").iterdir())[-1]
    (newest / "parameters.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=f"delete {newest} to go on"):
        Trainer(config, resume=True)


def test_a_target_above_that_of_a_stage_before_is_refused(make_config):
    with pytest.raises(ConfigError, match=r"stages\[2\].prune.keep: 0.75 .* keeps 0.5"):
        make_config("stages[1].prune.keep=0.5", "stages[2].prune.keep=0.75")


def test_init_from_other_heads_says_what_to_set(make_config, train):
    run = train(make_config())
    with pytest.raises(ConfigError, match=r"set model.n_heads=\[.*\] model.d_head="):
        Trainer(make_config(f"run.init_from={run.checkpoint(14)}", name="other"))


def test_gates_cut_while_open_are_warned_of(make_config, train, capsys):
    run = train(make_config("stages[1].prune.gate_lr=1e-6"))
    (decision,) = run.events("decision")
    assert decision["cut_open"] == 4
    assert "4 of the heads cut were still open" in capsys.readouterr().err
