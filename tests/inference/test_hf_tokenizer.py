"""The tokenizers in transformers give allattn's ids, whatever the text."""

from __future__ import annotations

import json

import pytest

from allattn.data.tokenizers import (
    HF_TOKENIZER_FILE,
    ByteTokenizer,
    SentencePieceTokenizer,
    WordTokenizer,
    load_tokenizer,
)

pytest.importorskip("transformers")

from allattn.inference.hf import AllattnTokenizer  # noqa: E402

LINES = ["the cat sat on the mat .", "a dog <unk> sat", "", "the end of the lines here , cat"] * 9
TEXTS = [
    "", " ", "\n", "\n\n the  cat\tsat \n", "the cat<eos>sat", "a </s> b <unk>c <s>", "<0x0A>",
    "na\u00efve \u2581 \u4e2d\u6587 \U0001f600 e\u0301", "  lead", "trail  \n",
    "[PAD] <pad> <|endoftext|>",
    "don 't , .  .", "line\r\nend\u2028sep\x0bv\x0cf",
]  # fmt: skip


@pytest.fixture(params=["byte", "word", "sentencepiece"])
def inner(request):
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "word":
        return WordTokenizer.build(["\n".join(LINES)])
    return SentencePieceTokenizer.train(["\n".join(LINES)], vocab_size=280)


@pytest.fixture
def tokenizer(inner, tmp_path) -> AllattnTokenizer:
    inner.save_content(tmp_path)
    described = {key: inner.describe()[key] for key in ("kind", "fingerprint")}
    (tmp_path / HF_TOKENIZER_FILE).write_text(json.dumps(described))
    return AllattnTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_ids_and_text(tokenizer, inner, text):
    ids = inner.encode(text)
    assert tokenizer(text)["input_ids"] == ids == tokenizer.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == inner.decode(ids)
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(text)) == inner.decode(ids)
    assert tokenizer.convert_ids_to_tokens(ids) == tokenizer.tokenize(text)


def test_vocabulary(tokenizer, inner):
    assert len(tokenizer) == tokenizer.vocab_size == inner.vocab_size == len(tokenizer.get_vocab())
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == inner.eos_id
    assert sorted(tokenizer.get_vocab().values()) == list(range(inner.vocab_size))


def test_a_batch_is_padded_on_the_left(tokenizer, inner):
    texts = ["the cat\nsat", "a dog\n", "the"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    for text, ids, mask in zip(texts, batch["input_ids"], batch["attention_mask"], strict=True):
        n = len(inner.encode(text))
        assert mask.tolist() == [0] * (len(mask) - n) + [1] * n
        assert ids[len(mask) - n :].tolist() == inner.encode(text)
    decoded = tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert decoded == [inner.decode(inner.encode(text)) for text in texts]


def test_saved_and_loaded_again(tokenizer, inner, tmp_path):
    tokenizer.save_pretrained(tmp_path / "again")
    again = AllattnTokenizer.from_pretrained(tmp_path / "again")
    assert all(again(text)["input_ids"] == inner.encode(text) for text in TEXTS)
    assert again.padding_side == "left" and again.pad_token_id == inner.eos_id
    assert load_tokenizer(tmp_path / "again").fingerprint() == inner.fingerprint()


def test_files_that_do_not_belong(tokenizer, inner, tmp_path):
    if inner.kind == "byte":
        return
    name = {"word": "vocab.txt", "sentencepiece": "tokenizer.model"}[inner.kind]
    if inner.kind == "word":
        (tmp_path / name).write_text("<eos>\n<unk>\nother\n")
        with pytest.raises(ValueError, match="fingerprint"):
            AllattnTokenizer.from_pretrained(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: missing"):
        AllattnTokenizer.from_pretrained(tmp_path)


def test_another_models_tokenizer(inner, tokenizer, tmp_path):
    if inner.kind == "byte":
        pytest.skip("there is one for all")
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer": inner.fingerprint()}))
    AllattnTokenizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer": "another"}))
    with pytest.raises(ValueError, match="not the one that the model"):
        AllattnTokenizer.from_pretrained(tmp_path)
