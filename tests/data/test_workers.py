"""Several processes give what one gives, say the same of what is wrong, and end with us."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from killed import HANG, Announcement

from allattn.data import sources
from allattn.data.lanes import Corpus
from allattn.data.prepare import TINY, prepare
from allattn.data.sources import Text
from allattn.data.workers import Crew


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["word", "sentencepiece"])
def test_the_result_does_not_depend_on_workers(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "_BLOCK", 20_000)  # many blocks
    for workers in (1, 2):
        prepare(out=tmp_path / str(workers), dataset="tiny", tokenizer=kind, workers=workers)
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_errors_come_through(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 1000)
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine words\n" * 1000 + b"\xff\n" + b"fine words\n" * 1000)
    with pytest.raises(ValueError, match=r"a\.txt, line 1001: byte 0xFF"):
        prepare(out=tmp_path / "out", train=[path], workers=2)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="workers must be at least 1"):
        prepare(out=tmp_path / "out", train=[path], workers=0)


def die(_, block):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_is_one_line():
    text = Text(TINY / "train.txt")
    with pytest.raises(RuntimeError, match="a worker process died.*fewer --workers"):
        with Crew(2) as crew:
            list(crew.over(die, [text, text], "x"))


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=slow),
        pytest.param(signal.SIGTERM, marks=slow),
    ],
)
def test_killed_it_leaves_no_corpus_and_no_process(tmp_path, how):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text((TINY / "train.txt").read_text(encoding="utf-8") * 30, encoding="utf-8")
    argv = [sys.executable, "-m", "allattn", "prepare", "--train", str(path), "--out", str(out)]
    announcement = Announcement("prepare:block")
    process = subprocess.Popen(
        [*argv, "--workers", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **announcement.environment()},
        pass_fds=[announcement.sender.fileno()],
    )  # fmt: skip
    assert announcement.wait() == process.pid
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=HANG)  # ends only when the workers too closed stderr
    assert process.returncode != 0 and not out.exists()
    if how == signal.SIGINT:
        assert said.strip().endswith("interrupted") and "Traceback" not in said
        assert not list(tmp_path.glob(".out*"))
    info = prepare(out=out, train=[path])
    assert Corpus(out).info == info and not list(tmp_path.glob(".out*"))
