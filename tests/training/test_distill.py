"""Distillation in a run: a frozen dense teacher, its loss logged apart, resumed to the bit."""

from __future__ import annotations

import shutil

import oracles
import pytest
import torch
from runs import DENSE_END, PRUNE_END, STEPS, same_tensors
from safetensors.torch import load_file
from test_resume import DROPOUT, assert_same_state

from allattn.config import ConfigError, ModelConfig
from allattn.data.lanes import Corpus, Lanes
from allattn.model.transformer import Memory, TransformerLM
from allattn.training.engine import LocalEngine
from allattn.training.state import load_weights
from allattn.training.trainer import Trainer

DISTILL = [
    "stages[1].distill.weight=0.4", "stages[1].distill.temperature=2.0",
    "stages[2].distill.weight=0.7",
]  # fmt: skip


def rows(run) -> list[dict]:
    return [row for row in run.lines if row.get("split") == "train"]


# What is learnt from


def test_the_teacher_is_the_dense_model_and_stays_it(make_config, train):
    run = train(make_config(*DISTILL, "train.save_every=1"))
    dense = run.tensors(DENSE_END, "parameters")
    kept = load_file(run.folder / "teacher" / "model.safetensors")
    assert same_tensors(kept, dense)
    assert not same_tensors(kept, run.tensors(DENSE_END + 1, "parameters"))
    teacher = load_weights(run.folder / "teacher")
    assert teacher.config.heads == [4, 4]  # the student has lost half of them
    assert sum(run.meta(STEPS)["model"]["n_heads"]) == 4


def test_its_weights_are_frozen_and_no_optimisers(make_config, train):
    config = make_config(*DISTILL)
    train(config, 6, to_end=False)
    trainer = Trainer(config, resume=True)
    before = oracles.weights_of(trainer.updater.teacher.model)
    ours = {id(p) for group in trainer.live.engine.optimizer.param_groups for p in group["params"]}
    parameters = list(trainer.updater.teacher.model.parameters())
    assert not any(p.requires_grad or id(p) in ours for p in parameters)
    trainer.train()
    trainer.close()
    after = oracles.weights_of(trainer.updater.teacher.model)
    assert all((before[name] == after[name]).all() for name in before)
    assert all(p.grad is None for p in parameters)
    assert not trainer.updater.teacher.model.training  # no dropout in what it says


@torch.no_grad()
def log_probs(model: TransformerLM, ids: torch.Tensor, memory: Memory | None):
    out = model.eval()(ids, memory=memory)
    return out.log_probs.double(), out.memory


def test_the_term_is_the_divergence_of_the_two_models_with_a_memory_each(make_config, train):
    t, weight = 2.0, 0.4
    config = make_config(
        "stages=[{name: dense, steps: 3}, {name: learn, steps: 3, "
        f"distill: {{weight: {weight}, temperature: {t}}}}}]",
        "train.save_every=1",
    )
    run = train(config)
    lanes = Lanes(Corpus(config.data.dir).tokens("train"), 4, 16)

    def model(step: int) -> TransformerLM:
        made = TransformerLM(ModelConfig(**run.meta(step)["model"]))
        made.load_state_dict(run.tensors(step, "parameters"))
        return made

    teacher, teacher_memory = model(3), None
    for step in (3, 4, 5):
        ids, targets = lanes.batch(step, 0, 4)
        hidden = run.tensors(step, "memory")
        memory = Memory([hidden["layer_00"], hidden["layer_01"]], run.meta(step)["memory_length"])
        q, _ = log_probs(model(step), ids, memory)
        p, teacher_memory = log_probs(teacher, ids, teacher_memory)
        row = rows(run)[step]
        nll = -q.gather(2, targets[..., None]).mean()
        assert row["loss"] == pytest.approx(float(nll), rel=1e-5)
        p, q = ((x / t).exp() / (x / t).exp().sum(-1, keepdim=True) for x in (p, q))
        kl = t**2 * (p * (p / q).log()).sum(-1).mean()
        assert row["distill"] == pytest.approx(float(kl), rel=1e-4, abs=1e-6)
        assert row["distill"] > 1e-4


# The loss


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["stages[1].prune.scope=layer", "stages[1].prune.noise=sequence"],
        ["stages[1].prune.keep=null", "stages[1].prune.penalty=0.3", "train.micro_batch_size=2"],
        ["stages[1].prune.method=magnitude", "stages[1].prune.gate_lr=null"],
        ["stages[1].prune.method=subset", "train.micro_batch_size=1"],
    ],
    ids=["lagrangian", "by layer", "penalty", "magnitude", "subset"],
)
def test_the_parts_logged_add_up_to_what_is_minimised(make_config, train, monkeypatch, options):
    seen: list[float] = []
    backward = LocalEngine.backward

    def watched(engine, loss, last, scale):
        seen.append(float(loss.detach()))
        backward(engine, loss, last, scale)

    monkeypatch.setattr(LocalEngine, "backward", watched)
    config = make_config(*DISTILL, *options, "train.clip_norm=0")
    run = train(config)
    n = 4 // (config.train.micro_batch_size or 4)
    totals = [sum(seen[i : i + n]) / n for i in range(0, len(seen), n)]
    assert len(totals) == STEPS
    for row, total in zip(rows(run), totals, strict=True):
        distils = row["step"] > DENSE_END
        assert ("distill" in row) == ("distill_weight" in row) == distils
        parts = row["loss"]
        if distils:
            assert row["distill_weight"] == (0.4 if row["step"] <= PRUNE_END else 0.7)
            assert row["cross_entropy_weight"] == pytest.approx(1 - row["distill_weight"])
            parts *= row["cross_entropy_weight"]
            parts += row["distill_weight"] * row["distill"]
            assert row["distill"] >= 0
        parts += row.get("penalty", 0.0)
        assert total == pytest.approx(parts, rel=1e-5), row["step"]
        learns = row["stage"] == "prune" and "method" not in str(options)
        assert ("penalty" in row) == learns


def test_without_weight_it_changes_nothing(make_config, train):
    plain = train(make_config(*DROPOUT, name="plain"))
    options = ["stages[1].distill.weight=0", "stages[2].distill.weight=0"]
    run = train(make_config(*DROPOUT, *options, name="weightless"))
    assert run.losses() == plain.losses()
    for kind in ("parameters", "optimizer"):
        assert same_tensors(run.tensors(STEPS, kind), plain.tensors(STEPS, kind))
    assert all(row["distill"] > 0 for row in rows(run)[DENSE_END:])
    assert not (plain.folder / "teacher").exists()


def test_with_all_the_weight_it_follows_the_teacher(make_config, train):
    """Pruned to half, then trained on the teacher's word alone, or on the text alone."""
    dense = train(make_config("stages=[{name: dense, steps: 50}]", name="dense"))
    ends = []
    for weight in (1.0, 0.0):
        stage = (
            "{name: tune, steps: 25, lr: {peak: 1.0e-3, schedule: linear}, "
            f"prune: {{method: magnitude, keep: 0.25}}, distill: {{weight: {weight}}}}}"
        )
        options = [f"run.init_from={dense.folder}", f"stages=[{stage}]"]
        found = [row["distill"] for row in rows(train(make_config(*options, name=f"w{weight}")))]
        ends.append(sum(found[-5:]) / 5)
        assert weight == 0 or ends[0] < 0.5 * found[0]
    assert ends[0] < 0.7 * ends[1]


# Resuming

WAYS = {
    "hard concrete": [*DISTILL, "train.micro_batch_size=2"],
    "early removal": [
        *DISTILL, "stages[1].prune.remove={every: 2}", "stages[1].prune.patience=1",
        "stages[1].prune.gate_lr=1.5", "stages[1].prune.keep=0.25",
    ],
    "adaptive": [
        *DISTILL, "stages[1].prune.method=importance", "stages[1].prune.gate_lr=null",
        "stages[1].prune.every=2", "stages[1].prune.batches=2", "stages[1].prune.warmup_steps=4",
        "model.embedding=adaptive", "model.cutoffs=[40,100]", "model.div_value=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_stopping_at_every_step_changes_nothing(make_config, train, way):
    options = [*WAYS[way], *DROPOUT]
    whole = train(make_config(*options, name="whole"))
    assert_same_state(whole, train(make_config(*options, name="stopped"), *range(1, STEPS)))
    assert "teacher_layer_00" in whole.tensors(STEPS, "memory")


@pytest.mark.parametrize("stop", [5, 7])
def test_a_stage_without_it_between_two_with_it(make_config, train, stop):
    """Whatever the teacher then remembers, it does not depend on where the run was stopped."""
    stages = (
        "stages=[{name: dense, steps: 3}, {name: a, steps: 2, distill: {weight: 0.5}}, "
        "{name: b, steps: 3}, {name: c, steps: 3, distill: {weight: 0.5}}]"
    )
    whole = train(make_config(stages, name="whole"))
    stopped = train(make_config(stages, name="stopped"), stop)
    assert whole.losses() == stopped.losses()
    assert [row.get("distill") for row in rows(whole)] == [r.get("distill") for r in rows(stopped)]
    for kind in ("parameters", "memory"):
        assert same_tensors(whole.tensors(11, kind), stopped.tensors(11, kind))


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_teacher_is_named(make_config, train, contents, damage):
    config = make_config(*DISTILL)
    run = train(config, 6, to_end=False)
    folder = run.folder / "teacher"
    if damage == "missing":
        shutil.rmtree(folder)
    else:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-20])
    before = contents(run.folder)
    with pytest.raises(ValueError) as error:
        Trainer(config, resume=True)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    assert contents(run.folder) == before


def test_distillation_added_after_the_dense_stages_is_refused(make_config, train):
    """No teacher was kept then: found at the start, not when the stage begins."""
    train(make_config(), 5, to_end=False)  # within the pruning stage
    late = make_config("stages[2].distill={}")
    with pytest.raises(ConfigError, match=r"stages\[2\]\.distill: .* kept no dense model"):
        Trainer(late, resume=True)


def test_distillation_added_before_pruning_begins(make_config, train):
    run = train(make_config(), 3, to_end=False)
    Trainer(make_config("stages[2].distill={}"), resume=True).train()
    assert (run.folder / "teacher" / "model.safetensors").exists()
    assert [row["step"] for row in rows(run) if "distill_weight" in row] == [11, 12, 13, 14]


def test_a_run_without_a_dense_stage_learns_from_what_it_starts_with(make_config, train):
    first = train(make_config("stages=[{name: dense, steps: 3}]", name="first"))
    config = make_config(
        f"run.init_from={first.folder}",
        "stages=[{name: p, steps: 2, prune: {method: random, keep: 0.5}, distill: {}}]",
        name="second",
    )
    run = train(config)
    kept = load_file(run.folder / "teacher" / "model.safetensors")
    assert same_tensors(kept, first.tensors(3, "parameters"))
    assert [row["distill_weight"] for row in rows(run)] == [0.5, 0.5]
