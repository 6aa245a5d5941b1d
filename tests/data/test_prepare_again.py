"""Preparing again, over something, and being interrupted: nothing half made, nothing lost."""

import json
import os
from pathlib import Path

import pytest

from allattn.data import prepare as module
from allattn.data.lanes import Corpus
from allattn.data.prepare import prepare
from allattn.data.tokenizers import Tokenizer


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    return write(tmp_path / "train.txt", "the cat\nthe dog\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_again_does_nothing_and_says_so(tmp_path, text, capsys):
    out = tmp_path / "out"
    first = prepare(out=out, train=[text])
    stamp = out.stat().st_mtime_ns, out.stat().st_ino
    assert capsys.readouterr() == ("", "")
    assert prepare(out=out, train=[text]) == first
    assert (out.stat().st_mtime_ns, out.stat().st_ino) == stamp
    said = capsys.readouterr()
    assert said.out == "" and "nothing to do" in said.err and said.err.count("\n") == 1


def test_a_changed_source_is_named(tmp_path, text):
    other = write(tmp_path / "valid.txt", "the valid text\n")
    prepare(out=tmp_path / "out", train=[text], valid=[other])
    write(other, "the valid texT\n")  # of the same size
    with pytest.raises(ValueError, match=r"\(.*valid\.txt has changed since\).*--overwrite"):
        prepare(out=tmp_path / "out", train=[text], valid=[other])
    info = prepare(out=tmp_path / "out", train=[text], valid=[other], overwrite=True)
    assert prepare(out=tmp_path / "out", train=[text], valid=[other]) == info


def test_something_else_is_refused(tmp_path, text):
    out = tmp_path / "out"
    prepare(out=out, train=[text])
    before = contents(out)
    write(tmp_path / "other.txt", "other\n")
    for options in (
        {"train": [text], "tokenizer": "byte"},
        {"train": [text], "min_count": 2},
        {"train": [text], "valid": [text]},
        {"train": [tmp_path / "other.txt"]},
        {"dataset": "tiny"},
    ):
        with pytest.raises(ValueError, match="another or a damaged.*overwrite"):
            prepare(out=out, **options)
    assert contents(out) == before
    write(text, "the text has changed\n")
    with pytest.raises(ValueError, match="overwrite"):
        prepare(out=out, train=[text])
    info = prepare(out=out, train=[text], overwrite=True, tokenizer="byte")
    assert json.loads((out / "data.json").read_text()) == info
    assert sorted(contents(out)) == ["data.json", "tokenizer.json", "train.bin"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.txt", "out", "train.txt"]


def test_a_damaged_corpus_is_not_taken_for_a_whole_one(tmp_path, text):
    out = tmp_path / "out"
    first = prepare(out=out, train=[text])
    for name, content in contents(out).items():
        write(out / name, content[:-1] + b"\x01")
        with pytest.raises(ValueError, match="damaged"):
            prepare(out=out, train=[text])
        assert prepare(out=out, train=[text], overwrite=True) == first


def test_overwrite_spares_what_is_no_corpus(tmp_path, text):
    out = tmp_path / "out"
    out.mkdir()
    assert prepare(out=out, train=[text])["vocab_size"] == 5  # an empty folder is free
    write(out / "notes.md", "mine")
    before = contents(out)
    with pytest.raises(ValueError, match=r"notes\.md.*not be replaced"):
        prepare(out=out, train=[text], overwrite=True)
    assert contents(out) == before
    other = tmp_path / "other"
    other.mkdir()
    write(other / "data.json", "{}")
    with pytest.raises(ValueError, match="no prepared corpus"):
        prepare(out=other, train=[text], overwrite=True)
    with pytest.raises(ValueError, match="not a folder"):
        prepare(out=text, train=[text], overwrite=True)
    assert text.read_text() == "the cat\nthe dog\n"


def test_through_a_link(tmp_path, text):
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "link")
    prepare(out=tmp_path / "link", train=[text])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "disk" / "data.json").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_interruption_leaves_nothing(tmp_path, text, monkeypatch, error):
    def stop(self, dir):
        raise error

    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "save", stop)
        with pytest.raises(type(error) if isinstance(error, OSError) else error):
            prepare(out=tmp_path / "out", train=[text])
    assert set(tmp_path.iterdir()) == before
    old = prepare(out=tmp_path / "out", train=[text])
    real = os.rename

    def fail(source, target):
        if "partial" in str(source):
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(out=tmp_path / "out", train=[text], tokenizer="byte", overwrite=True)
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}
    assert Corpus(tmp_path / "out").info == old


def test_folder_does_not_exist_until_it_is_whole(tmp_path, text, monkeypatch):
    seen = []
    real = os.rename

    def look(source, target):
        seen.append((sorted(path.name for path in Path(source).iterdir()), Path(target).exists()))
        real(source, target)

    monkeypatch.setattr(module.os, "rename", look)
    prepare(out=tmp_path / "out", train=[text])
    assert seen == [(["data.json", "tokenizer.json", "train.bin", "vocab.txt"], False)]
