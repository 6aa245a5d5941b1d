"""One format: full named tensors and readable JSON, there whole or not at all."""

from __future__ import annotations

import json

import pytest
import torch
from runs import same_tensors
from safetensors import safe_open

from allattn.config import model_config_from_dict
from allattn.model.transformer import TransformerLM
from allattn.training import state
from allattn.training.state import (
    MOMENTS,
    Snapshot,
    check_shapes,
    checkpoints_of,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)


def snapshot() -> Snapshot:
    parameters = {"a": torch.randn(3, 2), "b.weight": torch.randn(4)[::2]}  # one not contiguous
    moments = {key: {name: torch.rand_like(t) for name, t in parameters.items()} for key in MOMENTS}
    del moments["exp_avg"]["a"], moments["exp_avg_sq"]["a"]  # had no step yet
    return Snapshot(parameters, moments, {"b.weight": 7})


def test_a_round_trip_is_bit_equal(tmp_path):
    original = snapshot()
    memory = {"layer_00": torch.randn(2, 5, 3), "layer_02": torch.randn(2, 5, 3)}
    meta = {"step": 12, "stage": 1, "text": "é", "heads": [1, 0], "x": 0.1}
    folder = save_checkpoint(tmp_path, original, memory, meta)
    assert folder.name == "step_00000012"
    loaded, loaded_memory, loaded_meta = load_checkpoint(folder)
    assert same_tensors(loaded.parameters, original.parameters)
    assert all(same_tensors(loaded.moments[key], original.moments[key]) for key in MOMENTS)
    assert loaded.adam_steps == original.adam_steps
    assert same_tensors(loaded_memory, memory)
    assert {key: loaded_meta[key] for key in meta} == meta


def test_files_are_safetensors_and_readable_json(finished_run):
    for folder in checkpoints_of(finished_run):
        names = {path.name for path in folder.iterdir()}
        assert names == {
            "parameters.safetensors", "optimizer.safetensors", "memory.safetensors", "meta.json",
        }  # fmt: skip
        for name in names - {"meta.json"}:
            with safe_open(folder / name, "pt") as file:
                assert all(file.get_slice(key).get_dtype() == "F32" for key in file.keys())
        text = (folder / "meta.json").read_text(encoding="utf-8")
        meta = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
        assert len(text.splitlines()) > 5  # for people too
        assert {"step", "stage", "model", "world_size", "config", "head_ids"} <= meta.keys()


@pytest.mark.parametrize("step", ["parameters", "optimizer", "meta"])
def test_a_crash_while_saving_leaves_the_last_good_one(tmp_path, monkeypatch, contents, step):
    checkpoints = tmp_path / "checkpoints"
    good = save_checkpoint(checkpoints, snapshot(), {}, {"step": 1})
    before = contents(good)
    if step == "meta":
        monkeypatch.setattr(state, "write_json", crash)
    else:
        save_file = state.save_file
        calls = iter(["parameters", "optimizer", "memory"])
        monkeypatch.setattr(
            state, "save_file", lambda *a: crash() if next(calls) == step else save_file(*a)
        )
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(checkpoints, snapshot(), {}, {"step": 2})
    monkeypatch.undo()
    assert checkpoints_of(tmp_path) == [good] and contents(good) == before
    save_checkpoint(checkpoints, snapshot(), {}, {"step": 2})  # what lies there is no obstacle
    names = [path.name for path in checkpoints.iterdir()]
    assert sorted(names) == ["step_00000001", "step_00000002"]


def crash(*args: object) -> None:
    raise KeyboardInterrupt


def test_checkpoints_are_in_the_order_of_steps(tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("step_00000009", "step_100000000", "step_00000010", "step_x", ".partial_step_3"):
        (folder / name).mkdir(parents=True)
    assert [p.name for p in checkpoints_of(tmp_path)] == [
        "step_00000009", "step_00000010", "step_100000000",
    ]  # fmt: skip
    assert checkpoints_of(tmp_path / "nothing") == []


def test_shapes_are_checked_by_name():
    a, b = torch.zeros(2, 3), torch.zeros(3)
    check_shapes("f", {"a": a, "b": b}, {"a": a, "b": b})
    for found, word in (
        ({"a": a}, "b"), ({"a": a, "b": b, "c": b}, "c"), ({"a": a.T, "b": b}, "[3, 2]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="^f: ") as error:
            check_shapes("f", found, {"a": a, "b": b})
        assert word in str(error.value) and "\n" not in str(error.value)


def test_weights_of_a_run_are_its_export_else_its_newest_checkpoint(finished_run, make_config):
    assert load_weights(finished_run).path == finished_run / "final"
    newest = load_weights(finished_run / "checkpoints" / "step_00000014")
    final = load_weights(finished_run)
    assert same_tensors(newest.parameters, final.parameters)
    assert newest.config == final.config


def test_weights_without_an_export(make_config, train):
    run = train(make_config(), 3, 5, to_end=False)
    assert load_weights(run.folder).path == run.checkpoint(5)


@pytest.mark.parametrize("content", ["nothing", "empty folder", "a file", "another program's"])
def test_what_is_no_model_is_said_in_one_line(tmp_path, content):
    path = tmp_path / "x"
    if content == "a file":
        path.write_text("hello")
    elif content != "nothing":
        path.mkdir()
    if content == "another program's":
        (path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError) as error:
        load_weights(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_every_bit_of_a_model_is_in_its_weights(finished_run):
    """Built without storage, then filled: nothing is left over from an initialisation."""
    weights = load_weights(finished_run)
    model = weights.build()
    assert not model.training
    assert same_tensors(dict(model.state_dict()), weights.parameters)
    other = TransformerLM(model_config_from_dict(vars(weights.config), "x"))
    assert other.state_dict().keys() == weights.parameters.keys()
