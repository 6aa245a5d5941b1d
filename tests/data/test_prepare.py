"""Preparation: counts by hand, known WikiText counts, refusals, blocks of text."""

import hashlib
import json
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from allattn.data import checksum, sources
from allattn.data.lanes import Corpus
from allattn.data.prepare import TINY, prepare
from allattn.data.sources import Text, read_blocks

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    return write(tmp_path / "train.txt", "the cat\nthe dog\n")


def test_counts_by_hand(tmp_path):
    train = write(tmp_path / "a.txt", "the cat \n\n é the")  # 4 words, 3 lines, 17 bytes + newline
    valid = write(tmp_path / "b.txt", "dog\n")
    info = prepare(out=tmp_path / "out", train=[train], valid=[valid], tokenizer="word")
    assert info == json.loads((tmp_path / "out" / "data.json").read_text())
    got = info["splits"]["train"]
    assert [got[k] for k in ("tokens", "words", "lines", "bytes")] == [7, 7, 3, 18]
    got = info["splits"]["valid"]
    assert [got[k] for k in ("tokens", "words", "lines", "bytes")] == [2, 2, 1, 4]
    # the 2, cat 1, <eos> 3, é 1: ids <eos> 0, the 1, cat 2, é 3, <unk> 4
    words = (tmp_path / "out" / "vocab.txt").read_text(encoding="utf-8").split()
    assert words == ["<eos>", "the", "cat", "é", "<unk>"]
    assert (tmp_path / "out" / "train.bin").read_bytes() == bytes([1, 2, 0, 0, 3, 1, 0])
    assert (tmp_path / "out" / "valid.bin").read_bytes() == bytes([4, 0])
    assert got["sha256"] == hashlib.sha256(bytes([4, 0])).hexdigest()
    assert (info["dtype"], info["vocab_size"], info["format_version"]) == ("uint8", 5, 1)
    assert "test" not in info["splits"] and not (tmp_path / "out" / "test.bin").exists()
    digest = hashlib.sha256(train.read_bytes()).hexdigest()
    assert info["sources"][0] == {
        "split": "train", "path": str(train), "bytes": 17, "sha256": digest
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["byte", "word", "sentencepiece"])
def test_words_and_bytes_do_not_depend_on_the_tokenizer(tmp_path, kind):
    info = prepare(out=tmp_path / "out", dataset="tiny", tokenizer=kind)
    for split in ("train", "valid", "test"):
        text = (TINY / f"{split}.txt").read_text(encoding="utf-8")
        got = info["splits"][split]
        assert got["lines"] == text.count("\n")
        assert got["words"] == len(text.split()) + text.count("\n")
        assert got["bytes"] == len(text.encode("utf-8"))
        tokens = Corpus(tmp_path / "out").tokens(split)
        assert got["tokens"] == len(tokens)
        tokenizer = Corpus(tmp_path / "out").tokenizer
        assert tokens.tolist() == tokenizer.encode(text)
        if kind != "word":
            assert tokenizer.decode(tokens) == text
    assert info["tokenizer"]["kind"] == kind
    assert info["tokenizer"]["fingerprint"] == tokenizer.fingerprint()


def test_tiny_is_the_text_that_it_says():
    digests = {"train": "e4a4d5890fbcc517", "valid": "2837c8b5c0c68d82", "test": "9e59b613375eaa4f"}
    for split, digest in digests.items():
        content = (TINY / f"{split}.txt").read_bytes()
        assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_several_files_a_split_in_order(tmp_path):
    files = [write(tmp_path / f"{n}.txt", n) for n in ("one", "two")]
    info = prepare(out=tmp_path / "out", train=files, tokenizer="byte")
    assert (tmp_path / "out" / "train.bin").read_bytes() == b"one\ntwo\n"
    assert info["splits"]["train"]["lines"] == 2
    assert [Path(source["path"]).name for source in info["sources"]] == ["one.txt", "two.txt"]


@pytest.mark.parametrize("types, dtype", [(254, "uint8"), (255, "uint16"), (65_535, "uint32")])
def test_smallest_type_that_fits(tmp_path, types, dtype):
    text = " ".join(f"w{i}" for i in range(types)) + "\n"  # and <eos>, <unk>
    info = prepare(out=tmp_path / "out", train=[write(tmp_path / "a.txt", text)])
    assert (info["vocab_size"], info["dtype"]) == (types + 2, dtype)
    corpus = Corpus(tmp_path / "out")
    assert corpus.tokens("train").tolist() == [*range(1, types + 1), 0]
    assert corpus.tokens("train").dtype == np.dtype(dtype).newbyteorder("<")


def test_wikitext_2_known_counts(tmp_path):
    source = SHARED / "wikitext-2"
    if not source.is_dir():
        pytest.skip(f"{source} is absent")
    info = prepare(out=tmp_path / "out", dataset="wikitext-2", source=source)
    tokens = {split: got["tokens"] for split, got in info["splits"].items()}
    assert tokens == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert info["vocab_size"] == 33_278
    assert all(got["words"] == got["tokens"] for got in info["splits"].values())
    assert info["dataset"] == "wikitext-2"


def test_wikitext_103_valid_count(tmp_path):
    valid = SHARED / "wikitext-103" / "wiki.valid.tokens"
    if not valid.is_file():
        pytest.skip(f"{valid} is absent")
    info = prepare(out=tmp_path / "out", train=[valid])
    assert info["splits"]["train"]["tokens"] == 217_646


def wikitext(folder: Path, ending: str) -> Path:
    folder.mkdir()
    for split in ("train", "valid", "test"):
        write(folder / f"wiki.{split}.{ending}", " \n = A = \n")
    return folder


def test_wikitext_sources(tmp_path):
    out = tmp_path / "out"
    whole = wikitext(tmp_path / "tokens", "tokens")
    with pytest.raises(ValueError, match=r"wiki\.train\.tokens: 5 words .* 2,088,628; .*accept"):
        prepare(out=out, dataset="wikitext-2", source=whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens"]
    info = prepare(out=out, dataset="wikitext-103", source=whole, accept_counts=True)
    assert info["splits"]["test"]["tokens"] == 5
    raw = wikitext(tmp_path / "raw", "raw")  # its counts are not those of the tokenised files
    assert prepare(out=tmp_path / "out2", dataset="wikitext-2", source=raw)["vocab_size"] == 4
    (raw / "wiki.test.raw").unlink()
    for source in (raw, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"must hold wiki\.train\.tokens, .*\.raw"):
            prepare(out=tmp_path / "out3", dataset="wikitext-2", source=source)
    with pytest.raises(ValueError, match=r"needs a source: the folder that holds wiki\.train"):
        prepare(out=tmp_path / "out3", dataset="wikitext-2")


@pytest.mark.parametrize(
    "options, match",
    [
        ({}, "nothing to prepare"),
        ({"valid": ["x"]}, "at least one train file"),
        ({"dataset": "ptb"}, "'ptb' is unknown; known: tiny"),
        ({"dataset": "tiny", "train": ["x"]}, "not both"),
        ({"dataset": "tiny", "source": "x"}, "source belongs"),
        ({"dataset": "tiny", "tokenizer": "char"}, "'char' is unknown"),
        ({"dataset": "tiny", "vocab_size": 9}, "vocab_size is .* sentencepiece.*use max_vocab"),
        ({"dataset": "tiny", "tokenizer": "byte", "max_vocab": 9}, "max_vocab is .* word"),
        ({"dataset": "tiny", "tokenizer": "sentencepiece", "min_count": 2}, "min_count"),
        ({"dataset": "tiny", "model_type": "bpe"}, "model_type is .* sentencepiece"),
        ({"dataset": "tiny", "tokenizer": "sentencepiece", "model_type": "x"}, "unigram or bpe"),
        ({"dataset": "tiny", "tokenizer": "sentencepiece", "vocab_size": 9999}, "largest possible"),
    ],
)
def test_wrong_options(tmp_path, options, match):
    with pytest.raises(ValueError, match=match) as error:
        prepare(out=tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_wrong_files(tmp_path, text):
    out = tmp_path / "out"
    before = set(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: no such file \(given for valid\)"):
        prepare(out=out, train=[text], valid=[tmp_path / "absent.txt"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        prepare(out=out, train=[tmp_path / "pipe"])
    (tmp_path / "pipe").unlink()
    assert set(tmp_path.iterdir()) == before
    wrong = {
        b"": "empty",
        b"\n \n": "no words",
        b"fine\nfine\nnot \xff fine": "line 3: byte 0xFF is not UTF-8",
        b"fine\na\0b\n": "line 2: a NUL",
        b"surrogate \xed\xa0\x80\n": "line 1: byte 0xED is not UTF-8",
        b"fine\ncut off \xc3": "line 2: byte 0xC3",
    }
    for content, match in wrong.items():
        bad = write(tmp_path / "bad.txt", content)
        for kind in ("byte", "word", "sentencepiece"):
            with pytest.raises(ValueError, match=rf"bad\.txt.*{match}") as error:
                prepare(out=out, train=[bad], tokenizer=kind)
            assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=match):
            prepare(out=out, train=[text], test=[bad])
        bad.unlink()
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(ValueError, match="not a folder"):
        prepare(out=text / "out", train=[text])


def test_an_existing_tokenizer(tmp_path, text):
    first = prepare(out=tmp_path / "first", train=[text])
    other = write(tmp_path / "other.txt", "a dog\n")
    info = prepare(out=tmp_path / "a", train=[other], tokenizer_from=tmp_path / "first")
    assert info["tokenizer"] == first["tokenizer"]
    assert Corpus(tmp_path / "a").tokens("train").tolist() == [4, 3, 0]
    assert prepare(out=tmp_path / "a", train=[other], tokenizer_from=tmp_path / "first") == info
    words = write(tmp_path / "words", "dog\n<eos>\n<unk>\n")
    info = prepare(out=tmp_path / "b", train=[other], tokenizer_from=words, tokenizer="word")
    assert Corpus(tmp_path / "b").tokens("train").tolist() == [2, 0, 1]
    for options, match in (
        ({"min_count": 2}, "min_count: a tokenizer from elsewhere is as it is"),
        ({"vocab_size": 9}, "vocab_size: a tokenizer from"),
        ({"tokenizer": "byte"}, "tokenizer byte, but tokenizer_from names one of word"),
    ):
        with pytest.raises(ValueError, match=match):
            prepare(out=tmp_path / "c", train=[other], tokenizer_from=words, **options)


def test_counting_all_splits(tmp_path, text):
    other = write(tmp_path / "valid.txt", "cat cat new\n")
    options = {"train": [text], "valid": [other], "count_all": True}
    prepare(out=tmp_path / "out", **options)
    assert Corpus(tmp_path / "out").tokenizer.words == [
        "<eos>", "cat", "the", "dog", "new", "<unk>"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="another"):
        prepare(out=tmp_path / "out", train=[text], valid=[other])


def test_blocks_join_to_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 64)
    monkeypatch.setattr(sources, "_LONG_LINE", 200)
    rng = random.Random(1)
    text = "".join(rng.choices("ab é\u2581\r\n", weights=[9, 9, 9, 3, 3, 1, 1], k=3000))
    text += " ".join(["wörd"] * 300) + "\n" + "x" * 500 + " end"
    blocks = list(read_blocks(Text(write(tmp_path / "a.txt", text))))
    assert "".join(block.text() for block in blocks) == text + "\n"
    assert sum(len(block.text().split()) for block in blocks) == len(text.split())
    for before, block in zip(blocks, blocks[1:], strict=False):
        assert block.line == before.line + before.data.count(b"\n")
    assert len(blocks) > 20


@pytest.mark.parametrize("kind", ["byte", "word", "sentencepiece"])
def test_cut_long_lines_encode_like_whole_ones(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "_BLOCK", 100)
    monkeypatch.setattr(sources, "_LONG_LINE", 300)
    text = (TINY / "valid.txt").read_text(encoding="utf-8").replace("\n", " ", 50)
    options = {"vocab_size": 600} if kind == "sentencepiece" else {}
    path = write(tmp_path / "a.txt", text)
    prepare(out=tmp_path / "out", train=[path], tokenizer=kind, **options)
    corpus = Corpus(tmp_path / "out")
    assert corpus.tokens("train").tolist() == corpus.tokenizer.encode(text)


def test_a_line_without_any_space_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_LONG_LINE", 1 << 20)
    monkeypatch.setattr(sources, "_LONGEST_WORD", 2 << 20)
    path = write(tmp_path / "a.txt", "fine\n" + "x" * (4 << 20))
    with pytest.raises(ValueError, match=r"a\.txt, line 2: 2 MiB without a space; break"):
        list(read_blocks(Text(path)))


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 1 << 15)
    monkeypatch.setattr(checksum, "_BLOCK", 1 << 15)
    peaks = []
    line = "the same few words again and again\n"
    for n in (1, 4):
        path = write(tmp_path / f"{n}.txt", line * (n * 200_000 // len(line)))
        tracemalloc.start()
        prepare(out=tmp_path / f"out{n}", train=[path], valid=[path])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 4_000_000
