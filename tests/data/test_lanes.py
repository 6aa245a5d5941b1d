"""Lanes and corpora: tables made by hand, and refusals."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allattn.data.lanes import Corpus, Lanes
from allattn.data.prepare import prepare


def test_table_by_hand():
    """12 tokens, 2 lanes: lane_len 5, so lane 0 starts at 0 and lane 1 at 5; 2 segments of 2."""
    lanes = Lanes(np.arange(12, dtype=np.uint8), n_lanes=2, seq_len=2)
    assert (lanes.lane_len, lanes.n_segments) == (5, 2)
    table = {
        0: ([[0, 1], [5, 6]], [[1, 2], [6, 7]]),
        1: ([[2, 3], [7, 8]], [[3, 4], [8, 9]]),
        2: ([[0, 1], [5, 6]], [[1, 2], [6, 7]]),
    }
    for step, (inputs, targets) in table.items():
        got = lanes.batch(step, 0, 2)
        assert got[0].tolist() == inputs and got[1].tolist() == targets
        assert lanes.starts_pass(step) == (step in (0, 2))
    inputs, targets = lanes.batch(1, 1, 2)
    assert inputs.tolist() == [[7, 8]] and targets.tolist() == [[8, 9]]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()


def test_just_enough_tokens_and_one_less():
    lanes = Lanes(np.arange(7), n_lanes=2, seq_len=3)
    assert lanes.n_segments == 1
    assert lanes.batch(5, 1, 2)[1].tolist() == [[4, 5, 6]]  # the last token is the last target
    assert lanes.starts_pass(5)
    with pytest.raises(ValueError, match=r"^6 tokens .* at least 7 "):
        Lanes(np.arange(6), n_lanes=2, seq_len=3)
    with pytest.raises(ValueError, match="at least 1"):
        Lanes(np.arange(6), n_lanes=0, seq_len=3)
    with pytest.raises(ValueError, match="at least 1"):
        Lanes(np.arange(6), n_lanes=1, seq_len=0)


@given(st.integers(1, 5), st.integers(1, 7), st.integers(0, 60), st.integers(0, 40))
def test_lanes_are_contiguous_and_independent_of_their_split(n_lanes, seq_len, extra, step):
    tokens = np.arange(n_lanes * seq_len + 1 + extra, dtype=np.uint16)
    lanes = Lanes(tokens, n_lanes, seq_len)
    inputs, targets = lanes.batch(step, 0, n_lanes)
    assert torch.equal(targets, inputs + 1)
    parts = [lanes.batch(step, lane, lane + 1) for lane in range(n_lanes)]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    following = lanes.batch(step + 1, 0, n_lanes)[0]
    if not lanes.starts_pass(step + 1):  # a lane goes on where it stopped
        assert torch.equal(following[:, 0], targets[:, -1])
    else:
        assert following[:, 0].tolist() == [lane * lanes.lane_len for lane in range(n_lanes)]


@given(
    st.integers(1, 5), st.integers(1, 7), st.integers(0, 60), st.integers(0, 90), st.integers(0, 99)
)
def test_a_shift_is_a_function_of_seed_and_pass(n_lanes, seq_len, extra, step, seed):
    tokens = np.arange(n_lanes * seq_len + seq_len + extra, dtype=np.uint16)
    lanes = Lanes(tokens, n_lanes, seq_len, shift_seed=seed)
    inputs, targets = lanes.batch(step, 0, n_lanes)  # never past the end, or stack() would fail
    assert torch.equal(targets, inputs + 1) and inputs.shape == (n_lanes, seq_len)
    again = Lanes(tokens, n_lanes, seq_len, shift_seed=seed)
    again.batch(0, 0, 1)  # what was read before changes nothing
    assert torch.equal(again.batch(step, 0, n_lanes)[0], inputs)
    first = int(inputs[0, 0])
    assert inputs[:, 0].tolist() == [first + lane * lanes.lane_len for lane in range(n_lanes)]
    offset = first - step % lanes.n_segments * seq_len
    assert 0 <= offset < seq_len
    following = lanes.batch(step + 1, 0, n_lanes)[0]
    if not lanes.starts_pass(step + 1):  # within a pass, a lane goes on where it stopped
        assert torch.equal(following[:, 0], targets[:, -1])


def test_shifts_differ_and_reach_everywhere():
    lanes = Lanes(np.arange(100), 2, 8, shift_seed=1)
    offsets = [lanes.first_token(k * lanes.n_segments) for k in range(100)]
    assert set(offsets) == set(range(8))
    other = Lanes(np.arange(100), 2, 8, shift_seed=2)
    assert offsets != [other.first_token(k * other.n_segments) for k in range(100)]
    with pytest.raises(ValueError, match="with data.shift: at least 24 are needed"):
        Lanes(np.arange(23), 2, 8, shift_seed=1)
    assert Lanes(np.arange(24), 2, 8, shift_seed=1).n_segments == 1


def test_lanes_copy_nothing(tmp_path):
    """Of 100M tokens: nothing but the batch is read."""
    path = tmp_path / "train.bin"
    tokens = np.memmap(path, dtype="<u2", mode="w+", shape=(100_000_000,))  # a sparse file
    tracemalloc.start()
    lanes = Lanes(tokens, 64, 150, shift_seed=1)
    for step in range(100):
        lanes.batch(step, 0, 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_batches_are_copies():
    tokens = np.arange(10, dtype=np.int64)
    inputs, _ = Lanes(tokens, 1, 3).batch(0, 0, 1)
    inputs.fill_(7)
    assert tokens.tolist() == list(range(10))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").write_text("a b\nc a\n")
    prepare(out=tmp_path / "corpus", train=[tmp_path / "text"], tokenizer="word")
    return tmp_path / "corpus"


def test_corpus(folder):
    corpus = Corpus(folder)
    assert corpus.dir == folder
    assert corpus.vocab_size == 5 == corpus.tokenizer.vocab_size
    assert list(corpus.splits) == ["train"]
    assert corpus.info["splits"]["train"]["words"] == 6
    tokens = corpus.tokens("train")
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint8
    assert tokens.tolist() == [1, 2, 0, 3, 1, 0]  # <eos> first, then a 2, b 1, c 1
    assert corpus.tokenizer.decode(tokens) == "a b\nc a\n"
    with pytest.raises(ValueError):
        tokens[0] = 1  # read-only


def test_corpus_refusals(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*run `allattn prepare"):
        Corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no split 'valid'; it has train"):
        Corpus(folder).tokens("valid")
    path = folder / "train.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x05")
    with pytest.raises(ValueError, match="token id 5 in a vocabulary of 5"):
        Corpus(folder).tokens("train")
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"train\.bin: 5 bytes instead of the 6"):
        Corpus(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.bin"):
        Corpus(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}', "\ud800"])
def test_damaged_description(folder, text):
    (folder / "data.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match=r"data\.json: damaged"):
        Corpus(folder)


def test_other_format_and_tokenizer(folder, tmp_path):
    info = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps(info | {"format_version": 2}))
    with pytest.raises(ValueError, match="format_version 2.*reads 1"):
        Corpus(folder)
    info["tokenizer"]["fingerprint"] = "0" * 64
    (folder / "data.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="not the one that data.json names"):
        _ = Corpus(folder).tokenizer
