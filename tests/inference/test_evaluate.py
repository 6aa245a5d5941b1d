"""Perplexity: every token once, whatever the split into segments and lanes; known counts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import oracles
import pytest
import torch
from killed import HANG
from runs import EDGE_GATES, HEADS, STEPS, Run

from allattn.cli import main
from allattn.data.lanes import Corpus
from allattn.inference.evaluate import evaluate, evaluate_source
from allattn.inference.load import load_pretrained, open_source
from allattn.model.scoring import score_stream
from allattn.model.transformer import TransformerLM

KEYS = {
    "split", "loss", "ppl", "word_ppl", "bits_per_byte", "tokens", "words", "seq_len", "mem_len",
    "clamp_len", "heads", "params", "params_non_embedding", "tokens_per_second",
}  # fmt: skip
FAMILIES = {
    "all-attention": {},
    "transformer-xl": {"n_persistent": 0, "d_ff": 10},
    "pruned": {"n_layers": 3, "n_heads": [2, 0, 1]},
    "learned": {"position": "learned", "clamp_len": 4},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def nats(model: TransformerLM, tokens: np.ndarray, **options) -> tuple[float, int]:
    defaults = {"seq_len": model.config.seq_len, "batch_size": 1}
    total, n = score_stream(model, model, tokens, 3, **{**defaults, **options}).tolist()
    return total, int(n)


@every_family
@pytest.mark.parametrize("n", [1, 4, 5, 63, 200, 201])
def test_the_batch_changes_nothing(tiny_model, family, n):
    model = tiny_model(**FAMILIES[family])
    tokens = np.random.default_rng(0).integers(0, 11, n).astype(np.uint16)
    expected, count = nats(model, tokens)
    assert count == n
    for batch_size in (2, 3, 8, 1000):
        total, count = nats(model, tokens, batch_size=batch_size)
        assert count == n and total == pytest.approx(expected, rel=0, abs=1e-10 * n)


@every_family
def test_with_same_length_segments_change_nothing(tiny_model, family):
    model = tiny_model(same_length=True, **FAMILIES[family])
    tokens = np.random.default_rng(1).integers(0, 11, 101).astype(np.uint8)
    expected, _ = nats(model, tokens, seq_len=1)
    for seq_len in (2, 3, 4, 7, 64, 101, 500):
        for batch_size in (1, 4):
            total, n = nats(model, tokens, seq_len=seq_len, batch_size=batch_size)
            assert n == 101 and total == pytest.approx(expected, rel=0, abs=1e-8)


def test_ranks_share_the_stream(tiny_model):
    model = tiny_model()
    for n in (3, 40, 300):
        tokens = np.random.default_rng(2).integers(0, 11, n).astype(np.uint8)
        expected, _ = nats(model, tokens)
        for world in (2, 3):
            for batch_size in (1, 2, 8):
                options = {"batch_size": batch_size, "world_size": world}
                parts = [nats(model, tokens, rank=r, **options) for r in range(world)]
                assert sum(part[1] for part in parts) == n
                total = sum(part[0] for part in parts)
                assert total == pytest.approx(expected, rel=0, abs=1e-10 * n)


def test_against_loops(tiny_model):
    """The loss of every token given those before it, by the equations, in float64."""
    model = tiny_model()
    tokens = np.random.default_rng(3).integers(0, 11, 14)
    inputs = [3, *tokens[:-1].tolist()]
    segments = [inputs[i : i + 4] for i in range(0, 14, 4)]
    rows = np.concatenate(oracles.language_model(segments, oracles.weights_of(model), model.config))
    expected = -sum(rows[i, token] for i, token in enumerate(tokens))
    total, n = nats(model, tokens.astype(np.uint8), batch_size=4)
    assert n == 14 and total == pytest.approx(expected, rel=0, abs=1e-9)


def test_the_result_of_a_run_in_float64_is_independent_of_the_batch(finished_run):
    source = open_source(finished_run)
    model = source.weights.build().double()
    corpus = source.corpus()
    results = [evaluate(model, corpus, "valid", batch) for batch in (1, 2, 5, 64)]
    for result in results[1:]:
        for key in ("loss", "ppl", "word_ppl", "bits_per_byte"):
            assert result[key] == pytest.approx(results[0][key], rel=1e-10)
        assert result["tokens"] == results[0]["tokens"]


def test_counts_and_definitions(finished_run, tiny_corpus):
    text = (tiny_corpus.parent / "valid.txt").read_text(encoding="utf-8")
    if not text.endswith("\n"):
        text += "\n"
    words = len(text.split()) + text.count("\n")
    source = open_source(finished_run)
    result = evaluate_source(source, source.corpus(), "valid")
    assert result["tokens"] == len(Corpus(tiny_corpus).tokenizer.encode(text))
    assert result["words"] == words and result["words"] < result["tokens"] < len(text)
    total = result["loss"] * result["tokens"]
    assert result["ppl"] == pytest.approx(math.exp(result["loss"]))
    assert result["word_ppl"] == pytest.approx(math.exp(total / words))
    n_bytes = len(text.encode("utf-8"))
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / n_bytes)
    config = source.config
    assert result["params"] == oracles.parameters(config)
    vocabulary = oracles.vocabulary_parameters(config)
    assert result["params_non_embedding"] == result["params"] - vocabulary
    assert result["heads"] == config.heads and sum(result["heads"]) == 4
    assert (result["seq_len"], result["mem_len"], result["clamp_len"]) == (16, 16, None)
    assert result["tokens_per_second"] > 0


def test_the_export_has_the_runs_own_perplexity(finished_run):
    run = Run(finished_run)
    source = open_source(finished_run / "final")
    result = evaluate_source(source, source.corpus(), "valid", batch_size=4)
    assert result["loss"] == pytest.approx(run.losses()["valid", STEPS], rel=1e-6)


def test_in_a_fresh_process(finished_run):
    """Five digits of the run's own perplexity, and nothing but JSON on stdout."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "allattn", "evaluate", str(finished_run / "final"), "--json"],
        env=env, capture_output=True, text=True, check=True, timeout=HANG,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and result.keys() >= KEYS
    own = math.exp(Run(finished_run).losses()["valid", STEPS])
    assert f"{result['ppl']:.5g}" == f"{own:.5g}"


def test_every_checkpoint_evaluates_as_the_run_did(make_config, train):
    run = train(make_config("train.eval_every=1", "train.save_every=1", *EDGE_GATES))
    losses = run.losses()
    inside = {r["heads_open"] for r in run.lines if r.get("split") and r["step"] in (6, 7, 8, 9)}
    assert any(0 < n < HEADS for n in inside)  # so that the open ones are scaled
    for step in range(1, STEPS + 1):
        source = open_source(run.checkpoint(step))
        result = evaluate_source(source, source.corpus(), "valid", batch_size=4)
        assert result["loss"] == pytest.approx(losses["valid", step], rel=1e-5), step


def test_other_lengths(finished_run, capsys):
    argv = ["evaluate", str(finished_run), "--json", "--split", "test"]
    argv += ["--seq-len", "7", "--mem-len", "30", "--clamp-len", "20", "--same-length"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    wanted = {"seq_len": 7, "mem_len": 30, "clamp_len": 20, "same_length": True, "split": "test"}
    assert {key: result[key] for key in wanted} == wanted
    model = load_pretrained(finished_run, seq_len=7, mem_len=30, clamp_len=20, same_length=True)
    corpus = open_source(finished_run).corpus()
    assert result["loss"] == pytest.approx(evaluate(model, corpus, "test", 1)["loss"], rel=1e-6)
    assert main(["evaluate", str(finished_run), "--json", "--mem-len", "0"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["mem_len"] == 0 and without["tokens"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--split", "dev"], "no split 'dev'; it has train, valid, test"),
        (["--seq-len", "0"], "--seq-len"),
        (["--mem-len", "-1"], "--mem-len"),
        (["--clamp-len", "0"], "--clamp-len"),
        (["--batch-size", "0"], "--batch-size"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--device", "cuda"], "--device"),
    ],
)
def test_bad_options(finished_run, fails, monkeypatch, options, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = 2 if words in ("--seq-len", "--mem-len", "--clamp-len", "--batch-size") else 1
    line = fails(status, "evaluate", finished_run, *options)
    assert words in line


def test_another_tokenizer_is_refused(finished_run, fails, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("one two three\n" * 50)
    files = ["--train", text, "--valid", text]
    assert main(["prepare", *map(str, files), "--out", str(tmp_path / "d")]) == 0
    assert "tokenizer" in fails(1, "evaluate", finished_run, "--data", tmp_path / "d")


@pytest.mark.parametrize("option", ["--json", None])
def test_stdout(finished_run, capsys, option):
    capsys.readouterr()
    argv = ["evaluate", str(finished_run), *([option] if option else [])]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    if option:
        assert out.count("\n") == 1 and json.loads(out).keys() >= KEYS
    else:
        assert all(key in out for key in KEYS)
    assert "Traceback" not in err
