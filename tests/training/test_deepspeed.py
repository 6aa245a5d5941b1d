"""Two ranks under the DeepSpeed launcher give the losses of one local process, through every stage.

A launch takes some ten seconds; the first ever on a machine compiles an operator first.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import PRUNE_END, STEPS, Run

from allattn.training.trainer import Trainer

SAVED = 7  # within the pruning stage
pytestmark = pytest.mark.filterwarnings("ignore")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(**more: str) -> dict[str, str]:
    here = Path(sys.executable).parent
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{here}{os.pathsep}{clean.get('PATH', '')}"
    return {**clean, "PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}


def launch(yaml: Path, *arguments: str) -> None:
    """`deepspeed --num_accelerators 2 --module allattn train ...`"""
    command = [
        "deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()),
        "--module", "allattn", "train", str(yaml), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(), timeout=280, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def two_ranks(yaml: Path, *arguments: str) -> list[subprocess.CompletedProcess]:
    """The same two processes without the launcher, which waits some seconds at its end."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "allattn", "train", str(yaml), *arguments],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **address),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    done = []
    try:
        for process in processes:
            out, _ = process.communicate(timeout=280)
            done.append(subprocess.CompletedProcess([], process.returncode, out))
    finally:
        for process in processes:
            process.kill()
    return done


def flat(value: list | float | None) -> list[float]:
    """All that nested lists hold; -1 for None."""
    if isinstance(value, list):
        return [x for inner in value for x in flat(inner)]
    return [-1.0 if value is None else value]


def assert_same_run(run: Run, local: Run, since: int = 0) -> None:
    expected = {key: loss for key, loss in local.losses().items() if key[1] > since}
    got = {key: loss for key, loss in run.losses().items() if key[1] > since}
    assert got.keys() == expected.keys() and len(got) >= STEPS - since
    for key, loss in expected.items():
        assert got[key] == pytest.approx(loss, abs=1e-5), key
    rows = [
        [r for r in each.lines if "grad_norm" in r and r["step"] > since] for each in (run, local)
    ]
    for key in ("grad_norm", "lr", "heads_open", "params", "tokens"):
        values = [[row[key] for row in part] for part in rows]
        assert values[0] == pytest.approx(values[1], rel=1e-3), key
    for key in ("grad_norm_gates", "grad_norm_weights", "p_open", "persistent_share"):
        values = [
            flat([row[key] for row in each.lines if key in row and row["step"] > since])
            for each in (run, local)
        ]
        assert values[0] and values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5), key
    ids = [each.events("removal")[-1]["head_ids"] for each in (run, local)]
    assert ids[0] == ids[1]
    removal = run.events("removal")[-1]
    assert removal["step"] == PRUNE_END
    assert abs(removal["loss_before"] - removal["loss_after"]) < 1e-5


def assert_same_checkpoints(run: Run, local: Run, step: int) -> None:
    """Full named tensors, whoever wrote them."""
    for kind in ("parameters", "optimizer", "memory"):
        a, b = run.tensors(step, kind), local.tensors(step, kind)
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].shape == b[name].shape and a[name].dtype == b[name].dtype
            difference = float((a[name] - b[name]).abs().max()) if a[name].numel() else 0.0
            assert difference < 1e-3, (kind, name, difference)
    assert run.meta(step)["adam_steps"] == local.meta(step)["adam_steps"]
    assert run.meta(step)["world_size"] == 2


@pytest.fixture(scope="module")
def local(tiny_yaml: Path, tmp_path_factory) -> Run:
    """TINY_RUN in one process, a checkpoint at every step."""
    from allattn.config import load_config

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("local")
    trainer = Trainer(load_config(tiny_yaml, [f"run.dir={folder}", "train.save_every=1"]))
    trainer.train()
    return Run(folder / "run")


@pytest.fixture(scope="module")
def launched(tiny_yaml: Path, tmp_path_factory) -> Callable[[int], Run]:
    """TINY_RUN on two ranks by the launcher, under one ZeRO stage or another."""
    done: dict[int, Run] = {}

    def run(stage: int) -> Run:
        if stage not in done:
            folder = tmp_path_factory.mktemp(f"zero{stage}")
            zero = f"deepspeed.zero_optimization.stage={stage}"
            launch(tiny_yaml, f"run.dir={folder}", zero, f"train.save_every={SAVED}")
            done[stage] = Run(folder / "run")
        return done[stage]

    return run


def only_until(run: Run, step: int, folder: Path) -> Run:
    """A copy of a run, as a kill after a step's checkpoint would have left it."""
    copy = Run(folder / "run")
    shutil.copytree(run.folder, copy.folder)
    shutil.rmtree(copy.folder / "final", ignore_errors=True)
    for path in (copy.folder / "checkpoints").iterdir():
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    assert copy.checkpoint(step).is_dir()
    return copy


other_stages = [pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 3)]
every_stage = pytest.mark.parametrize("stage", [2, *other_stages])


@every_stage
def test_two_ranks_give_the_losses_of_one_process(launched, local, stage):
    run = launched(stage)
    assert_same_run(run, local)
    for step in (SAVED, PRUNE_END, STEPS):
        assert_same_checkpoints(run, local, step)
    assert (run.folder / "final" / "model.safetensors").is_file()


@every_stage
def test_what_two_ranks_wrote_one_process_resumes(launched, local, tiny_yaml, tmp_path, stage):
    from allattn.config import load_config

    run = only_until(launched(stage), SAVED, tmp_path)
    trainer = Trainer(load_config(tiny_yaml, [f"run.dir={tmp_path}"]), resume=True)
    assert trainer.step == SAVED
    trainer.train()
    assert_same_run(run, local)


@every_stage
def test_what_one_process_wrote_two_ranks_resume(local, tiny_yaml, tmp_path, stage):
    run = only_until(local, SAVED, tmp_path)
    zero = f"deepspeed.zero_optimization.stage={stage}"
    done = two_ranks(tiny_yaml, f"run.dir={tmp_path}", zero, "--resume")
    assert [each.returncode for each in done] == [0, 0], [each.stdout[-1500:] for each in done]
    assert_same_run(run, local, since=SAVED)
    assert "Traceback" not in done[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_removal_along_the_way(tiny_yaml, tmp_path, train, make_config, stage):
    options = [
        "stages[1].prune.remove={every: 2}", "stages[1].prune.patience=1",
        "stages[1].prune.gate_lr=1.5", "stages[1].prune.keep=0.25", "train.micro_batch_size=1",
    ]  # fmt: skip
    expected = train(make_config(*options, name="expected"))
    assert len(expected.events("removal")) >= 2
    zero = f"deepspeed.zero_optimization.stage={stage}"
    launch(tiny_yaml, f"run.dir={tmp_path / 'two'}", zero, *options)
    assert_same_run(Run(tmp_path / "two" / "run"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bfloat16(tiny_yaml, tmp_path, local, stage):
    zero = f"deepspeed.zero_optimization.stage={stage}"
    launch(tiny_yaml, f"run.dir={tmp_path}", zero, "train.precision=bf16", "train.save_every=7")
    run = Run(tmp_path / "run")
    for key, loss in local.losses().items():
        assert run.losses()[key] == pytest.approx(loss, abs=0.05), key
    assert all(t.dtype == torch.float32 for t in run.tensors(SAVED, "parameters").values())


@pytest.mark.slow
def test_a_bad_config_is_refused_on_every_rank(tiny_yaml, tmp_path):
    for override in ("train.batch_size=3", "model.vocab_size=7"):
        done = two_ranks(tiny_yaml, f"run.dir={tmp_path}", override)
        assert [each.returncode for each in done] == [2, 2]
        assert all("Traceback" not in each.stdout for each in done)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_non_finite_loss_ends_every_rank(tiny_yaml, tmp_path):
    done = two_ranks(tiny_yaml, f"run.dir={tmp_path}", "train.optimizer.lr=1e30")
    assert [each.returncode for each in done] == [1, 1]
    assert all("the loss is nan" in each.stdout for each in done)


@pytest.mark.slow
def test_one_process_with_deepspeed(tiny_yaml, tmp_path, local):
    done = subprocess.run(
        [sys.executable, "-m", "allattn", "train", str(tiny_yaml), f"run.dir={tmp_path}",
         "train.engine=deepspeed"],
        env=environment(), timeout=280, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same_run(Run(tmp_path / "run"), local)


@pytest.mark.slow
def test_rank_0_prepares_a_missing_corpus(tiny_yaml, tmp_path):
    data = tmp_path / "data"
    options = [
        f"run.dir={tmp_path / 'runs'}", f"data.dir={data}", "stages=[{name: a, steps: 2}]",
        "data.prepare={dataset: tiny, tokenizer: byte}",
    ]  # fmt: skip
    done = two_ranks(tiny_yaml, *options)
    assert [each.returncode for each in done] == [0, 0], [each.stdout[-1500:] for each in done]
    said = [each.stdout.count("is not there yet: preparing") for each in done]
    assert said == [1, 0]
    assert (tmp_path / "runs" / "run" / "final").is_dir()
    assert Run(tmp_path / "runs" / "run").losses()
    # a corpus that cannot be prepared ends both
    wrong = [option.replace("tiny", "wikitext-2, source: nowhere") for option in options]
    done = two_ranks(tiny_yaml, *wrong, f"data.dir={tmp_path / 'other'}", "run.name=other")
    assert [each.returncode for each in done] == [1, 1]
    assert "wiki.train.tokens" in done[0].stdout
    assert "rank 0 could not prepare it" in done[1].stdout
    assert "Traceback" not in done[0].stdout + done[1].stdout
