"""One step: clipping, rates, micro-batches, and what stops before it does harm."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from runs import DENSE_END, STEPS
from torch import Tensor

from allattn.config import Config, ConfigError, ModelConfig
from allattn.data.lanes import Corpus, Lanes
from allattn.inference.load import load_pretrained
from allattn.model.adaptive import TiedVocabulary
from allattn.model.transformer import TransformerLM
from allattn.training.engine import LocalEngine, _adam_state, build_engine, connect
from allattn.training.optim import group_of, parameter_groups
from allattn.training.ranks import World
from allattn.training.state import MOMENTS, Snapshot
from allattn.training.trainer import Trainer
from allattn.training.update import NonFiniteLoss

LOCAL = World(0, 1, torch.device("cpu"), deepspeed=False)
RATES = {"matrices": 1e-2, "plain": 1e-3, "gates": 1e-1}


@pytest.fixture
def engine(tiny_model):
    def build(clip_norm: float = 0.25, n_micro: int = 1, snapshot=None, **values) -> LocalEngine:
        config = Config()
        config.train.clip_norm = clip_norm
        return build_engine(tiny_model(**values).float(), config, LOCAL, n_micro, snapshot)

    return build


def backward(engine: LocalEngine, ids: Tensor, scale: float = 1.0) -> None:
    parts = ids.chunk(engine.n_micro)
    for i, part in enumerate(parts):
        loss = engine(part[:, :-1], part[:, 1:]).nll.mean() * scale
        engine.backward(loss, last=i == len(parts) - 1)


def test_the_gradient_is_clipped_and_its_norm_is_that_before(engine):
    ids = torch.randint(11, (2, 5))
    plain, clipped = engine(clip_norm=0), engine(clip_norm=0.25)
    for each in (plain, clipped):
        backward(each, ids)
    gradients = [p.grad.clone() for p in plain.module.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm > 0.5
    got = {}
    for name, each in (("plain", plain), ("clipped", clipped)):
        assert each.step(RATES) == pytest.approx(norm, rel=1e-5)
        # the first moment after one step is (1 - beta1) times the gradient that was used
        moments = each.snapshot().moments["exp_avg"].values()
        got[name] = math.sqrt(sum(float((m / 0.1).double().square().sum()) for m in moments))
    assert got == pytest.approx({"plain": norm, "clipped": 0.25}, rel=1e-3)


def test_gradients_are_cleared(engine):
    ids = torch.randint(11, (2, 5))
    each = engine()
    backward(each, ids)
    first = each.step(RATES)
    assert all(p.grad is None for p in each.module.parameters())
    backward(each, ids)
    assert each.step(RATES) < 2 * first


def test_rates_go_to_the_groups(engine):
    """A first AdamW step moves every weight by its rate: m / sqrt(v) is 1."""
    each = engine(clip_norm=0)
    before = each.snapshot().parameters
    before = {name: p.clone() for name, p in before.items()}
    backward(each, torch.randint(11, (8, 5)), scale=100)
    each.optimizer.param_groups[0]["weight_decay"] = 0.0
    each.step(RATES)
    for name, p in each.module.named_parameters():
        moved = (p.detach() - before[name]).abs()
        assert float(moved.max()) == pytest.approx(RATES[group_of(name)], rel=0.05), name


def test_groups(tiny_model):
    model = tiny_model(d_ff=4, embedding="adaptive", cutoffs=[4], div_value=2)
    groups = {g["kind"]: g for g in parameter_groups(model, Config().train.optimizer)}
    names = {p: n for n, p in model.named_parameters()}
    assert sum(len(g["params"]) for g in groups.values()) == len(names)
    assert groups["plain"]["weight_decay"] == 0 and groups["matrices"]["weight_decay"] == 0.01
    plain = {names[p] for p in groups["plain"]["params"]}
    assert all(p.dim() > 1 for p in groups["matrices"]["params"] if "cluster" not in names[p])
    assert {n for n in names.values() if "norm" in n or "bias" in n} == plain
    assert group_of("layers.0.attention.gate.log_alpha") == "gates"


def test_a_snapshot_brings_adam_back(engine):
    ids = [torch.randint(11, (2, 5)) for _ in range(3)]
    one = engine()
    for part in ids[:2]:
        backward(one, part)
        one.step(RATES)
    saved = copy.deepcopy(one.snapshot())
    assert set(saved.adam_steps.values()) == {2}
    other = engine(seed=1, snapshot=saved)
    with torch.no_grad():
        for name, p in other.module.named_parameters():
            p.copy_(saved.parameters[name])
    for each in (one, other):
        backward(each, ids[2])
        each.step(RATES)
    a, b = one.snapshot(), other.snapshot()
    assert all(torch.equal(a.parameters[n], b.parameters[n]) for n in a.parameters)
    assert a.adam_steps == b.adam_steps == dict.fromkeys(a.parameters, 3)


def test_adam_counts_steps_where_its_moments_are():
    """A fused AdamW reads the count in its kernel: on a GPU it must not lie in the CPU's memory."""
    moments = {key: {"w": torch.zeros(2)} for key in MOMENTS}
    state = _adam_state(Snapshot({}, moments, {"w": 3}), "w", torch.device("meta"))
    assert {value.device.type for value in state.values()} == {"meta"}
    assert _adam_state(Snapshot({}, moments, {"w": 3}), "w", LOCAL.device)["step"] == 3


def test_moments_that_a_snapshot_lacks_start_at_zero(engine):
    saved = Snapshot({})
    assert engine(snapshot=saved).snapshot().adam_steps == {}


def test_who_we_are(make_config, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = connect(make_config())
    assert (world.rank, world.size, world.deepspeed) == (0, 1, False)
    lanes = torch.randn(3, 2)
    assert world.gather_lanes(lanes) is lanes and world.sum(lanes) is lanes
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="^train.engine: "):
        connect(make_config("train.engine=local"))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="^train.device: "):
        connect(make_config("train.device=cuda", "train.engine=local"))


def test_a_local_run_never_imports_deepspeed(make_config, train):
    train(make_config(), 1, to_end=False)
    assert "deepspeed" not in sys.modules  # nor does any other test in this process


# Micro-batches, precision, non-finite losses: whole runs


def assert_losses_close(a, b, atol: float) -> None:
    assert a.losses().keys() == b.losses().keys() and len(a.losses()) == STEPS + 3
    for key, loss in a.losses().items():
        assert b.losses()[key] == pytest.approx(loss, abs=atol), key


@pytest.mark.parametrize("micro", [1, 2])
def test_micro_batches_change_nothing(make_config, train, micro):
    whole = train(make_config(name="whole"))
    parts = train(make_config(f"train.micro_batch_size={micro}", name="parts"))
    assert_losses_close(whole, parts, 1e-5)
    norms = [[r["grad_norm"] for r in run.lines if "grad_norm" in r] for run in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert whole.events("removal")[0]["head_ids"] == parts.events("removal")[0]["head_ids"]


def test_micro_batches_may_change_on_resume(make_config, train):
    whole = train(make_config(name="whole"))
    train(make_config("train.micro_batch_size=2", name="parts"), 6, to_end=False)
    assert_losses_close(whole, train(make_config(name="parts"), start=False), 1e-5)


def test_lanes_that_do_not_divide(make_config):
    with pytest.raises(ConfigError, match="^train.micro_batch_size: "):
        make_config("train.micro_batch_size=3")


def test_lanes_that_do_not_divide_among_ranks(make_config, monkeypatch):
    from allattn.training import trainer

    world = World(0, 3, torch.device("cpu"), deepspeed=True)
    monkeypatch.setattr(trainer, "connect", lambda config: world)
    with pytest.raises(ConfigError, match="^train.batch_size: "):
        Trainer(make_config())


def test_bfloat16_trains_and_keeps_float32_weights_and_gates(make_config, train):
    run = train(make_config("train.precision=bf16", name="bf16"), 6)
    losses = run.losses()
    assert losses["valid", STEPS] < losses["valid", DENSE_END]
    reference = train(make_config(name="fp32")).losses()
    assert any(losses[key] != reference[key] for key in reference)
    assert all(losses[key] == pytest.approx(reference[key], abs=0.05) for key in reference)
    tensors = run.tensors(6, "parameters")
    assert any(name.endswith("gate.log_alpha") for name in tensors)
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert all(t.dtype == torch.float32 for t in run.tensors(6, "optimizer").values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("n_micro", [1, 2])
def test_a_non_finite_loss_stops_before_the_step(make_config, monkeypatch, train, value, n_micro):
    config = make_config(f"train.micro_batch_size={4 // n_micro}")
    train(config, 6, to_end=False)
    trainer = Trainer(config, resume=True)
    before = copy.deepcopy(trainer.live.engine.snapshot())
    nll = TiedVocabulary.nll
    calls = []

    def broken(self, h, targets):
        calls.append(1)
        return nll(self, h, targets) * (value if len(calls) == n_micro else 1.0)

    monkeypatch.setattr(TiedVocabulary, "nll", broken)
    with pytest.raises(
        NonFiniteLoss, match=r"^step 7 \(segment 7 of .*: the loss is (nan|inf)"
    ) as error:
        trainer.train()
    assert "\n" not in str(error.value)
    after = trainer.live.engine.snapshot()
    assert trainer.step == 6 and before.adam_steps == after.adam_steps
    for name, weight in before.parameters.items():
        assert torch.equal(weight, after.parameters[name])
    for key, named in before.moments.items():
        assert all(torch.equal(m, after.moments[key][name]) for name, m in named.items())


def test_non_finite_loss_from_the_command_line(tiny_yaml, tmp_path, fails):
    line = fails(
        1, "train", tiny_yaml, f"run.dir={tmp_path}", "train.optimizer.lr=1e30", "train.clip_norm=0"
    )
    assert line.startswith("step ") and "train.optimizer.lr" in line


def test_a_seed_decides_everything(make_config, train):
    a = train(make_config("model.dropout=0.2", name="a"))
    b = train(make_config("model.dropout=0.2", name="b"))
    c = train(make_config("model.dropout=0.2", "run.seed=4", name="c"))
    assert a.timeless() == b.timeless()
    assert a.losses() != c.losses()


def test_the_models_weights_do_not_come_from_the_callers_generator(make_config, tmp_path):
    torch.manual_seed(1)
    one = Trainer(make_config(name="one"))
    torch.manual_seed(2)
    two = Trainer(make_config(name="two"))
    a, b = (dict(t.live.engine.module.named_parameters()) for t in (one, two))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert isinstance(one.live.shape, ModelConfig)
    assert isinstance(one.live.engine.module, TransformerLM)


def test_memory_goes_on_within_a_pass_and_is_emptied_between_passes(make_config, train):
    """With a rate of zero the weights stand still: both passes lose the same, and the first pass
    loses what one long look at each lane gives.
    """
    lanes = Lanes(Corpus(make_config().data.dir).tokens("train"), 4, 16)
    n = lanes.n_segments
    stages = f"stages=[{{name: still, steps: {2 * n}, lr: {{peak: 0.0}}}}]"
    run = train(make_config(stages, "train.save_every=1", "train.optimizer.weight_decay=0"), 2 * n)
    losses = [run.losses()["train", step + 1] for step in range(2 * n)]
    assert losses[:n] == losses[n:]
    model = load_pretrained(run.checkpoint(1))
    batches = [lanes.batch(step, 0, 4) for step in range(n)]
    memory, alone = None, []
    for step, (inputs, targets) in enumerate(batches):
        with torch.no_grad():
            output = model(inputs, targets, memory)
            alone.append(float(model(inputs, targets).nll.mean()))
        memory = output.memory
        assert losses[step] == pytest.approx(float(output.nll.mean()), abs=1e-5)
    assert losses[0] == pytest.approx(alone[0], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(losses[1:n], alone[1:], strict=True)) > 1e-3
