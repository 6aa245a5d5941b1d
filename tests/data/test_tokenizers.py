"""Tokenizers: hand-counted vocabularies, lossless round trips, clear refusals."""

import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allattn.data.prepare import TINY
from allattn.data.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    WordTokenizer,
    load_tokenizer,
)

WIKITEXT_2 = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext-2"
# the characters that sentencepiece, files or terminals treat specially
AWKWARD = "\u2581\u2585\x01\t \r\n\u00a0\u2028\u2029\u0085\ufeff\ufffd<>|s/\x1cé😀"
TEXTS = st.text(
    st.one_of(
        st.sampled_from(AWKWARD), st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    )
)


@cache
def pieces(model_type: str) -> SentencePieceTokenizer:
    text = (TINY / "train.txt").read_text(encoding="utf-8")
    return SentencePieceTokenizer.train([text], vocab_size=1000, model_type=model_type)


def all_kinds() -> list:
    return [ByteTokenizer(), WordTokenizer.build(["a b <unk>\n"]), pieces("unigram")]


def test_word_ids_by_count_then_first_appearance():
    # counts: c 1, a 2, b 3, <unk> 1; <eos> is first whatever its count
    words = WordTokenizer.build(["c a\na ", "b b\n", "b <unk>\n"])
    assert words.words == ["<eos>", "b", "a", "c", "<unk>"]
    assert (words.vocab_size, words.eos_id, words.unk_id) == (5, 0, 4)


def test_word_adds_unk_last_and_uses_it():
    words = WordTokenizer.build(["a a b\n"])
    assert words.words == ["<eos>", "a", "b", "<unk>"]
    assert words.encode("b new a\n") == [2, 3, 1, 0]
    assert words.decode([2, 3, 1, 0]) == "b <unk> a\n"


def test_word_limits_keep_the_special_types():
    text = ["a a a b b c <unk>\n"]  # <unk> and <eos> once
    assert WordTokenizer.build(text, min_count=2).words == ["<eos>", "a", "b", "<unk>"]
    assert WordTokenizer.build(text, max_vocab=3).words == ["<eos>", "a", "<unk>"]
    assert WordTokenizer.build(["a a b\n"], max_vocab=3).words == ["<eos>", "a", "<unk>"]
    assert WordTokenizer.build(text, max_vocab=100).vocab_size == 5
    with pytest.raises(ValueError, match="min_count"):
        WordTokenizer.build(text, min_count=0)
    with pytest.raises(ValueError, match="max_vocab"):
        WordTokenizer.build(text, max_vocab=1)


def transformer_xl(lines: list[str]) -> tuple[list[str], list[int]]:
    """Words and ids by the rules of Transformer-XL's word-level corpora, the slow and plain way.

    Special symbols first; then symbols by count, those seen earlier first; each stripped line is
    split at whitespace, and <eos> follows it when it is encoded (not when it is counted).
    """
    seen: list[list] = []  # [symbol, count] in order of appearance
    for line in lines:
        for symbol in line.strip().split():
            entry = next((e for e in seen if e[0] == symbol), None)
            if entry is None:
                seen.append([symbol, 1])
            else:
                entry[1] += 1
    vocabulary = ["<eos>"]
    for count in range(max((e[1] for e in seen), default=0), 0, -1):
        vocabulary += [e[0] for e in seen if e[1] == count and e[0] not in vocabulary]
    ids = []
    for line in lines:
        ids += [vocabulary.index(symbol) for symbol in [*line.strip().split(), "<eos>"]]
    return vocabulary, ids


@given(st.lists(st.lists(st.sampled_from(["a", "b", "B", "c", "<unk>", "<eos>"]), max_size=5)))
def test_word_vocabulary_and_ids_as_transformer_xl(lines):
    lines = [" ".join(words) + " " for words in lines]
    expected, ids = transformer_xl(lines)
    text = "".join(line + "\n" for line in lines)
    words = WordTokenizer.build([text])
    assert words.words == expected + ["<unk>"] * ("<unk>" not in expected)
    assert words.encode(text) == ids
    assert words.encode_array(text, np.dtype("<u2")).tolist() == ids


@pytest.mark.skipif(not WIKITEXT_2.is_dir(), reason=f"{WIKITEXT_2} is absent")
def test_word_ids_of_real_text_as_transformer_xl():
    text = (WIKITEXT_2 / "wiki.valid.tokens").read_text(encoding="utf-8")[:60_000]
    expected, ids = transformer_xl(text.split("\n")[:-1])
    text = text[: text.rindex("\n") + 1]
    words = WordTokenizer.build([text])
    assert words.words == expected and words.encode(text) == ids


def test_word_blank_lines_and_spaces():
    words = WordTokenizer.build([" a b \n"])
    eos, a, b = words.eos_id, words.ids["a"], words.ids["b"]
    assert words.encode(" \n\n a  b\t\n") == [eos, eos, a, b, eos]
    assert words.encode("a\nb") == [a, eos, b]


@pytest.mark.skipif(not WIKITEXT_2.is_dir(), reason=f"{WIKITEXT_2} is absent")
def test_word_wikitext_2_types():
    text = (WIKITEXT_2 / "wiki.train.tokens").read_text(encoding="utf-8")
    words = WordTokenizer.build([text])
    assert words.vocab_size == 33_278
    assert words.words[:5] == ["<eos>", "the", ",", ".", "of"]


def test_bytes():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (256, 10)
    assert tokenizer.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert tokenizer.encode_line("a") == [97, 10]
    assert tokenizer.decode([97, 0xC3, 98]) == "a\ufffdb"  # half a character


@given(TEXTS)
def test_byte_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@given(text=TEXTS)
def test_sentencepiece_round_trip(model_type, text):
    tokenizer = pieces(model_type)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_id) == text.count("\n")
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "text",
    ["", "\n", "\n\n", " ", "a", "a\n", "\n a", "\u2581", "a\u2581\u2581 b", "</s>", "<0x0A>"],
)
def test_sentencepiece_edges(model_type, text):
    tokenizer = pieces(model_type)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).count(tokenizer.eos_id) == text.count("\n")


def test_sentencepiece_space_mark_is_not_a_space():
    tokenizer = pieces("unigram")
    assert tokenizer.encode("a\u2581b") != tokenizer.encode("a b")


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentencepiece_lines_of_a_megabyte(model_type):
    rng = random.Random(1)
    spaced = " ".join("".join(rng.choices("abcde", k=6)) for _ in range(150_000))
    solid = "".join(rng.choices("abcde", k=1 << 20))
    text = f"{spaced}\n{solid}\n"
    tokenizer = SentencePieceTokenizer.train(
        [text], vocab_size=300, model_type=model_type, sample_bytes=1 << 16, total_bytes=len(text)
    )
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)  # longer pieces were learnt from such lines


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentencepiece_is_deterministic(model_type, capfd):
    text = (TINY / "valid.txt").read_text(encoding="utf-8")
    options = {"vocab_size": 500, "model_type": model_type}
    sampled = options | {"sample_bytes": 10_000, "total_bytes": len(text)}
    assert len({SentencePieceTokenizer.train([text], **options).model for _ in range(2)}) == 1
    assert len({SentencePieceTokenizer.train([text], **sampled).model for _ in range(2)}) == 1
    seeds = {SentencePieceTokenizer.train([text], **sampled, seed=s).model for s in (1, 2)}
    assert len(seeds) == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentencepiece_names_the_possible_sizes(model_type):
    text = (TINY / "valid.txt").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"the largest possible is (\d+)$") as error:
        SentencePieceTokenizer.train([text], vocab_size=50_000, model_type=model_type)
    largest = int(str(error.value).split()[-1])
    for size in (largest, largest + 1):
        options = {"vocab_size": size, "model_type": model_type}
        if size == largest:
            assert SentencePieceTokenizer.train([text], **options).vocab_size == largest
        else:
            with pytest.raises(ValueError, match="too large"):
                SentencePieceTokenizer.train([text], **options)
    with pytest.raises(ValueError, match=r"the smallest possible is (\d+)$") as error:
        SentencePieceTokenizer.train([text], vocab_size=100, model_type=model_type)
    smallest = int(str(error.value).split()[-1])
    options = {"vocab_size": smallest, "model_type": model_type}
    assert SentencePieceTokenizer.train([text], **options).vocab_size == smallest


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("vocab_size", [-1, 0, 1, 10**9, 10**12])
def test_sentencepiece_absurd_sizes(model_type, vocab_size):
    with pytest.raises(ValueError, match="vocab_size") as error:
        SentencePieceTokenizer.train(["a b c\n" * 9], vocab_size=vocab_size, model_type=model_type)
    assert "\n" not in str(error.value)


def test_sentencepiece_refusals():
    with pytest.raises(ValueError, match="unigram or bpe"):
        SentencePieceTokenizer.train(["a\n"], vocab_size=300, model_type="word")
    with pytest.raises(ValueError, match="nothing to train"):
        SentencePieceTokenizer.train(["\n\n"], vocab_size=300)
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        SentencePieceTokenizer(b"junk")


def test_marked_lines_are_learnt_from():
    """Lines with the trainer's own markers are not lost, only the markers."""
    text = "".join(f"wonderful {i}\u2585 wonderful\u2581wonderful wonderful\n" for i in range(50))
    tokenizer = SentencePieceTokenizer.train([text], vocab_size=290, model_type="bpe")
    assert len(tokenizer.encode("wonderful")) < 5
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("index", range(3))
def test_lone_surrogates_are_refused(index):
    with pytest.raises(ValueError, match=r"line 2 .*U\+D800"):
        all_kinds()[index].encode("fine\nnot \ud800 fine\n")


@pytest.mark.parametrize("index", range(3))
def test_nul_is_refused(index):
    with pytest.raises(ValueError, match=r"^line 3 holds a NUL .*remove it"):
        all_kinds()[index].encode("fine\n\nnot \0 fine\n")


@pytest.mark.parametrize("index", [0, 2])
def test_round_trips_of_other_scripts(index):
    text = "\u05e9\u05dc\u05d5\u05dd \u200f(abc)\u200e \u0645\u0631\u062d\u0628\u0627\n"
    text += (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1ee e\u0301 \u202eabc\u202c\n"
    )
    text += "\u65e5\u672c\u8a9e" * 350_000 + "\n"  # a line of more than 1 MB
    tokenizer = all_kinds()[index]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("index", range(3))
def test_encode_line_and_decode_inputs(index):
    tokenizer = all_kinds()[index]
    assert tokenizer.encode_line("a b") == tokenizer.encode("a b\n")
    assert tokenizer.encode("a b\n")[:-1] == tokenizer.encode("a b")
    ids = tokenizer.encode("a b\na\n")
    assert tokenizer.decode(np.array(ids, np.uint16)) == "a b\na\n"
    assert tokenizer.decode(torch.tensor(ids)) == "a b\na\n"
    assert tokenizer.decode(iter(ids)) == "a b\na\n"
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=str(wrong)):
            tokenizer.decode([0, wrong])


@pytest.mark.parametrize("index", range(3))
def test_save_and_load(index, tmp_path):
    tokenizer = all_kinds()[index]
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert (loaded.vocab_size, loaded.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    assert loaded.encode("a b\n b") == tokenizer.encode("a b\n b")


def test_fingerprints_differ():
    kinds = [*all_kinds(), pieces("bpe"), WordTokenizer.build(["b b a <unk>\n"])]
    assert len({tokenizer.fingerprint() for tokenizer in kinds}) == len(kinds)
    assert all(len(tokenizer.fingerprint()) == 64 for tokenizer in kinds)


def test_load_refusals(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    WordTokenizer.build(["a b\n"]).save(tmp_path)
    (tmp_path / "vocab.txt").write_text("b\na\n<eos>\n<unk>\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: .*fingerprint"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("b\n\na\n<eos>\n<unk>\n")
    with pytest.raises(ValueError, match="vocab.txt: '' is empty"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"vocab\.txt"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"kind": "morse", "fingerprint": ""}))
    with pytest.raises(ValueError, match="'morse'.*byte, word and sentencepiece"):
        load_tokenizer(tmp_path)
    for damaged in ("{", "[]", "{}"):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a description"):
            load_tokenizer(tmp_path)
