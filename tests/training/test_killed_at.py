"""kill -9 at every moment that matters; afterwards the same command ends as if nothing had been."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from killed import Child, done, killed
from runs import DENSE_END, STEPS, Run, same_tensors

from allattn.moments import MOMENTS
from allattn.training.state import checkpoints_of

SAVES = ["train.save_every=1", "train.keep_last=2"]
SIXTH = ["parameters.safetensors", "optimizer.safetensors", "memory.safetensors", "meta.json"]
CHECKPOINTS = ["step:backward#6", "step:logged#6", *(f"write:{name}#6" for name in SIXTH),
               "folder:whole#6", "folder:placed#6", "checkpoint:kept#6",
               "checkpoint:going#3"]  # fmt: skip
REMOVAL = ["removal:decided", "removal:cut", "evaluate:segment#2"]
FINAL = [
    "write:model.safetensors", "write:config.json", "export:unproved", "write:config.json#2",
    "folder:whole", "folder:placed",
]  # fmt: skip


def cut_short(moment: str, folder: Path) -> None:
    """A kill in the middle of a write, or of a deletion, leaves a part: take the rest away."""
    kind, _, name = moment.partition("#")[0].partition(":")
    if kind == "write":
        (path,) = folder.rglob(f".partial_*/{name}")
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    elif moment.startswith("checkpoint:going"):
        (path,) = folder.rglob(".going_*/parameters.safetensors")
        path.unlink()


def assert_same_end(run: Run, expected: Run) -> None:
    steps = int(checkpoints_of(expected.folder)[-1].name[-8:])
    for kind in ("parameters", "optimizer", "memory"):
        assert same_tensors(run.tensors(steps, kind), expected.tensors(steps, kind)), kind
    assert run.timeless() == expected.timeless()
    models = [each.folder / "final" / "model.safetensors" for each in (run, expected)]
    assert models[0].read_bytes() == models[1].read_bytes()
    hidden = {path.name for path in run.folder.rglob(".*")}
    assert hidden <= {".lock"}
    assert len(checkpoints_of(run.folder)) <= 3


@pytest.mark.parametrize("moment", [*CHECKPOINTS, *REMOVAL])
def test_training(tiny_yaml, finished_run, tmp_path, moment):
    command = ["train", tiny_yaml, *SAVES, f"run.dir={tmp_path}"]
    child = Child(tmp_path / "said", *command, at=moment)
    child.wait()
    cut_short(moment, tmp_path / "run")
    child.killed()
    done(tmp_path / "said", *command, "--resume")
    assert_same_end(Run(tmp_path / "run"), Run(finished_run))


@pytest.mark.parametrize("moment", FINAL)
def test_the_final_model(tiny_yaml, finished_run, tmp_path, moment):
    """Trained to the end: going on only exports."""
    shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    for path in checkpoints_of(tmp_path / "run")[:-3]:
        shutil.rmtree(path)
    command = ["train", tiny_yaml, *SAVES, f"run.dir={tmp_path}", "--resume"]
    child = Child(tmp_path / "said", *command, at=moment)
    child.wait()
    cut_short(moment, tmp_path / "run")
    child.killed()
    done(tmp_path / "said", *command)
    assert_same_end(Run(tmp_path / "run"), Run(finished_run))


@pytest.mark.parametrize("moment", ["resume:lines", "step:backward"])
def test_killed_while_it_goes_on(tiny_yaml, finished_run, tmp_path, moment):
    command = ["train", tiny_yaml, *SAVES, f"run.dir={tmp_path}"]
    killed(tmp_path / "said", *command, at=f"step:logged#{DENSE_END + 2}")
    killed(tmp_path / "said", *command, "--resume", at=moment)
    done(tmp_path / "said", *command, "--resume")
    assert_same_end(Run(tmp_path / "run"), Run(finished_run))


def test_killed_at_the_last_deletion(tiny_yaml, finished_run, tmp_path):
    """No checkpoint is written after it, and yet what it left goes."""
    command = ["train", tiny_yaml, *SAVES, f"run.dir={tmp_path}"]
    killed(tmp_path / "said", *command, at=f"checkpoint:going#{STEPS - 2}")
    assert list(tmp_path.glob("run/checkpoints/.going_*"))
    done(tmp_path / "said", *command, "--resume")
    assert_same_end(Run(tmp_path / "run"), Run(finished_run))


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_again_and_again(tiny_yaml, finished_run, tmp_path, kills):
    """At moments drawn at random, all over one run."""
    options, expected = list(SAVES), Run(finished_run)
    if kills > 3:  # a run that is long enough to be killed so often
        options += [f"stages[{i}].steps={n}" for i, n in enumerate((400, 600, 400))]
        done(tmp_path / "said", "train", tiny_yaml, *options, f"run.dir={tmp_path / 'whole'}")
        expected = Run(tmp_path / "whole" / "run")
    command = ["train", tiny_yaml, *options, f"run.dir={tmp_path}"]
    rng, most = random.Random(1), 4 if kills == 3 else 25
    for _ in range(kills):
        moment = f"{rng.choice(CHECKPOINTS).partition('#')[0]}#{rng.randint(1, most)}"
        killed(tmp_path / "said", *command, "--resume", at=moment)
    done(tmp_path / "said", *command, "--resume")
    assert_same_end(Run(tmp_path / "run"), expected)


def test_exporting(finished_run, tmp_path):
    out = tmp_path / "out"
    command = ["export", finished_run, "--out", out, "--overwrite"]
    for moment in (
        "evaluate:segment", "write:model.safetensors", "write:config.json", "export:unproved",
        "write:config.json#2", "folder:whole", "folder:placed", "folder:whole", "folder:aside",
        "folder:placed",
    ):  # fmt: skip
        had = out.exists()
        child = Child(tmp_path / "said", *command, at=moment)
        child.wait()
        cut_short(moment, tmp_path)
        child.killed()
        there = "placed" in moment or had and "aside" not in moment
        assert out.exists() == there and (out / "README.md").exists() == there, moment
    done(tmp_path / "said", *command)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "said"}
    for path in (finished_run / "final").iterdir():
        if path.name != "README.md":
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_evaluating(finished_run, tmp_path, contents):
    before = contents(finished_run)
    command = ["evaluate", finished_run, "--json"]
    expected = done(tmp_path / "said", *command).printed("stdout")
    killed(tmp_path / "said", *command, at="evaluate:segment#3")
    assert contents(finished_run) == before
    again = done(tmp_path / "said", *command).printed("stdout")
    cut = again.index('"tokens_per_second"')  # the clock decides that one
    assert again[:cut] == expected[: expected.index('"tokens_per_second"')] and cut > 100


def test_every_moment_is_tried():
    tried = {moment.partition("#")[0] for moment in [*CHECKPOINTS, *REMOVAL, *FINAL]}
    tried = {"write:FILE" if moment.startswith("write:") else moment for moment in tried}
    elsewhere = {moment for moment in MOMENTS if moment.startswith("prepare:")}
    assert tried | {"resume:lines", "folder:aside"} | elsewhere == MOMENTS.keys()
