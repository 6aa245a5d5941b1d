"""Plain texts: with memory as a split, line by line as nothing else; definitions by hand."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import oracles
import pytest
import torch

from allattn.cli import main
from allattn.config import ConfigError
from allattn.data.tokenizers import ByteTokenizer, WordTokenizer
from allattn.inference.evaluate import evaluate_source, evaluate_text
from allattn.inference.load import open_source


@pytest.fixture
def poem(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("She walks in beauty\n\nlike the night of cloudless climes", encoding="utf-8")
    return path


def test_a_text_scores_as_the_split_made_of_it(finished_run, tiny_corpus):
    source = open_source(finished_run)
    expected = evaluate_source(source, source.corpus(), "valid")
    got = evaluate_source(source, None, "valid", text=tiny_corpus.parent / "valid.txt")
    for key in expected.keys() - {"split", "tokens_per_second"}:
        assert got[key] == expected[key], key
    assert got["split"] is None and got["text"].endswith("valid.txt")


def test_word_ppl_counted_by_hand(tiny_model, tmp_path):
    """Uniform over 256 bytes: ln 256 a token. 3 words and 2 line ends; 8 bytes, é being two."""
    model = tiny_model(vocab_size=256)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    path = tmp_path / "a.txt"
    path.write_text("a é b\n\n", encoding="utf-8")  # 3 words + 2 line ends = 5; 8 bytes
    for per_line in (False, True):
        config = {"mem_len": 0} if per_line else {}
        uniform = tiny_model(vocab_size=256, **config)
        uniform.load_state_dict(model.state_dict())
        result = evaluate_text(uniform, ByteTokenizer(), path, 1, per_line)
        assert (result["tokens"], result["words"]) == (8, 5)
        assert result["loss"] == pytest.approx(math.log(256))
        assert result["word_ppl"] == pytest.approx(256 ** (8 / 5))
        assert result["bits_per_byte"] == pytest.approx(8.0)
    words = WordTokenizer(["<eos>", "<unk>", "a", "b", "c", "d", "e", "f"])  # 5 tokens of 8 types
    small = tiny_model(vocab_size=8)
    for parameter in small.parameters():
        torch.nn.init.zeros_(parameter)
    result = evaluate_text(small, words, path, 1)
    assert (result["tokens"], result["words"]) == (5, 5)
    assert result["word_ppl"] == pytest.approx(8.0)
    assert result["bits_per_byte"] == pytest.approx(5 * 3 / 8)


def test_lines_against_loops(tiny_model, tmp_path):
    """Each line alone after a line end, by the equations; lines longer than seq_len in parts."""
    words = WordTokenizer(["<eos>", "<unk>", *"abcdefghi"])
    model = tiny_model(mem_len=0)  # 11 tokens, seq_len 4
    path = tmp_path / "a.txt"
    path.write_text("a b\n\nc d e f g h\na b\ni i i\n")
    for batch_size in (1, 2, 64):
        lines = evaluate_text(model, words, path, batch_size, per_line=True)["lines"]
        assert [line["line"] for line in lines] == [1, 2, 3, 4, 5]
        assert [line["tokens"] for line in lines] == [3, 1, 7, 3, 4]
        assert lines[0]["nats"] == pytest.approx(lines[3]["nats"], rel=1e-12)
        for line, text in zip(lines, path.read_text().split("\n"), strict=False):
            ids = words.encode_line(text)
            inputs, nats = [0, *ids[:-1]], 0.0
            for start in range(0, len(ids), 4):
                segment = inputs[start : start + 4]
                rows = oracles.language_model([segment], oracles.weights_of(model), model.config)
                rows = np.concatenate(rows)
                nats -= sum(rows[i, token] for i, token in enumerate(ids[start : start + 4]))
            assert line["nats"] == pytest.approx(nats, rel=0, abs=1e-9)
            assert line["loss"] == pytest.approx(nats / len(ids))
            assert line["ppl"] == pytest.approx(math.exp(nats / len(ids)))
            assert line["word_ppl"] == pytest.approx(math.exp(nats / line["words"]))


def test_same_length_hides_nothing_of_a_line(finished_run, poem):
    """It is a window of mem_len tokens, which a line has not: its own tokens stay in sight."""
    source = open_source(finished_run)
    plain, same = (
        evaluate_source(_with(source, same_length=on), None, "valid", text=poem, per_line=True)
        for on in (False, True)
    )
    assert [x["nats"] for x in plain["lines"]] == [x["nats"] for x in same["lines"]]


def _with(source, **changes):
    config = dataclasses.replace(source.config, **changes)
    return dataclasses.replace(source, weights=dataclasses.replace(source.weights, config=config))


def test_commands(finished_run, poem, capsys):
    argv = ["evaluate", str(finished_run), "--text", str(poem)]
    assert main([*argv, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["words"], whole["mem_len"]) == (13, 16) and "lines" not in whole
    assert main([*argv, "--per-line", "--json"]) == 0
    said = capsys.readouterr().out
    result = json.loads(said)
    assert said.count("\n") == 1 and result["mem_len"] == 0
    assert [line["words"] for line in result["lines"]] == [5, 1, 7]
    assert sum(line["tokens"] for line in result["lines"]) == result["tokens"] == whole["tokens"]
    total = sum(line["nats"] for line in result["lines"])
    assert total == pytest.approx(result["loss"] * result["tokens"])
    assert main([*argv, "--per-line"]) == 0
    assert capsys.readouterr().out.count("\nline ") == 2


def test_refusals(finished_run, poem, tmp_path, capsys):
    run = str(finished_run)
    for argv, match, status in (
        (["--per-line"], "--text", 2),
        (["--text", str(poem), "--per-line", "--mem-len", "4"], "--mem-len", 2),
        (["--text", str(poem), "--per-line", "--same-length"], "--same-length", 2),
        (["--text", str(poem), "--data", "x"], "--data", 2),
        (["--text", str(tmp_path / "no.txt")], "no.txt: no such file", 1),
    ):
        assert main(["evaluate", run, *argv]) == status
        said = capsys.readouterr().err
        assert match in said and said.count("\n") == 1
    poem.write_bytes(b"fine\n\xff")
    assert main(["evaluate", run, "--text", str(poem), "--per-line"]) == 1
    assert "line 2: byte 0xFF" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="per_line"):
        evaluate_source(open_source(run), None, "valid", per_line=True)
