"""The model as a program of plain tensors: the same log-probabilities, whatever its shape."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from allattn.data.lanes import Corpus
from allattn.inference import programs
from allattn.inference.evaluate import evaluate
from allattn.inference.load import load_pretrained
from allattn.inference.programs import Program, model_call, program_perplexity, worst_difference

ADAPTIVE = {"embedding": "adaptive", "cutoffs": [3, 7]}
SHAPES = {
    "all-attention": {},
    "transformer-xl": {"n_persistent": 0, "d_ff": 7},
    "hybrid": {"d_ff": 7},
    "a layer without heads": {"n_heads": [0, 2]},
    "transformer-xl, a layer without heads": {"n_heads": [1, 0], "n_persistent": 0, "d_ff": 7},
    "no heads": {"n_heads": [0, 0]},
    "same_length": {"same_length": True},
    "clamp_len": {"clamp_len": 3},
    "learned positions": {"position": "learned", "clamp_len": 5},
    "adaptive": {**ADAPTIVE, "div_value": 2},
    "adaptive, no projections": {**ADAPTIVE, "div_value": 1},
    "adaptive, one cluster": {"embedding": "adaptive", "div_value": 2},
    "no memory": {"mem_len": 0},
    "one token a call": {"seq_len": 1},
    "memory of one": {"mem_len": 1},
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@every_shape
def test_a_program_is_the_model(tiny_model, shape):
    """In float64, through several segments, with padding: to rounding."""
    model = tiny_model(**shape, attention="reference")
    program = Program(copy.deepcopy(model))
    assert worst_difference(program, model_call(model), program) < 1e-12


def test_a_row_starts_anew(tiny_model):
    """A stream that begins in one row of a running batch sees nothing of what ran there before."""
    program = Program(tiny_model(attention="reference"))
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    _, *state = program(ids, torch.arange(4), program.start(2))
    fresh, *_ = program(ids[1:], torch.arange(4), program.start(1))
    state[0][1] = program.config.mem_len
    found, *_ = program(ids, torch.arange(4), state)
    assert torch.allclose(found[1:], fresh, atol=1e-12)
    state[0][1] = 0
    assert not torch.allclose(program(ids, torch.arange(4), state)[0][1:], fresh, atol=1e-3)


def test_a_wrong_program_is_refused(tiny_model):
    """The check sees each part: persistent vectors, positions, memory, vocabulary."""
    model = tiny_model(attention="reference").float()
    for name in ("fixed.0.key", "fixed.1.value", "fixed.0.positions", "vocabulary.bias"):
        program = Program(copy.deepcopy(model))
        programs.check(program, model_call(model), program, "it")
        program.state_dict()[name].view(-1)[-1] += 0.1
        with pytest.raises(ValueError, match="it: its log-probabilities are off by up to"):
            programs.check(program, model_call(model), program, "it")

    program = Program(copy.deepcopy(model))

    def forgets(ids, wanted, state):
        return [program(ids, wanted, state)[0], *program.start(len(ids))]

    with pytest.raises(ValueError, match="off by"):
        programs.check(forgets, model_call(model), program, "it")


def test_perplexity_is_that_of_evaluate(finished_run, tiny_corpus):
    model = load_pretrained(finished_run, attention="reference")
    corpus = Corpus(tiny_corpus)
    expected = evaluate(model, corpus, "valid", 8)["ppl"]
    program = Program(load_pretrained(finished_run, attention="reference"))
    assert program_perplexity(program, program, corpus, "valid") == pytest.approx(expected, 1e-6)


def test_weights_that_were_folded_are_not_kept_twice(tiny_model):
    model = tiny_model(attention="reference")
    config = dataclasses.replace(model.config)
    names = set(Program(model).state_dict())
    assert {"fixed.0.key_value", "fixed.0.key", "layers.0.attention.query.weight"} <= names
    gone = ("attention.key.", "attention.value.", "attention.position.", "persistent")
    assert not [name for name in names if any(part in name for part in gone)]
    assert config.heads == [2, 2]
