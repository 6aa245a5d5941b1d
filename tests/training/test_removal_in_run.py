"""Heads are cut while the run goes on: exactly so many, losing nothing else, Adam staying warm."""

from __future__ import annotations

import copy

import oracles
import pytest
import torch
from runs import DENSE_END, EDGE_GATES, HEADS, PRUNE_END, STEPS
from safetensors.torch import load_file

from allattn.cli import main
from allattn.config import model_config_from_dict
from allattn.inference.load import load_pretrained
from allattn.pruning.removal import cut_tensors
from allattn.training import trainer
from allattn.training.live import LiveModel
from allattn.training.state import Snapshot
from allattn.training.watch import Watch

EVERY = [
    "stages[1].prune.remove={every: 2}", "stages[1].prune.patience=1",
    "stages[1].prune.gate_lr=1.5", "stages[1].prune.keep=0.25",
]  # fmt: skip
TRANSFORMER_XL = ["model.n_persistent=0", "model.d_ff=24"]


@pytest.fixture
def removals(monkeypatch):
    """Every removal of the runs that follow: (state before, state after, kept, scales, d_head)."""
    seen = []
    remove = LiveModel.remove

    def watched(live: LiveModel, kept, memories):
        before, scales = copy.deepcopy(live.engine.snapshot()), live.scales
        result = remove(live, kept, memories)
        after = copy.deepcopy(live.engine.snapshot())
        seen.append((before, after, kept, scales or [1.0] * len(kept), live.shape.d_head))
        return result

    monkeypatch.setattr(LiveModel, "remove", watched)
    return seen


def test_a_removal_is_checked_on_a_piece_of_the_valid_split(make_config, train, monkeypatch):
    pieces = []
    loss = Watch.loss

    def watched(watch, split, most=None):
        found = loss(watch, split, most)
        if most is not None:
            pieces.append((most, found["loss"], loss(watch, split, 10 * most)["loss"]))
        return found

    monkeypatch.setattr(Watch, "loss", watched)
    monkeypatch.setattr(trainer, "REMOVAL_TOKENS", 100)
    run = train(make_config("stages[1].prune.keep=0.5"))
    (removal,) = run.events("removal")
    assert [piece[:2] for piece in pieces] == [
        (100, removal["loss_before"]),
        (100, removal["loss_after"]),
    ]
    assert all(found != more for _, found, more in pieces)  # it is a piece


@pytest.mark.parametrize("family", ["all-attention", "transformer-xl"])
@pytest.mark.parametrize("keep", [0.0, 0.25, 0.5, 1.0])
def test_exactly_k_heads_are_left_and_the_loss_does_not_jump(make_config, train, family, keep):
    options = TRANSFORMER_XL if family == "transformer-xl" else []
    run = train(make_config(f"stages[1].prune.keep={keep}", *options))
    k = round(keep * HEADS)
    (decision,) = run.events("decision")
    (removal,) = run.events("removal")
    assert decision["step"] == removal["step"] == PRUNE_END
    assert sum(decision["heads"]) == sum(removal["heads"]) == k
    assert 0 <= decision["undecided"] <= HEADS  # reported, not hidden
    assert removal["removed"] == HEADS - k
    assert [len(ids) for ids in removal["head_ids"]] == removal["heads"]
    assert all(ids == sorted(set(ids)) and set(ids) <= {0, 1, 2, 3} for ids in removal["head_ids"])
    assert abs(removal["loss_before"] - removal["loss_after"]) < 1e-5
    after = [row for row in run.lines if row.get("split") and row["step"] > PRUNE_END]
    assert after and all(row["heads_open"] == k for row in after)
    model = load_pretrained(run.checkpoint(STEPS))
    assert model.config.heads == removal["heads"]
    assert after[-1]["params"] == oracles.parameters(model.config)
    assert sum(p.numel() for p in model.parameters()) == oracles.parameters(model.config)


@pytest.mark.parametrize("options", [[], TRANSFORMER_XL, EVERY], ids=["end", "xl", "every"])
def test_weights_and_moments_are_cut_and_nothing_else(make_config, train, removals, options):
    train(make_config(*options))
    assert len(removals) >= (2 if options is EVERY else 1)
    for before, after, kept, scales, d_head in removals:
        assert before.adam_steps.items() >= after.adam_steps.items()
        assert after.adam_steps.keys() == after.parameters.keys()
        for key in ("exp_avg", "exp_avg_sq"):
            expected = cut_tensors(before.moments[key], kept, d_head)
            assert after.moments[key].keys() == expected.keys()
            for name, moment in after.moments[key].items():
                assert torch.equal(moment, expected[name]), name
            assert any(m.abs().sum() > 0 for m in after.moments[key].values())
        expected = cut_tensors(before.parameters, kept, d_head)
        assert after.parameters.keys() == expected.keys()
        for name, weight in after.parameters.items():
            if name.endswith("attention.output.weight"):
                scale = scales[int(name.split(".")[1])]
                assert torch.equal(weight, expected[name] * scale), name
            else:
                assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("options", [[], TRANSFORMER_XL], ids=["all-attention", "xl"])
def test_what_is_left_still_trains(make_config, train, removals, options):
    run = train(make_config(*options))
    at, later = run.tensors(PRUNE_END, "parameters"), run.tensors(STEPS, "parameters")
    assert at.keys() == later.keys()
    assert all(not torch.equal(at[name], later[name]) for name in at)
    (_, after, *_) = removals[-1]
    assert all(torch.equal(at[name], after.parameters[name]) for name in at)
    steps = run.meta(STEPS)["adam_steps"]
    assert set(steps.values()) == {STEPS}  # the bias correction goes on counting
    losses = run.losses()
    assert losses["valid", STEPS] < losses["valid", PRUNE_END] < losses["valid", DENSE_END]


def test_removal_along_the_way(make_config, train):
    run = train(make_config(*EVERY))
    events = run.events("removal")
    steps, left = [e["step"] for e in events], [sum(e["heads"]) for e in events]
    assert len(events) >= 2 and steps[-1] == PRUNE_END
    assert all((step - DENSE_END) % 2 == 0 for step in steps)
    assert left == sorted(left, reverse=True) and left[-1] == 2
    for event in events:
        assert abs(event["loss_before"] - event["loss_after"]) < 1e-5
    for a, b in zip(events, events[1:], strict=False):  # original numbers: what is gone stays gone
        for before, after in zip(a["head_ids"], b["head_ids"], strict=True):
            assert set(after) <= set(before)
    sizes = [row["params"] for row in run.lines if "params" in row]
    assert sizes[-1] < sizes[0]


def test_never_removing_masks_and_the_export_is_small(make_config, train):
    run = train(make_config("stages[1].prune.remove=never"))
    assert not run.events("removal")
    meta = run.meta(STEPS)
    assert meta["model"]["n_heads"] == 4 and sum(map(len, meta["masks"])) == 4
    trained = run.tensors(STEPS, "parameters")
    assert trained["layers.0.attention.query.weight"].shape == (16, 16)
    assert not any("log_alpha" in name for name in trained)
    model = load_pretrained(run.folder)
    assert model.config.heads == [len(heads) for heads in meta["masks"]]
    last = [row for row in run.lines if row.get("split") == "valid"][-1]
    assert last["heads_open"] == 4


def test_masked_and_removed_runs_train_alike(make_config, train):
    """`never` and `end` differ in what is stored; up to rounding, what is learnt is the same.

    Output scaling is off: folded into `Wo`, a scale changes how Adam's step acts on it.
    """
    common = ["stages[1].prune.output_scaling=false", "train.clip_norm=0"]
    common += ["train.optimizer.weight_decay=0"]
    a = train(make_config(*common, name="end"))
    b = train(make_config(*common, "stages[1].prune.remove=never", name="never"))
    assert a.losses().keys() == b.losses().keys()
    for key, loss in a.losses().items():
        assert b.losses()[key] == pytest.approx(loss, abs=1e-5), key


def test_a_penalty_that_closes_everything_is_survived(make_config, train):
    """`{every: N}` may cut the last head before the stage ends."""
    run = train(
        make_config(
            "stages[1].prune.keep=null", "stages[1].prune.penalty=50",
            "stages[1].prune.remove={every: 1}", "stages[1].prune.patience=1",
            "stages[1].prune.gate_lr=5", "stages[1].prune.warmup_steps=0",
        )
    )  # fmt: skip
    assert sum(run.meta(STEPS)["model"]["n_heads"]) == 0


def pruning_again(make_config, *options: str):
    return make_config("stages[2].prune.keep=0.25", "stages[2].prune.gate_lr=0.2", *options)


def test_two_pruning_stages(make_config, train):
    """The second target too is a share of the run's first heads."""
    run = train(pruning_again(make_config))
    assert [sum(e["heads"]) for e in run.events("decision")] == [4, 2]
    assert [e["step"] for e in run.events("removal")] == [PRUNE_END, STEPS]
    for event in run.events("removal"):
        assert abs(event["loss_before"] - event["loss_after"]) < 1e-5
    first, second = (e["head_ids"] for e in run.events("removal"))
    assert all(set(b) <= set(a) for a, b in zip(first, second, strict=True))


def test_pruning_again_when_no_head_is_left(make_config, train):
    run = train(pruning_again(make_config, "stages[1].prune.keep=0", "stages[2].prune.keep=0"))
    assert run.meta(STEPS)["model"]["n_heads"] == [0, 0]


@pytest.mark.parametrize(
    "options",
    [
        ["stages[1].prune.remove=never", "stages[2].prune.keep=0.25"],
        ["model.n_heads=[0,0]", "model.d_head=4", "model.d_ff=8"],
    ],
    ids=["pruning again after remove: never", "no head to begin with"],
)
def test_what_cannot_be_pruned_is_done_or_refused_but_no_crash(
    tiny_yaml, tmp_path, capsys, options
):
    status = main(["train", str(tiny_yaml), f"run.dir={tmp_path}", *options])
    assert status in (0, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == (status == 2)


def test_the_decision_is_evaluations_own(make_config, train):
    """A checkpoint from within the stage evaluates with the gates that evaluation would open."""
    run = train(make_config("train.save_every=1", "train.eval_every=1", *EDGE_GATES))
    inside = list(range(DENSE_END + 1, PRUNE_END))
    seen = set()
    for row in run.lines:
        if row.get("split") == "valid" and row["step"] in inside:
            model = load_pretrained(run.checkpoint(row["step"]))
            assert sum(model.config.heads) == row["heads_open"]
            inside.remove(row["step"])
            seen.add(row["heads_open"])
    assert not inside and any(0 < n < HEADS for n in seen)


def test_a_snapshot_is_all_there_is(make_config, train):
    """The file of a checkpoint holds what the engine held: parameters and both moments, no more."""
    run = train(make_config(), 6, to_end=False)
    parameters, optimizer = run.tensors(6, "parameters"), run.tensors(6, "optimizer")
    expected = {f"{key}.{name}" for key in Snapshot({}).moments for name in parameters}
    assert optimizer.keys() == expected
    config = model_config_from_dict(run.meta(6)["model"], "meta.json")
    n = sum(t.numel() for t in parameters.values())
    assert n == oracles.parameters(config) + HEADS  # the gates
    assert all(t.dtype == torch.float32 for t in [*parameters.values(), *optimizer.values()])


def test_init_from_starts_with_the_weights_and_heads_of_another_run(make_config, train):
    first = train(make_config(name="first"))
    heads = first.meta(STEPS)["model"]["n_heads"]
    config = make_config(
        f"run.init_from={first.folder}", f"model.n_heads={heads}", "model.d_head=4",
        "stages[0].steps=1", "train.optimizer.lr=0", "stages[0].lr.peak=0", name="second",
    )  # fmt: skip
    second = train(config, 1, to_end=False)
    start = load_file(first.checkpoint(STEPS) / "parameters.safetensors")
    now = second.tensors(1, "parameters")
    assert start.keys() == now.keys() and all(torch.equal(start[n], now[n]) for n in now)
    with pytest.raises(ValueError) as error:
        train(make_config(f"run.init_from={first.folder}", name="third"))
    assert "\n" not in str(error.value) and str(first.folder) in str(error.value)
