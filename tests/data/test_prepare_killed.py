"""kill -9 at every moment of `allattn prepare`; the same command ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed import Child, done, killed

from allattn.data.lanes import Corpus
from allattn.moments import MOMENTS

MAKING = ["prepare:vocabulary", "prepare:block", "prepare:block#2", "prepare:ids", "prepare:whole"]
REPLACING = ["prepare:whole", "prepare:aside", "prepare:placed"]


@pytest.fixture
def command(tmp_path) -> list[object]:
    (tmp_path / "train.txt").write_text("the cat sat on the mat\nthe dog sat\n" * 50)
    (tmp_path / "valid.txt").write_text("the dog\n")
    texts = ["--train", tmp_path / "train.txt", "--valid", tmp_path / "valid.txt"]
    return ["prepare", *texts, "--out", tmp_path / "out"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def expected(command, tmp_path) -> dict[str, bytes]:
    """What an undisturbed process makes with the same command."""
    done(tmp_path / "said", *command[:-1], tmp_path / "undisturbed")
    return files(tmp_path / "undisturbed")


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".*")]


@pytest.mark.parametrize("moment", [*MAKING, "prepare:placed"])
def test_making_a_corpus(command, expected, tmp_path, moment):
    child = Child(tmp_path / "said", *command, at=moment)
    child.wait()
    if "block" in moment:  # in the middle of a write
        name = "valid.bin" if "#2" in moment else "train.bin"
        (path,) = tmp_path.glob(f".out.partial-*/{name}")
        path.write_bytes(path.read_bytes()[:7])
    child.killed()
    assert (tmp_path / "out").exists() == ("placed" in moment) and hidden(tmp_path)
    done(tmp_path / "said", *command)
    assert files(tmp_path / "out") == expected and not hidden(tmp_path)


def test_learning_pieces(command, tmp_path):
    command += ["--tokenizer", "sentencepiece", "--vocab-size", "271"]
    killed(tmp_path / "said", *command, at="prepare:vocabulary")
    done(tmp_path / "said", *command)
    assert Corpus(tmp_path / "out").tokenizer.vocab_size == 271 and not hidden(tmp_path)


@pytest.mark.parametrize("moment", REPLACING)
def test_replacing_a_corpus(command, expected, tmp_path, moment):
    other = [*command, "--tokenizer", "byte"]
    done(tmp_path / "said", *other)
    before = files(tmp_path / "out")
    killed(tmp_path / "said", *command, "--overwrite", at=moment)
    if moment != "prepare:placed":  # what was there comes back to its place, if it had to leave it
        said = done(tmp_path / "said", *other).printed("stderr")
        assert "nothing to do" in said and files(tmp_path / "out") == before
        assert not hidden(tmp_path)
        killed(tmp_path / "said", *command, "--overwrite", at=moment)
    done(tmp_path / "said", *command, "--overwrite")
    assert files(tmp_path / "out") == expected and not hidden(tmp_path)


def test_every_moment_is_tried():
    tried = {moment.partition("#")[0] for moment in MAKING + REPLACING}
    assert tried == {moment for moment in MOMENTS if moment.startswith("prepare:")}
