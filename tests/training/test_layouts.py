"""Every layout gives the losses of one plain process: ZeRO stages, offloading, precisions,
accumulation, activation checkpointing, each through gates, stages and a removal that empties one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from killed import HANG
from ports import port_of_ours
from runs import HEADS, PRUNE_END, STEPS, Run
from test_deepspeed import environment, two_ranks

from allattn.config import load_config
from allattn.training.trainer import Trainer

# one head is left, so a layer loses its last one; the noise differs from lane to lane
OPTIONS = ["stages[1].prune.keep=0.125", "stages[1].prune.noise=sequence"]
OFFLOAD = "deepspeed.zero_optimization.offload_optimizer={device: cpu}"
TOLERANCE = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.03}
slow = pytest.mark.slow
LAYOUTS = [
    pytest.param(
        2, "fp32", [OFFLOAD, "train.micro_batch_size=1"], marks=slow, id="2-offload-accumulation"
    ),
    *(
        pytest.param(stage, "fp32", ["train.micro_batch_size=1"], marks=slow, id=f"{stage}-micro")
        for stage in range(4)
    ),
    *(
        pytest.param(stage, "fp32", [OFFLOAD], marks=slow, id=f"{stage}-offload")
        for stage in (1, 2, 3)
    ),
    *(
        pytest.param(stage, precision, [], marks=slow, id=f"{stage}-{precision}")
        for stage in range(4)
        for precision in ("bf16", "fp16")
    ),
    *(
        pytest.param(
            stage, "fp32", ["train.activation_checkpointing=true"], marks=slow, id=f"{stage}-again"
        )
        for stage in range(4)
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run in one process, in each precision."""
    done: dict[str, Run] = {}

    def run(precision: str) -> Run:
        if precision not in done:
            folder = tmp_path_factory.mktemp(f"alone_{precision}")
            own = [f"run.dir={folder}", f"train.precision={precision}"]
            trainer = Trainer(load_config(tiny_yaml, [*OPTIONS, *own]))
            trainer.train()
            done[precision] = Run(folder / "run")
        return done[precision]

    return run


@pytest.mark.parametrize(("stage", "precision", "options"), LAYOUTS)
def test_two_ranks(alone, tiny_yaml, tmp_path, stage, precision, options):
    zero = f"deepspeed.zero_optimization.stage={stage}"
    own = [f"run.dir={tmp_path}", f"train.precision={precision}"]
    for done in two_ranks(tiny_yaml, *OPTIONS, *own, zero, *options):
        assert done.returncode == 0, done.stdout[-3000:]
    run, local = Run(tmp_path / "run"), alone(precision)
    expected, got = local.losses(), run.losses()
    assert got.keys() == expected.keys() and len(got) >= STEPS
    for key, loss in expected.items():
        assert got[key] == pytest.approx(loss, abs=TOLERANCE[precision]), key
    (removal,) = run.events("removal")
    assert removal["step"] == PRUNE_END and removal["removed"] == HEADS - 1
    assert sorted(removal["heads"]) == [0, 1]
    assert abs(removal["loss_before"] - removal["loss_after"]) < 1e-3
    if precision == "fp32":
        assert removal["head_ids"] == local.events("removal")[0]["head_ids"]
    assert not run.events("skipped")


def nodes(yaml: Path, folder: Path, *arguments: str) -> list[str]:
    """Two machines of one rank each, as `deepspeed --no_ssh` starts them on each by hand."""
    hostfile = folder / "hostfile"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    command = ["deepspeed", "--hostfile", str(hostfile), "--no_ssh", "--master_addr", "127.0.0.1",
               "--master_port", str(port_of_ours())]  # fmt: skip
    train = ["--module", "allattn", "train", str(yaml), f"run.dir={folder}", *arguments]
    processes = [
        subprocess.Popen(
            [*command, "--node_rank", str(rank), *train], env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=HANG)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


@slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_chunked_loss(alone, tiny_yaml, tmp_path, monkeypatch, stage):
    """A vocabulary too large for one matrix: its logits are made again in the backward pass, when
    ZeRO-3 has taken the weights away; also with nothing kept in place for being small.
    """
    own = ["deepspeed.zero_optimization.stage3_param_persistence_threshold=0"] if stage == 3 else []
    zero = f"deepspeed.zero_optimization.stage={stage}"
    seen = tmp_path / "patched"
    code = f"import allattn.model.adaptive as a; a._LOGITS = 4096; open({str(seen)!r}, 'w')"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for done in two_ranks(tiny_yaml, *OPTIONS, f"run.dir={tmp_path}", zero, *own):
        assert done.returncode == 0, done.stdout[-3000:]
    assert seen.exists()
    assert Run(tmp_path / "run").losses() == pytest.approx(alone("fp32").losses(), abs=1e-5)


@slow
def test_two_nodes_of_one_rank(alone, tiny_yaml, tmp_path):
    nodes(tiny_yaml, tmp_path, *OPTIONS, "deepspeed.zero_optimization.stage=2")
    got = Run(tmp_path / "run").losses()
    assert got == pytest.approx(alone("fp32").losses(), abs=1e-5) and len(got) >= STEPS


def losses_of(yaml: Path, folder: Path, micro: int) -> dict[tuple[str, int], float]:
    """Of 50 steps on one rank."""
    own = [f"run.dir={folder}", f"train.micro_batch_size={micro}"]
    Trainer(load_config(yaml, ["stages[0].steps=40", *own, *OPTIONS])).train()
    return Run(folder / "run").losses()


@pytest.fixture(scope="module")
def undivided(tiny_yaml, tmp_path_factory) -> dict[tuple[str, int], float]:
    return losses_of(tiny_yaml, tmp_path_factory.mktemp("undivided"), 4)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batches_change_nothing(tiny_yaml, tmp_path, undivided, micro):
    """On one rank; two ranks are above."""
    losses = [undivided, losses_of(tiny_yaml, tmp_path, micro)]
    assert losses[0].keys() == losses[1].keys() and len(losses[0]) >= 50
    for key, loss in losses[0].items():
        assert losses[1][key] == pytest.approx(loss, abs=1e-5), key
