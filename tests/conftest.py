"""Fixtures that every part of the suite shares."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from killed import evaluate_here
from runs import TINY_RUN, Run

from allattn.cli import main
from allattn.config import Config, ModelConfig, load_config, model_config_from_dict
from allattn.data.prepare import TINY as TINY_TEXT
from allattn.data.prepare import prepare
from allattn.inference import proof
from allattn.model.transformer import TransformerLM
from allattn.training.trainer import Trainer

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# Tensors here are tiny: on busy cores, waiting for a second thread made the suite six times as slow
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

# No example is timed, none is drawn by chance, and none is written beside the tests
settings.register_profile(
    "allattn",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("allattn")


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts from the same seeds; what it does to torch's globals ends with it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    grad = torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


_afresh = proof.evaluate_afresh


@pytest.fixture(scope="session", autouse=True)
def evaluated_here() -> Iterator[None]:
    """Exports are evaluated in this process, which saves seconds each; see `fresh_process`."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "evaluate_afresh", evaluate_here)
        yield


@pytest.fixture
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for it has its exports evaluated as users have."""
    monkeypatch.setattr(proof, "evaluate_afresh", _afresh)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The corpora beside the project; tests that want them are skipped where they are absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no corpora at {SHARED_DATA}")
    return SHARED_DATA


TINY = {
    "n_layers": 2,
    "d_model": 8,
    "n_heads": 2,
    "d_head": 3,  # not d_model / n_heads, so that mixing the two up shows
    "n_persistent": 5,
    "d_ff": 0,
    "seq_len": 4,
    "mem_len": 6,
    "dropout": 0.0,
    "vocab_size": 11,
}


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """`tiny_config(n_heads=[1, 0], ...)`: a validated config of a few hundred weights."""

    def build(**values: Any) -> ModelConfig:
        return model_config_from_dict({**TINY, **values}, "test")

    return build


@pytest.fixture(scope="session")
def tiny_model(tiny_config: Callable[..., ModelConfig]) -> Callable[..., TransformerLM]:
    """`tiny_model(seed=0, ...)`: float64, evaluation mode, every weight (biases too) far from its
    initial value, so that no term of an equation is too small to be missed.
    """

    def build(seed: int = 0, **values: Any) -> TransformerLM:
        model = TransformerLM(tiny_config(**values)).double().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.copy_(noise * 0.5 + (1.0 if name.endswith("norm.weight") else 0.0))
        return model

    return build


def piece_of_tiny(split: str, n_characters: int) -> str:
    """The beginning of a split of the corpus that ships with the package."""
    return (TINY_TEXT / f"{split}.txt").read_text(encoding="utf-8")[:n_characters]


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus of some thousand sentencepiece tokens: no two of its counts are equal.

    The train split has 12 segments a lane in TINY_RUN, so that a run begins a second pass.
    """
    folder = tmp_path_factory.mktemp("corpus")
    files = {}
    for split, size in (("train", 900), ("valid", 1500), ("test", 1200)):
        files[split] = folder / f"{split}.txt"
        files[split].write_text(piece_of_tiny(split, size), encoding="utf-8")
    prepare(
        out=folder / "data",
        **{split: [path] for split, path in files.items()},
        tokenizer="sentencepiece",
        vocab_size=330,
    )
    return folder / "data"


@pytest.fixture(scope="session")
def tiny_yaml(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY_RUN as a file; its run.dir is a place that no test may use: override it."""
    path = tmp_path_factory.mktemp("config") / "tiny_run.yaml"
    text = TINY_RUN.replace("DATA", str(tiny_corpus)).replace("RUNS", str(path.parent / "unused"))
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def make_config(tiny_yaml: Path, tmp_path: Path) -> Callable[..., Config]:
    """`make_config("stages[1].prune.keep=0.2", name="b")`: TINY_RUN for `tmp_path / "runs"`."""

    def build(*overrides: str, name: str = "run") -> Config:
        own = [f"run.dir={tmp_path / 'runs'}", f"run.name={name}"]
        return load_config(tiny_yaml, [*own, *overrides])

    return build


@pytest.fixture(scope="session")
def finished_run(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY_RUN, done by the `train` command, with a checkpoint at every step: look only."""
    folder = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)
    assert main(["train", str(tiny_yaml), f"run.dir={folder}", "train.save_every=1"]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """`contents(folder)`: every file under it, by relative path: to see that nothing was lost."""

    def read(folder: Path) -> dict[str, bytes]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    return read


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`fails(status, "train", ...)`: run a command that must end so; returns its one line.

    Nothing on stdout, and on stderr exactly one line that is an error (others are progress).
    """

    def run(status: int, *argv: object) -> str:
        capsys.readouterr()
        assert main([str(a) for a in argv]) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = [line for line in captured.err.splitlines() if "error" in line]
        assert len(lines) == 1 and lines[0] == captured.err.splitlines()[-1], captured.err
        assert lines[0].startswith("allattn: error: ") and "Traceback" not in captured.err
        return lines[0].removeprefix("allattn: error: ")

    return run


@pytest.fixture
def train() -> Callable[..., Run]:
    """`train(config, 3, 7)`: start a run, stop at step 3, resume, stop at 7, resume to the end.

    A last stop of None, the default, is the end of the schedule. `start=False` resumes at once.
    """

    def run(config: Config, *stops: int, start: bool = True, to_end: bool = True) -> Run:
        plan = [*stops, None] if to_end else list(stops)
        for i, stop in enumerate(plan):
            trainer = Trainer(config, resume=i > 0 or not start)
            trainer.train(stop)
            trainer.close()
        return Run(Path(config.run.dir) / config.run.name)

    return run
