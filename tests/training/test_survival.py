"""Killed, stopped, out of space, not finite: a run loses but the steps since its last save."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess

import pytest
import torch
from killed import HANG, Announcement, Child, done
from ports import port_of_ours
from runs import DENSE_END, STEPS, Run, same_tensors
from test_deepspeed import environment, start_two_ranks, until_they_end

from allattn.cli import main
from allattn.model.adaptive import TiedVocabulary
from allattn.moments import ANNOUNCE_TO, PAUSE_AT
from allattn.training.monitor import SpikeDetector
from allattn.training.optim import LossScale
from allattn.training.state import checkpoints_of
from allattn.training.trainer import Trainer
from allattn.training.update import NonFiniteLoss, Updater


def test_sigterm_saves_at_the_next_step_and_says_so(tiny_yaml, finished_run, tmp_path):
    folder, said = tmp_path / "stopped", tmp_path / "said"
    command = ["train", tiny_yaml, f"run.dir={folder}"]
    process = Child(said, *command, at="step:logged#6")
    process.wait()
    os.kill(process.process.pid, signal.SIGTERM)
    assert process.ended() == 75, process.printed()
    last = process.printed("stderr").splitlines()[-1]
    assert "SIGTERM; saved after step 7" in last and "--resume" in last
    run, expected = Run(folder / "run"), Run(finished_run)
    assert checkpoints_of(run.folder)[-1] == run.checkpoint(7)
    assert "continuing after step 7" in done(said, *command, "--resume").printed()
    for kind in ("parameters", "optimizer", "memory"):
        assert same_tensors(run.tensors(STEPS, kind), expected.tensors(STEPS, kind)), kind


def test_the_newest_and_the_best_stay(make_config, train):
    run = train(make_config("train.save_every=1", "train.eval_every=2", "train.keep_last=3"))
    ppl = {
        row["step"]: row["ppl"]
        for row in run.lines
        if row.get("split") == "valid" and (run.folder / "checkpoints").exists()
    }
    best = min(ppl, key=ppl.get)
    left = {int(path.name[-8:]) for path in checkpoints_of(run.folder)}
    assert left == {*range(STEPS - 2, STEPS + 1), best}


def test_the_best_stays_when_it_is_old(make_config, train, monkeypatch):
    scores = iter([9.0, 5.0, 7.0, 8.0, 8.5, 9.0, 9.5])
    monkeypatch.setattr(
        Trainer,
        "_evaluate",
        lambda self, split, most=None: {"loss": 1.0, "ppl": next(scores, 20.0)},
    )
    run = train(make_config("train.save_every=1", "train.eval_every=1", "train.keep_last=1"))
    assert [int(path.name[-8:]) for path in checkpoints_of(run.folder)] == [2, STEPS]


@pytest.mark.parametrize("policy", ["stop", pytest.param("continue", marks=pytest.mark.slow)])
def test_a_full_disk(tiny_yaml, tmp_path, policy):
    """A limit on file sizes stands for it: writing fails in the middle of a file."""
    options = ["train.save_every=2", f"run.dir={tmp_path}", f"train.save_error={policy}"]
    said = tmp_path / "said"
    done(
        said, "train", tiny_yaml, *options,
        "stages[0].steps=2", "stages[1].steps=1", "stages[2].steps=1",
    )  # fmt: skip
    run = Run(tmp_path / "run")
    shutil.rmtree(run.folder / "final")
    for path in checkpoints_of(run.folder)[1:]:
        shutil.rmtree(path)
    assert checkpoints_of(run.folder) == [run.checkpoint(2)]
    before = {p.name: p.read_bytes() for p in run.checkpoint(2).iterdir()}
    options += ["stages[0].steps=2", "stages[1].steps=3", "stages[2].steps=3", "--resume"]
    limited = Child(said, "train", tiny_yaml, *options, RLIMIT_FSIZE=30_000)
    status, out = limited.ended(), limited.printed()
    assert status == 1, out  # with continue, it is the last export that fails
    assert "could not save step 4" in out or "could not save step 5" in out
    assert "newest checkpoint is step_00000002" in out and "Traceback" not in out
    assert {p.name: p.read_bytes() for p in run.checkpoint(2).iterdir()} == before
    assert [p.name for p in (run.folder / "checkpoints").iterdir()] == ["step_00000002"]
    steps = [row["step"] for row in run.lines if "grad_norm" in row]
    assert max(steps) == (8 if policy == "continue" else 4)
    assert len(run.events("save_error")) == (0 if policy == "stop" else 4)
    assert "continuing after step 2" in done(said, "train", tiny_yaml, *options).printed()
    assert run.checkpoint(8).is_dir()


# Not finite


def poison(monkeypatch, at: set[int], value: float = math.nan) -> None:
    """The loss of these calls of `nll` in training becomes `value`."""
    nll, calls = TiedVocabulary.nll, []

    def broken(self, h, targets):
        if torch.is_grad_enabled():
            calls.append(1)
        wrong = torch.is_grad_enabled() and len(calls) in at
        return nll(self, h, targets) * (value if wrong else 1.0)

    monkeypatch.setattr(TiedVocabulary, "nll", broken)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_skipping_leaves_the_update_out(make_config, train, monkeypatch, value):
    clean = train(make_config("train.save_every=1", name="clean"))
    poison(monkeypatch, {3}, value)
    run = train(make_config("train.save_every=1", "train.non_finite=skip", name="poisoned"))
    (event,) = run.events("skipped")
    assert event["step"] == 3 and event["skipped"] == 1 and event["segment"] == 2
    for kind in ("parameters", "optimizer", "memory"):
        assert same_tensors(run.tensors(2, kind), clean.tensors(2, kind))
        assert same_tensors(run.tensors(3, kind), run.tensors(2, kind))  # nothing moved
    assert not same_tensors(run.tensors(4, "parameters"), run.tensors(3, "parameters"))
    assert run.meta(STEPS)["skipped"] == 1 and run.checkpoint(STEPS).is_dir()
    assert all(t.isfinite().all() for t in run.tensors(STEPS, "parameters").values())


def test_skipping_has_a_bound(make_config, train, monkeypatch):
    poison(monkeypatch, set(range(3, 100)))
    config = make_config("train.non_finite=skip", "train.max_skipped=2")
    with pytest.raises(
        NonFiniteLoss,
        match=r"step 5 \(segment 5 of .*; 2 updates were skipped before \(train.max_skipped\)",
    ):
        train(config)


@pytest.mark.parametrize("n_micro", [1, 2])
def test_a_gradient_that_is_not_finite(make_config, train, monkeypatch, n_micro):
    """The loss is finite, its gradient is not: nothing moves, whatever is configured."""
    micro = f"train.micro_batch_size={4 // n_micro}"
    clean = train(make_config("train.save_every=1", micro, name="clean"), 2, to_end=False)

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * math.inf

    nll, calls = TiedVocabulary.nll, []

    def broken(self, h, targets):
        if torch.is_grad_enabled():
            calls.append(1)
        loss = nll(self, h, targets)
        return Poison.apply(loss) if len(calls) == 2 * n_micro + 1 else loss

    monkeypatch.setattr(TiedVocabulary, "nll", broken)
    config = make_config("train.save_every=1", micro, name="stop")
    trainer = Trainer(config)
    with pytest.raises(NonFiniteLoss, match="step 3 .*gradient norm (inf|nan)"):
        trainer.train()
    assert trainer.step == 2
    weights = trainer.live.engine.snapshot().parameters
    assert same_tensors(weights, clean.tensors(2, "parameters"))


def test_float16_tries_again_with_half_the_scale(make_config, train, monkeypatch):
    monkeypatch.setattr(LossScale, "__init__", lambda self, value=2.0**40, good_steps=0: (
        setattr(self, "value", value), setattr(self, "good_steps", good_steps))[0])  # fmt: skip
    run = train(make_config("train.precision=fp16", "train.save_every=1"), 2)
    reference = train(make_config(name="fp32"))
    skipped = run.events("skipped")
    assert sum(row["step"] == 1 for row in skipped) >= 5
    scales = [row["loss_scale"] for row in skipped]
    assert scales == [2.0 ** (39 - i) for i in range(len(skipped))]
    since = STEPS - skipped[-1]["step"] + 1
    assert run.meta(STEPS)["loss_scale"] == {"value": scales[-1], "good_steps": since}
    assert run.meta(STEPS)["skipped"] == 0  # no batch was left out, and no step used up:
    for key, loss in reference.losses().items():
        assert run.losses()[key] == pytest.approx(loss, abs=0.03), key
    assert [r["lr"] for r in run.lines if "lr" in r] == [
        r["lr"] for r in reference.lines if "lr" in r
    ]


def test_float16_skips_a_batch_that_no_scale_saves(make_config, monkeypatch):
    """Its retries are not skips, and the batches after it are not held to its scale."""
    step = Updater.step

    def poisoned(self, live, number, *rest):
        backward = live.engine.backward
        if number == 5:
            live.engine.backward = lambda loss, *args: backward(loss * math.nan, *args)
        try:
            return step(self, live, number, *rest)
        finally:
            live.engine.backward = backward

    monkeypatch.setattr(Updater, "step", poisoned)
    options = ["train.precision=fp16", "train.non_finite=skip", "train.max_skipped=1"]
    trainer = Trainer(make_config(*options))
    trainer.train()
    assert (trainer.step, trainer.updater.skipped) == (STEPS, 1)
    assert trainer.updater.loss_scale == LossScale(2.0**16, STEPS - 6)


def test_the_loss_scale_by_hand():
    scale = LossScale(8.0)
    for finite, value in ((True, 8), (False, 4), (True, 4), (False, 2)):
        scale.follow(finite)
        assert scale.value == value
    scale = LossScale(8.0, LossScale.GROWTH_STEPS - 2)
    scale.follow(True)
    assert scale.value == 8
    scale.follow(True)
    assert (scale.value, scale.good_steps) == (16, 0)


def test_a_spike_is_told_from_noise():
    rng = random.Random(0)
    detector = SpikeDetector()
    assert not any(detector.rises(5 - i / 100 + rng.gauss(0, 0.05)) for i in range(200))
    mean = detector.mean
    assert detector.rises(mean + 1) and detector.mean == mean
    assert not detector.rises(mean - 1)


def test_a_spike_is_warned_about(make_config, train, monkeypatch):
    monkeypatch.setattr(SpikeDetector, "rises", lambda self, loss: self.__dict__.setdefault(
        "n", iter(range(99))).__next__() == DENSE_END)  # fmt: skip
    run = train(make_config())
    (event,) = run.events("spike")
    assert event["step"] == DENSE_END + 1 and math.isfinite(event["cross_entropy"])


# Two ranks


def test_a_dead_rank_ends_the_others(tiny_yaml, tmp_path):
    """They end by themselves, with a line that says why."""
    announcement = Announcement("step:logged#3@1")
    processes = start_two_ranks(
        tiny_yaml, f"run.dir={tmp_path}", "stages[0].steps=100000",
        "deepspeed.zero_optimization.stage=1", announcement=announcement,
    )  # fmt: skip
    pid = announcement.wait()
    assert pid == processes[1].pid
    os.kill(pid, signal.SIGKILL)
    ended = until_they_end(processes)
    assert ended[1].returncode == -signal.SIGKILL and ended[0].returncode == 1
    last = ended[0].stdout.strip().splitlines()[-1]
    assert "rank" in last and "--resume" in last, ended[0].stdout[-2000:]


@pytest.mark.slow
def test_a_dead_rank_under_the_launcher(tiny_yaml, tmp_path):
    """The launcher ends too; it passes no pipe on, so the rank announces itself in a named one."""
    announced = tmp_path / "announced"
    os.mkfifo(announced)
    command = ["deepspeed", "--num_accelerators", "2", "--master_port", str(port_of_ours()),
               "--module", "allattn", "train", str(tiny_yaml), f"run.dir={tmp_path}",
               "train.save_every=1", "stages[0].steps=100000"]  # fmt: skip
    env = environment(**{PAUSE_AT: "step:logged#3@1", ANNOUNCE_TO: str(announced)})
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with announced.open() as said:  # waits for the rank to open it
        moment, pid = said.readline().split()
    assert moment == "step:logged"
    os.kill(int(pid), signal.SIGKILL)
    out, _ = process.communicate(timeout=HANG)
    assert process.returncode != 0, out
    assert checkpoints_of(tmp_path / "run")


# Files that are not what they were


def test_damaged_and_foreign_files_are_named(finished_run, tiny_yaml, tmp_path, capsys):
    """Every file of a checkpoint and of an export, cut short, overwritten, or with values wrong."""
    rng = random.Random(0)
    for kind in ("checkpoint", "final"):
        source = finished_run / "final"
        if kind == "checkpoint":
            source = finished_run / "checkpoints" / f"step_{DENSE_END + 2:08d}"
        names = ["parameters.safetensors", "meta.json"]
        names = names if kind == "checkpoint" else ["model.safetensors", "config.json"]
        for name in names:
            whole = (source / name).read_bytes()
            variants = [
                b"",
                whole[: len(whole) // 2],
                whole[:7],
                b"{}",
                b"[]",
                b"null",
                b"\x80" * 99,
            ]
            if name.endswith(".json"):
                value = json.loads(whole)
                for key in value:
                    variants.append(
                        json.dumps({k: v for k, v in value.items() if k != key}).encode()
                    )
                    wrong = rng.choice([None, [], {}, "x", -1])
                    variants.append(json.dumps(value | {key: wrong}).encode())
            for i, damaged in enumerate(variants):
                folder = tmp_path / f"{kind}_{name}_{i}"
                shutil.copytree(source, folder)
                (folder / name).write_bytes(damaged)
                capsys.readouterr()
                status = main(["evaluate", str(folder), "--json"])
                err = capsys.readouterr().err
                assert "Traceback" not in err
                if status:
                    last = err.strip().splitlines()[-1]
                    assert status in (1, 2) and last.startswith("allattn: error: "), err
                    if i < 7:
                        assert str(folder) in last, (name, i, last)
                elif i < 7:
                    raise AssertionError(f"{name} variant {i} was accepted")


def test_resuming_from_damaged_values_is_one_line(tiny_yaml, make_config, train, fails):
    config = make_config("train.save_every=1")
    run = train(config, 6, to_end=False)
    path = run.checkpoint(6) / "meta.json"
    whole = json.loads(path.read_text())
    for key in ("step", "stage", "pruner", "head_ids", "memory_length", "history", "spikes"):
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        line = fails(
            1, "train", tiny_yaml, f"run.dir={config.run.dir}", "train.save_every=1", "--resume"
        )
        assert "meta.json" in line and key in line
