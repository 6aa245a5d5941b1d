"""Sampling: a function of the seed, greedy at temperature 0, and never outside top-k and top-p."""

from __future__ import annotations

import json

import pytest
import torch

from allattn.cli import main
from allattn.inference.load import load_pretrained, open_source
from allattn.model.generate import generate, sample


@pytest.fixture
def model(tiny_model):
    return tiny_model(n_layers=2, n_heads=[2, 1])


def new(model, prompt=(1, 2, 3), **options) -> list[int]:
    steps = generate(model, [list(prompt)], **{"max_new_tokens": 20, **options})
    return [ids[0] for ids in steps]


def test_a_seed_decides(model):
    assert new(model, seed=5) == new(model, seed=5)
    assert len({tuple(new(model, seed=s)) for s in range(5)}) > 1
    torch.manual_seed(1)
    first = new(model, seed=7)
    torch.manual_seed(2)
    assert new(model, seed=7) == first


def test_how_many(model):
    assert len(new(model)) == 20
    assert new(model, max_new_tokens=0) == []
    assert new(model, max_new_tokens=7) == new(model)[:7]
    assert all(0 <= token < 11 for token in new(model))


def test_temperature_0_takes_the_likeliest_each_time(model):
    """Against one pass over all of it: long memory makes that the same computation."""
    model.config.mem_len = 100
    for prompt in ([1], [4, 4, 9, 0, 2, 7, 1, 3, 3, 10]):  # shorter and longer than a segment
        got = new(model, prompt, temperature=0)
        with torch.no_grad():
            log_probs = model(torch.tensor([prompt + got])).log_probs[0]
        expected = log_probs[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert got == expected


def test_temperature_0_does_not_depend_on_the_seed(model):
    assert new(model, temperature=0, seed=1) == new(model, temperature=0, seed=2)


def test_top_k_of_one_is_greedy(model):
    assert new(model, top_k=1) == new(model, temperature=0)
    assert new(model, top_p=1e-9) == new(model, temperature=0)
    assert new(model, top_k=11, top_p=1.0, seed=3) == new(model, seed=3)
    assert new(model, top_k=500, seed=3) == new(model, seed=3)


PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2], dtype=torch.float64)


def drawn(n: int = 4000, **options) -> torch.Tensor:
    """Shares of the five tokens among n draws."""
    options = {"temperature": 1.0, "top_k": None, "top_p": None, **options}
    rows = PROBS.log().expand(n, 5)
    ids = sample(rows, **options, generator=torch.Generator().manual_seed(0))
    assert ids.shape == (n,)
    return torch.bincount(ids, minlength=5) / n


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.4}, [1]),  # the likeliest has that much by itself
        ({"top_p": 0.5}, [1, 3]),
        ({"top_p": 0.84}, [1, 3, 4]),
        ({"top_p": 0.9}, [1, 2, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.5}, [1, 3]),
        ({"top_k": 1, "top_p": 0.99}, [1]),
    ],
)
def test_draws_stay_inside_and_keep_their_proportions(options, allowed):
    shares = drawn(**options)
    expected = torch.zeros(5, dtype=torch.float64)
    expected[allowed] = PROBS[allowed] / PROBS[allowed].sum()
    assert ((shares > 0) == (expected > 0)).all()
    assert (shares - expected).abs().max() < 0.035


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature(temperature):
    expected = PROBS ** (1 / temperature)
    assert (drawn(temperature=temperature) - expected / expected.sum()).abs().max() < 0.035


def test_a_prompt_in_segments_is_one_prompt(model):
    """The prompt is longer than seq_len; memory carries it over, as in evaluation."""
    prompt = torch.randint(11, (23,)).tolist()
    with torch.no_grad():
        memory, parts = None, torch.tensor([prompt]).split(model.config.seq_len, dim=1)
        for part in parts:
            output = model(part, memory=memory)
            memory = output.memory
    first = int(output.log_probs[0, -1].argmax())
    assert new(model, prompt, temperature=0, max_new_tokens=1) == [first]


# The command


def run_json(capsys, *argv: object) -> dict:
    capsys.readouterr()
    assert main(["generate", *map(str, argv), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_the_command(finished_run, capsys):
    options = ("--prompt", "She had been", "--max-new-tokens", 12, "--seed", 4)
    a = run_json(capsys, finished_run, *options)
    assert a == run_json(capsys, finished_run / "final", *options)
    assert a["prompt"] == "She had been" and len(a["tokens"]) == 12
    assert a["text"].startswith("She had been")
    source = open_source(finished_run)
    tokenizer = source.tokenizer()
    prompt = tokenizer.encode("She had been")
    model = load_pretrained(finished_run)
    again = generate(model, [prompt], max_new_tokens=12, seed=4)
    assert [ids[0] for ids in again] == a["tokens"]
    assert a["text"] == tokenizer.decode(prompt + a["tokens"])
    assert a != run_json(capsys, finished_run, *options[:-1], 5)
    greedy = run_json(capsys, finished_run, *options, "--temperature", 0)
    assert greedy["tokens"] == run_json(capsys, finished_run, *options, "--top-k", 1)["tokens"]
    assert main(["generate", str(finished_run), *map(str, options)]) == 0
    assert capsys.readouterr().out == a["text"] + "\n"


def test_without_a_prompt(finished_run, capsys):
    result = run_json(capsys, finished_run, "--max-new-tokens", 5)
    assert len(result["tokens"]) == 5 and result["prompt"] == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--top-k", "0"], "--top-k"),
        (["--top-p", "0"], "--top-p"),
        (["--top-p", "1.5"], "--top-p"),
        (["--max-new-tokens", "-1"], "--max-new-tokens"),
    ],
)
def test_bad_options(finished_run, fails, options, words):
    assert fails(2, "generate", finished_run, *options).startswith(words)


def test_nothing_there(fails, tmp_path):
    assert str(tmp_path / "x") in fails(1, "generate", tmp_path / "x")
