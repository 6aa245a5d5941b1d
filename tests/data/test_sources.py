"""Texts in every form: what is found, what is read, and what is said of damaged ones."""

import gzip
import json
import lzma
import sys
import types
import zipfile
from pathlib import Path

import pytest

from allattn.data import wikitext
from allattn.data.lanes import Corpus
from allattn.data.prepare import prepare
from allattn.data.sources import Text, find_texts, read_blocks

TEXT = "one two\n\nthree é 😀\n"


def content(text: Text) -> str:
    return "".join(block.text() for block in read_blocks(text))


def pack(path: Path, content: str | bytes = TEXT) -> Path:
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("folder/", "")
            archive.writestr("folder/b.txt", data)
            archive.writestr("folder/a.jsonl", json.dumps({"text": "row"}) + "\n")
            archive.writestr("folder/picture.png", b"\0")
    elif path.suffix in (".gz", ".xz"):
        path.write_bytes({".gz": gzip, ".xz": lzma}[path.suffix].compress(data))
    else:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a", "a.txt.gz", "a.gz", "a.txt.xz"])
def test_forms_of_one_file(tmp_path, name):
    (text,) = find_texts([pack(tmp_path / name)], "train")
    assert content(text) == TEXT
    assert text.plain_size() == (None if name.endswith("z") else len(TEXT.encode()))


def test_members_of_an_archive(tmp_path):
    texts = find_texts([pack(tmp_path / "a.zip")], "train")
    assert [text.member for text in texts] == ["folder/a.jsonl", "folder/b.txt"]
    assert [content(text) for text in texts] == ["row\n", TEXT]
    info = prepare(out=tmp_path / "out", train=[tmp_path / "a.zip"], tokenizer="byte")
    assert Corpus(tmp_path / "out").tokenizer.decode(Corpus(tmp_path / "out").tokens("train")) == (
        "row\n" + TEXT
    )
    assert [source.get("member") for source in info["sources"]] == [t.member for t in texts]
    assert info["sources"][0]["column"] == "text"


def test_folders_and_globs(tmp_path):
    for name in ("b.txt", "deep/er/a.tokens.gz", "deep/x.jsonl", "c.png", ".hidden.txt", "no.bin"):
        row = json.dumps({"text": name}) + "\n"
        pack(tmp_path / "in" / name, row if "json" in name else name + "\n")
    prepare(out=tmp_path / "in" / "corpus", train=[tmp_path / "in" / "b.txt"])  # is no text
    names = ["b.txt", "deep/er/a.tokens.gz", "deep/x.jsonl"]
    texts = find_texts([tmp_path / "in"], "train")
    assert [str(text.path.relative_to(tmp_path / "in")) for text in texts] == names
    assert [content(text) for text in texts] == [name + "\n" for name in names]
    texts = find_texts([tmp_path / "in" / "**" / "*.gz", tmp_path / "in" / "b.*"], "train")
    assert [text.path.name for text in texts] == ["a.tokens.gz", "b.txt"]
    pack(tmp_path / "odd[1].txt")  # a name that only looks like a pattern
    assert find_texts([tmp_path / "odd[1].txt"], "train")[0].path.name == "odd[1].txt"
    with pytest.raises(FileNotFoundError, match=r"\*\.no: no such file \(given for valid\)"):
        find_texts([tmp_path / "*.no"], "valid")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no text in this folder; known endings: \.txt"):
        find_texts([tmp_path / "empty"], "train")


@pytest.mark.parametrize(
    "name, data, match",
    [
        ("a.gz", b"no gzip", r"a\.gz: damaged"),
        ("a.gz", gzip.compress(b"text " * 999, mtime=0)[:-20], r"a\.gz: damaged"),
        ("a.xz", b"no xz", r"a\.xz: damaged"),
        ("a.jsonl", b'{"text": "a"}\nno\n', r"a\.jsonl, line 2: no JSON object"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', r"line 1: no column 'text' but body, id; name"),
        ("a.jsonl", b"[1]\n", r"line 1: no column 'text' but no columns"),
        ("a.jsonl", b'{"text": 5}\n', r"row 1: 'text' is no text but int"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', r"row 2: .*surrogate \(U\+D800\)"),
        ("a.jsonl", b'{"text": "a\\u0000"}\n', r"row 1: line 1 holds a NUL"),
        ("a.txt.gz", gzip.compress(b"fine\n\xff\n", mtime=0), r"a\.txt\.gz, line 2: byte 0xFF"),
    ],
)
def test_damaged_texts(tmp_path, name, data, match):
    (tmp_path / name).write_bytes(data)
    for kind in ("byte", "word", "sentencepiece"):
        with pytest.raises(ValueError, match=match) as error:
            prepare(out=tmp_path / "out", train=[tmp_path / name], tokenizer=kind)
        assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_damaged_archives(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"a\.zip: damaged"):
        find_texts([tmp_path / "a.zip"], "train")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a.png", b"x")
    with pytest.raises(ValueError, match=r"b\.zip: no text in this archive"):
        find_texts([tmp_path / "b.zip"], "train")


def test_json_column_and_rows_of_several_lines(tmp_path):
    rows = [{"body": "a b\nc"}, {"body": "d\n"}, {"body": ""}]
    path = pack(tmp_path / "a.jsonl.gz", "".join(json.dumps(row) + "\n" for row in rows))
    info = prepare(out=tmp_path / "out", train=[path], text_column="body")
    corpus = Corpus(tmp_path / "out")
    assert corpus.tokenizer.decode(corpus.tokens("train")) == "a b\nc\nd\n\n"
    assert info["splits"]["train"]["lines"] == 4 and info["sources"][0]["column"] == "body"


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is absent (the extra parquet)")
    from pyarrow import parquet

    rows = ["", " = A = \n", "b\nc"]
    parquet.write_table(pyarrow.table({"text": rows, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert content(Text(tmp_path / "a.parquet")) == "\n = A = \nb\nc\n"
    assert content(Text(tmp_path / "a.parquet", column="text")).count("\n") == 4
    with pytest.raises(ValueError, match="no column 'body' but text, n; name one"):
        content(Text(tmp_path / "a.parquet", column="body"))
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: damaged, or no parquet"):
        content(Text(tmp_path / "b.parquet"))
    folder = tmp_path / "wikitext-2-v1"  # as the public data sets have it
    folder.mkdir()
    for name in ("train", "validation", "test"):
        parquet.write_table(
            pyarrow.table({"text": [" = A = \n"]}), folder / f"{name}-00000-of-00001.parquet"
        )
    files, tokenised = wikitext.find("wikitext-2", tmp_path)
    assert tokenised and [t.path.name[:5] for ts in files.values() for t in ts] == [
        "train", "valid", "test-",
    ]  # fmt: skip


def test_parquet_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"needs an extra: pip install 'allattn\[parquet\]'"):
        prepare(out=tmp_path / "out", train=[tmp_path / "a.parquet"])


@pytest.mark.parametrize("ending", ["tokens", "raw", "tokens.gz", "raw.xz"])
@pytest.mark.parametrize("inside", ["", "wikitext-2", "wikitext-2-raw", "wikitext-2-v1"])
def test_wikitext_folders(tmp_path, ending, inside):
    for split in ("train", "valid", "test"):
        pack(tmp_path / inside / f"wiki.{split}.{ending}", f" \n = {split} = \n")
    files, tokenised = wikitext.find("wikitext-2", tmp_path)
    assert tokenised == ending.startswith("tokens")
    assert [content(ts[0]).split()[1] for ts in files.values()] == ["train", "valid", "test"]


def test_wikitext_archive(tmp_path):
    path = tmp_path / "wikitext-2-v1.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for split in ("train", "valid", "test"):
            archive.writestr(f"wikitext-2/wiki.{split}.tokens", f" \n = {split} = \n")
    with pytest.raises(ValueError, match=r"zip/wikitext-2/wiki\.train\.tokens: 5 words .*accept"):
        prepare(out=tmp_path / "out", dataset="wikitext-2", source=path)
    info = prepare(out=tmp_path / "out", dataset="wikitext-2", source=path, accept_counts=True)
    assert [split["tokens"] for split in info["splits"].values()] == [5, 5, 5]


def test_download(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="without a source"):
        prepare(out=tmp_path / "out", dataset="wikitext-2", source=tmp_path, download=True)
    with pytest.raises(ValueError, match="download is for the datasets"):
        prepare(out=tmp_path / "out", dataset="tiny", download=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"allattn\[download\]'.*--source"):
        prepare(out=tmp_path / "out", dataset="wikitext-2", download=True)

    def no_network(*args, **options):
        raise ConnectionError("a long\nstory")

    library = types.SimpleNamespace(snapshot_download=no_network)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    with pytest.raises(ValueError, match=r"ConnectionError\); is there a network\? .*--source$"):
        prepare(out=tmp_path / "out", dataset="wikitext-2", download=True)
    for split in ("train", "valid", "test"):
        pack(tmp_path / "cache" / "wikitext-2-v1" / f"wiki.{split}.tokens")
    library.snapshot_download = lambda *args, **options: str(tmp_path / "cache")
    assert prepare(
        out=tmp_path / "out", dataset="wikitext-2", download=True, accept_counts=True
    )["vocab_size"] == 7  # fmt: skip
