"""Tokenizers from elsewhere: vocabulary files, sentencepiece models, prepared folders."""

import io
from functools import cache

import pytest
import sentencepiece

from allattn.data.prepare import TINY
from allattn.data.tokenizers import SentencePieceTokenizer, read_tokenizer


@cache
def trained() -> SentencePieceTokenizer:
    text = (TINY / "valid.txt").read_text(encoding="utf-8")
    return SentencePieceTokenizer.train([text], vocab_size=500, model_type="bpe")


def test_vocabulary_files(tmp_path):
    path = tmp_path / "words"
    path.write_text("the 10\n<UNK> 3\ncat\t2\n", encoding="utf-8")
    words = read_tokenizer(path)
    assert words.words == ["the", "<UNK>", "cat", "<eos>"]
    assert words.encode("the dog cat\n") == [0, 1, 2, 3]
    path.write_text("a\nb", encoding="utf-8")
    assert read_tokenizer(path).words == ["a", "b", "<eos>", "<unk>"]
    for content, match in {
        "a\n\nb\n": "line 2: no word",
        "a\nb\na 3\n": "line 3: 'a' is there",
    }.items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=match):
            read_tokenizer(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_tokenizer(path)
    with pytest.raises(FileNotFoundError, match="nowhere: no such file; a prepared"):
        read_tokenizer(tmp_path / "nowhere")


def test_existing_models(tmp_path):
    path = tmp_path / "m.model"
    path.write_bytes(trained().model)
    assert read_tokenizer(path).fingerprint() == trained().fingerprint()
    trained().save(tmp_path / "folder")
    assert read_tokenizer(tmp_path / "folder").fingerprint() == trained().fingerprint()
    path.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"m\.model: not a sentencepiece model"):
        read_tokenizer(path)
    text = (TINY / "valid.txt").read_text(encoding="utf-8").split("\n")
    model = io.BytesIO()  # as others train them: normalized, without bytes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, vocab_size=300, minloglevel=9
    )
    path.write_bytes(model.getvalue())
    tokenizer = read_tokenizer(path)
    assert not tokenizer.lossless and trained().lossless
    assert tokenizer.decode(tokenizer.encode("she was\nhere\n")) == "she was\nhere\n"
    assert tokenizer.encode("\u2581")[-1] == 0
