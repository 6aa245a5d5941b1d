"""What an evaluation sees: P(open) of the run's first heads, persistent shares, a text sample."""

from __future__ import annotations

import math

import pytest
import torch
from runs import DENSE_END, HEADS, PRUNE_END, STEPS, Run, same_tensors

from allattn.training.trainer import Trainer

LOG_ALPHA = [[2.0, -3.0, 0.0, -0.8], [0.5, -5.0, 4.0, 1.0]]


@pytest.fixture
def trainer(make_config):
    """`trainer("model.d_ff=4")`: a run that has not begun."""
    made = []

    def build(*overrides: str) -> Trainer:
        made.append(Trainer(make_config(*overrides, name=f"run{len(made)}")))
        return made[-1]

    yield build
    for each in made:
        each.monitor.close()


def set_gates(trainer: Trainer, values: list[list[float]]) -> None:
    """Begin the pruning stage with these logits."""
    trainer.live.begin_pruning(trainer.config.stages[1].prune)
    for layer, row in zip(trainer.live.engine.module.layers, values, strict=True):
        layer.attention.gate.log_alpha.data = torch.tensor(row)


def louizos(log_alpha: float) -> float:
    """1 / (1 + exp(beta log(-gamma / zeta) - log_alpha)), 1712.01312 equation 12, as printed."""
    return 1 / (1 + math.exp(1 / 3 * math.log(0.1 / 1.1) - log_alpha))


def test_p_open_by_hand(trainer):
    run = trainer()
    assert run.live.p_open() == [[1.0] * 4] * 2
    set_gates(run, LOG_ALPHA)
    expected = [[louizos(a) for a in row] for row in LOG_ALPHA]
    for got, row in zip(run.live.p_open(), expected, strict=True):
        assert got == pytest.approx(row, rel=1e-5)
    run.live.remove([[0, 2, 3], [0, 2]], [])
    expected[0][1] = expected[1][1] = expected[1][3] = None
    assert [[p is None for p in row] for row in run.live.p_open()] == [
        [p is None for p in row] for row in expected
    ]
    for got, row in zip(run.live.p_open(), expected, strict=True):
        assert [p for p in got if p is not None] == pytest.approx([p for p in row if p is not None])
    run.live.decide()  # the target is 4 of 8: the least open of the five is closed, not yet cut
    best = sorted((a for row in ([2.0, 0.0, -0.8], [0.5, 4.0]) for a in row), reverse=True)[:4]
    wanted = [
        [None if p is None else float(a in best) for a, p in zip(row, ps, strict=True)]
        for row, ps in zip(LOG_ALPHA, expected, strict=True)
    ]
    assert run.live.p_open() == wanted
    run.live.remove(run.live.masks, [])
    assert run.live.p_open() == [[p or None for p in row] for row in wanted]


def test_p_open_of_a_scored_method_is_its_mask(trainer):
    run = trainer("stages[1].prune={method: magnitude, gate_lr: null, warmup_steps: 0}")
    run.live.begin_pruning(run.config.stages[1].prune)
    run.live.pruner.cut([[4.0, 1.0, 3.0, 2.0], [9.0, 8.0, 0.5, 7.0]], 4)
    assert run.live.p_open() == [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]


def test_lines_have_p_open_of_the_runs_first_heads(finished_run):
    rows = [row for row in Run(finished_run).lines if "p_open" in row]
    assert [row["step"] for row in rows] == [DENSE_END, PRUNE_END, STEPS]
    assert rows[0]["p_open"] == [[1.0] * 4] * 2
    ids = Run(finished_run).events("removal")[-1]["head_ids"]
    for row in rows[1:]:
        assert row["p_open"] == [[1.0 if h in kept else None for h in range(4)] for kept in ids]
        assert row["keep"] == row["heads_open"] / HEADS
    assert rows[0]["params_non_embedding"] > rows[1]["params_non_embedding"]


def test_non_embedding_parameters_are_those_that_show_counts(trainer):
    from allattn import describe

    run = trainer()
    expected = describe(run.config)["params_non_embedding"]
    assert run.live.n_non_embedding() == expected
    set_gates(run, LOG_ALPHA)
    assert run.live.n_non_embedding() == expected


def zero_scores(trainer: Trainer) -> None:
    """Every score is 0: attention is even over all that a query sees."""
    for layer in trainer.live.engine.module.layers:
        for p in (layer.attention.query.weight, layer.attention.content_bias):
            p.data.zero_()
        layer.attention.position_bias.data.zero_()


@pytest.mark.parametrize("implementation", ["reference", "fused"])
def test_even_attention_gives_persistent_vectors_their_number(trainer, implementation):
    run = trainer(f"model.attention={implementation}")
    zero_scores(run)
    P, M, queries = 8, 16, 64
    even = sum(P / (P + M + i + 1) for i in range(queries)) / queries
    assert run.watch.persistent_share() == pytest.approx([even] * 2, rel=1e-5)
    assert all(a.attention.watch is None for a in run.live.engine.module.layers)


def test_only_open_heads_count(trainer):
    run = trainer()
    shares = {}
    for heads in ((0,), (1,), (0, 1), ()):
        log_alpha = [9.0 if h in heads else -9.0 for h in range(4)]
        if run.live.pruner is None:
            set_gates(run, [log_alpha, [9.0] * 4])
        run.live.engine.module.layers[0].attention.gate.log_alpha.data = torch.tensor(log_alpha)
        shares[heads] = run.watch.persistent_share()[0]
    assert abs(shares[0,] - shares[1,]) > 1e-4
    assert shares[0, 1] == pytest.approx((shares[0,] + shares[1,]) / 2, rel=1e-5)
    assert shares[()] is None


def test_a_layer_without_heads_and_a_model_without_vectors(trainer):
    run = trainer("model.n_heads=[4,0]", "model.d_head=4", "stages[1].prune.keep=0.5")
    share = run.watch.persistent_share()
    assert 0 < share[0] < 1 and share[1] is None
    run = trainer("model.n_persistent=0", "model.d_ff=8")
    assert run.watch.persistent_share() == []


def test_the_sample_is_the_same_each_time_and_draws_nothing_from_torch(trainer):
    run = trainer("model.dropout=0.1")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = run.watch.look()
    assert torch.equal(torch.get_rng_state(), before)
    again = run.watch.look()
    assert first.sample == again.sample and first.sample
    text = (run.corpus.dir.parent / "valid.txt").read_text(encoding="utf-8")
    assert text.split()[:3] == first.prompt.split()[:3]


def test_weights_that_are_no_numbers_stop_no_look(trainer):
    run = trainer()
    set_gates(run, LOG_ALPHA)
    for p in run.live.engine.module.parameters():
        p.data.fill_(math.nan)
    look = run.watch.look()
    assert all(math.isnan(p) for row in look.p_open for p in row)
    assert isinstance(look.sample, str)


def test_logging_every_step_or_never_leaves_the_same_weights(make_config, train):
    """Bit for bit, with dropout and random gates."""
    common = ["model.dropout=0.1", "train.save_every=7"]
    often = train(make_config(*common, "train.eval_every=1", name="often"))
    never = train(make_config(*common, "train.log_every=1000", name="never"))
    for step in (7, STEPS):
        for kind in ("parameters", "optimizer", "memory"):
            assert same_tensors(often.tensors(step, kind), never.tensors(step, kind)), (step, kind)
    ends = {(split, step) for split, step in never.losses()}
    assert ends == {("valid", DENSE_END), ("valid", PRUNE_END), ("valid", STEPS)}
    assert all(often.losses()[key] == loss for key, loss in never.losses().items())
