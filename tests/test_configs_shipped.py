"""Every config in configs/ loads, shows, and has the sizes that the equations give."""

from __future__ import annotations

import json
from pathlib import Path

import oracles
import pytest

from allattn.cli import main
from allattn.config import load_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
WIKITEXT_103 = 267_735
PAPER = {
    "n_layers": 16, "d_model": 512, "heads": [8] * 16, "d_head": 64, "seq_len": 192,
    "mem_len": 192, "embedding": "adaptive", "cutoffs": [20000, 40000, 200000], "div_value": 4,
    "attn_dropout": 0.2, "dropout": 0.1,
}  # fmt: skip
every_config = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def show(capsys, path: Path, *overrides: str) -> dict:
    capsys.readouterr()
    assert main(["show", str(path), *overrides, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_those_of_the_issue_are_there():
    names = {path.name for path in FILES}
    assert {"tiny.yaml", *(f"wikitext103_{x}.yaml" for x in ("allattn", "txl", "prune"))} <= names


@every_config
def test_it_shows(capsys, path):
    shown = show(capsys, path)
    config = load_config(path)
    assert shown.keys() >= {
        "params", "params_embedding", "params_non_embedding", "flops_per_token", "heads", "stages",
    }  # fmt: skip
    assert shown["heads"] == config.model.heads
    assert [stage["name"] for stage in shown["stages"]] == [stage.name for stage in config.stages]
    assert shown["stages"][-1]["last_step"] == sum(stage.steps for stage in config.stages)
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("parameters", "stages", config.stages[0].name))


@every_config
def test_its_sizes_are_those_of_the_equations(capsys, path):
    vocabulary = load_config(path).model.vocab_size
    if vocabulary is None:  # the corpus decides
        vocabulary = WIKITEXT_103 if "wikitext103" in path.name else 5000
    shown = show(capsys, path, f"model.vocab_size={vocabulary}")
    model = load_config(path, [f"model.vocab_size={vocabulary}"]).model
    assert shown["params"] == oracles.parameters(model)
    assert shown["params_embedding"] == oracles.vocabulary_parameters(model)
    assert shown["params_non_embedding"] == shown["params"] - shown["params_embedding"]
    assert sum(shown["params_by_part"].values()) == shown["params"]
    assert shown["flops_per_token"] == pytest.approx(oracles.flops_per_token(model), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "n_persistent", "d_ff"),
    [
        ("wikitext103_allattn.yaml", 2048, 0),
        ("wikitext103_txl.yaml", 0, 2048),
        ("wikitext103_prune.yaml", 2048, 0),
    ],
)
def test_wikitext103_has_the_papers_sizes(capsys, name, n_persistent, d_ff):
    config = load_config(CONFIGS / name)
    model = config.model
    assert {key: getattr(model, key) for key in PAPER} == PAPER
    assert (model.n_persistent, model.d_ff) == (n_persistent, d_ff)
    assert config.train.batch_size == 192
    shown = show(capsys, CONFIGS / name, f"model.vocab_size={WIKITEXT_103}")
    # by hand, for one layer of 8 heads of 64: Wq, Wk, Wv, Wr, Wo; u, w; a norm; then either the
    # persistent keys and values, or two matrices with biases and a norm
    layer = 5 * 512 * 512 + 2 * 512 + 2 * 512
    layer += 2 * 8 * 2048 * 64 if n_persistent else 2 * 512 * 2048 + 2048 + 512 + 2 * 512
    assert shown["params_non_embedding"] == 16 * layer + 2 * 512
    assert shown["params_non_embedding"] / 1e6 == pytest.approx(54.6, abs=0.06)


def test_pruning_at_the_papers_size_starts_from_a_dense_run():
    config = load_config(CONFIGS / "wikitext103_prune.yaml")
    dense = load_config(CONFIGS / "wikitext103_allattn.yaml")
    assert config.run.init_from == f"{dense.run.dir}/{dense.run.name}"
    assert config.run.name != dense.run.name
    assert any(stage.prune is not None for stage in config.stages)


def test_the_demo_has_the_three_stages():
    config = load_config(CONFIGS / "tiny.yaml")
    assert len(config.stages) == 3
    dense, prune, tune = config.stages
    assert dense.prune is None and tune.prune is None
    assert (prune.prune.method, prune.prune.keep, prune.prune.remove) == (
        "hard_concrete", 0.5, "end",
    )  # fmt: skip


def test_names_of_runs_differ():
    places = [(c.run.dir, c.run.name) for c in map(load_config, FILES)]
    assert len(set(places)) == len(places)
