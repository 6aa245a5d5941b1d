"""Every pruning method in a run: exact counts, honest reports, the right heads, the same anywhere.

Planted runs: a trained small model hides among heads that do nothing; each method must find it.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import oracles
import pytest
import torch
from runs import DENSE_END, HEADS, PRUNE_END, STEPS, Run
from safetensors.torch import load_file, save_file
from test_deepspeed import two_ranks
from test_resume import DROPOUT, assert_same_state

from allattn.config import CHOICES, ConfigError, ModelConfig, load_config
from allattn.data.checksum import sha256
from allattn.inference.load import load_pretrained
from allattn.model.transformer import TransformerLM
from allattn.pruning.gates import gates
from allattn.training.trainer import Trainer

METHODS = CHOICES["stage.prune.method"]
LEARNED = ("hard_concrete", "subset")
TRANSFORMER_XL = ["model.n_persistent=0", "model.d_ff=24"]


def yaml_of(values: dict) -> str:
    """A flow mapping that the command line's overrides take."""
    return json.dumps(values).replace('"', "")


def stages(*each: dict) -> str:
    return "stages=[" + ", ".join(yaml_of(stage) for stage in each) + "]"


def pruning(method: str, steps: int = 4, name: str = "prune", **values) -> dict:
    """A stage; gates fast enough to get somewhere within so few steps."""
    if method in LEARNED:
        values = {"gate_lr": 1.5, **values}
    return {"name": name, "steps": steps, "prune": {"method": method, **values}}


def some_slow(every: Iterable[str], *quick: str) -> list:
    """Parameters of which only some run in the default suite."""
    return [pytest.param(each, marks=[] if each in quick else [pytest.mark.slow]) for each in every]


def decided(run: Run) -> list[dict]:
    return [row for row in run.lines if row.get("event") in ("cut", "decision", "removal")]


# Exact counts


@pytest.mark.parametrize(
    ("scope", "remove"),
    [
        pytest.param("global", "end", id="global-end"),
        pytest.param("global", "never", id="global-never"),
        pytest.param("global", {"every": 2}, id="global-every"),
        pytest.param("layer", "end", id="layer-end", marks=pytest.mark.slow),
        pytest.param("layer", "never", id="layer-never", marks=pytest.mark.slow),
        pytest.param("layer", {"every": 2}, id="layer-every"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_exactly_k_are_left_and_the_loss_does_not_jump(make_config, train, method, scope, remove):
    values = {"keep": 0.4, "scope": scope, "remove": remove, "patience": 1}
    if method == "random":
        values["every"] = 2  # a gradual one among them
    steps = [{"name": "dense", "steps": 1}, pruning(method, **values), {"name": "tune", "steps": 1}]
    run = train(make_config(stages(*steps)))
    (decision,) = run.events("decision")
    assert sum(decision["heads"]) == 3  # 0.4 of 8
    if scope == "layer":
        assert decision["heads"] == [2, 1]
    meta, tensors = run.meta(6), run.tensors(6, "parameters")
    removals = run.events("removal")
    if remove == "never":
        assert not removals and list(map(len, meta["masks"])) == decision["heads"]
    else:
        assert meta["model"]["n_heads"] == removals[-1]["heads"] == decision["heads"]
        assert sum(removal["removed"] for removal in removals) == HEADS - 3
        assert [len(ids) for ids in meta["head_ids"]] == decision["heads"]
        if remove == {"every": 2} and method not in LEARNED:
            assert removals[0]["step"] == 3  # cut before the first step, gone at the first check
    for removal in removals:
        assert abs(removal["loss_before"] - removal["loss_after"]) < 1e-5
    lines = [row for row in run.lines if "loss" in row]
    assert all(math.isfinite(row["loss"]) for row in lines) and lines[-1]["heads_open"] == 3
    # what is reported is what is there
    assert lines[-1]["params"] == sum(t.numel() for t in tensors.values())
    assert lines[-1]["params"] == oracles.parameters(ModelConfig(**meta["model"]))
    for layer, n in enumerate(decision["heads"]):
        n = 4 if remove == "never" else n
        shape = (4 * n, 16) if n else None
        weight = tensors.get(f"layers.{layer}.attention.query.weight")
        assert (None if weight is None else tuple(weight.shape)) == shape
    assert load_pretrained(run.folder).config.heads == decision["heads"]


@pytest.mark.parametrize("method", METHODS)
def test_min_heads_and_transformer_xl(make_config, train, method):
    """With budgets in parameters, which a feed-forward block makes another number of heads."""
    values = {"keep_params": 0.65, "min_heads": 1, "remove": {"every": 2}, "patience": 1}
    config = make_config(stages(pruning(method, **values)), *TRANSFORMER_XL)
    run = train(config)
    whole = ModelConfig(**run.meta(4)["config"]["model"])
    head, ff = 5 * 16 * 4 + 2 * 4, 2 * (2 * 16 * 24 + 24 + 16)
    k = round((0.65 * (8 * head + ff) - ff) / head)
    assert whole.heads == [4, 4] and 2 < k < 5
    heads = run.meta(4)["model"]["n_heads"]
    assert sum(heads) == k and min(heads) >= 1
    # no other count of heads comes nearer to the share
    kept = sum(
        t.numel()
        for name, t in run.tensors(4, "parameters").items()
        if name.startswith("layers.") and "norm." not in name
    )
    assert abs(kept - 0.65 * (8 * head + ff)) <= head / 2


def test_scores_are_taken_again_after_each_cut(make_config, train):
    """Gradual: at the steps that are due, along the schedule; a head that went stays away."""
    every = {"every": 2, "schedule": "linear", "keep": 0.25, "remove": {"every": 2}}
    steps = [{"name": "dense", "steps": 2}, pruning("importance", 6, **every)]
    run = train(make_config(stages(*steps)))
    cuts = run.events("cut")
    assert [(cut["step"], sum(cut["heads"])) for cut in cuts] == [(4, 6), (6, 4), (8, 2)]
    ids = [removal["head_ids"] for removal in run.events("removal")]
    for before, after in itertools.pairwise(ids):
        assert all(set(b) <= set(a) for a, b in zip(before, after, strict=True))
    sizes = [row["params"] for row in run.lines if row.get("split") == "train"]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) >= 3


def test_a_schedule_longer_than_its_stage_still_ends_exactly(make_config, train):
    values = {"every": 2, "schedule": "linear", "keep": 0.25, "warmup_steps": 40}
    run = train(make_config(stages(pruning("magnitude", 6, **values))))
    assert sum(run.meta(6)["model"]["n_heads"]) == 2


def test_layers_of_unequal_size_end_exactly(make_config, train):
    """Quotas of 11 among [6, 6, 2] are [5, 5, 1], of 10 [4, 4, 2]."""
    values = {"every": 1, "schedule": "linear", "keep": 10 / 14, "scope": "layer"}
    options = ["model.n_layers=3", "model.n_heads=[6,6,2]", "model.d_head=4"]
    run = train(make_config(stages(pruning("magnitude", 4, **values)), *options))
    assert sum(run.meta(4)["model"]["n_heads"]) == 10


# Resuming

WAYS = {
    "hard_concrete": [
        "stages[1].prune.noise=sequence", "stages[1].prune.scope=layer",
        "stages[1].prune.remove={every: 2}", "stages[1].prune.patience=1",
        "stages[1].prune.gate_lr=1.5", "stages[1].prune.keep=null",
        "stages[1].prune.keep_params=0.25",
    ],
    "subset": [
        "stages[1].prune.method=subset", "stages[1].prune.noise=sequence",
        "stages[1].prune.remove={every: 2}", "stages[1].prune.patience=1",
        "stages[1].prune.gate_lr=1.5", "stages[1].prune.min_heads=1",
        "stages[1].prune.warmup_steps=4", "train.micro_batch_size=2",
    ],
    "importance": [
        "stages[1].prune.method=importance", "stages[1].prune.gate_lr=null",
        "stages[1].prune.every=2", "stages[1].prune.warmup_steps=0",
        "stages[1].prune.batches=3", "stages[1].prune.remove={every: 2}",
    ],
    "random": [
        "stages[1].prune.method=random", "stages[1].prune.gate_lr=null",
        "stages[1].prune.every=3", "stages[1].prune.warmup_steps=0",
        "stages[1].prune.scope=layer", "stages[1].prune.remove=never",
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", some_slow(WAYS, "subset", "importance"))
def test_stopping_at_every_step_changes_nothing(make_config, train, way):
    options = [*WAYS[way], *DROPOUT]
    whole = train(make_config(*options, name="whole"))
    assert_same_state(whole, train(make_config(*options, name="stopped"), *range(1, STEPS)))
    assert sum(whole.events("decision")[-1]["heads"]) == (2 if way == "hard_concrete" else 4)
    if way != "random":
        removals = whole.events("removal")
        assert len(removals) >= 2 and removals[0]["step"] < PRUNE_END  # cut inside the stage


# Removed = masked, as training goes on


@pytest.mark.parametrize(("noise", "scope"), [("step", "global"), ("sequence", "layer")])
def test_ten_steps_after_a_removal_inside_a_stage(make_config, train, noise, scope):
    """Against the same gates with those heads shut for good, from the same state, Adam warm."""
    values = {
        "keep": 0.25, "gate_lr": 0.1, "noise": noise, "scope": scope, "warmup_steps": 10,
        "remove": "end",
    }  # fmt: skip
    plan = stages({"name": "dense", "steps": 4}, pruning("hard_concrete", 18, **values))
    kept = [[0, 2], [1, 2, 3]]
    found = []
    for name in ("cut", "masked"):
        config = make_config(plan, name=name)
        train(config, 10, to_end=False)
        trainer = Trainer(config, resume=True)
        if name == "cut":
            assert trainer.live.remove(kept, trainer.updater.memories) == 3
        else:
            with torch.no_grad():
                for gate, heads in zip(gates(trainer.live.engine.module), kept, strict=True):
                    for head in set(range(4)) - set(heads):
                        gate.log_alpha[head] = -1e4
        trainer.train(20)
        log_alpha = trainer.live.log_alphas()
        if name == "masked":
            log_alpha = [a[heads] for a, heads in zip(log_alpha, kept, strict=True)]
        trainer.close()
        run = Run(Path(config.run.dir) / name)
        rows = [r for r in run.lines if r.get("split") == "train" and r["step"] > 10]
        found.append((rows, log_alpha, run.tensors(20, "parameters")))
    (a, gates_a, weights_a), (b, gates_b, weights_b) = found
    assert len(a) == len(b) == 10
    for x, y in zip(a, b, strict=True):
        for key in ("loss", "penalty", "expected_heads", "grad_norm"):
            assert x[key] == pytest.approx(y[key], abs=1e-4), (key, x["step"])
    for x, y in zip(gates_a, gates_b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-3)
    for layer, heads in enumerate(kept):
        columns = [4 * h + i for h in heads for i in range(4)]
        name = f"layers.{layer}.attention.output.weight"
        torch.testing.assert_close(weights_a[name], weights_b[name][:, columns], rtol=0, atol=1e-3)
    assert b[0]["loss"] != b[-1]["loss"]


@pytest.mark.parametrize("method", some_slow(METHODS, "hard_concrete"))
def test_ten_steps_after_a_removal_at_the_end(make_config, train, method):
    """Without output scaling: folded into `Wo`, a scale changes how Adam's steps act on it."""
    losses = []
    for remove in ("end", "never"):
        values = {"keep": 0.5, "remove": remove, "output_scaling": False}
        plan = stages({"name": "dense", "steps": 3}, pruning(method, **values), {"name": "tune",
                      "steps": 10})  # fmt: skip
        run = train(make_config(plan, name=remove))
        losses.append(run.losses())
    assert losses[0].keys() == losses[1].keys() and len(losses[0]) == 17 + 3
    for key, loss in losses[0].items():
        assert losses[1][key] == pytest.approx(loss, abs=1e-4), key


# Planted

Plant = Callable[..., Path]
H = 4
PLANTED = 200  # steps; less leaves live heads that are worth nothing


@pytest.fixture(scope="module")
def plant(tiny_yaml: Path, tmp_path_factory) -> Plant:
    """`plant([[0, 2, 3], [1]], noise=0.0)`: a model whose live heads were trained as a model of
    their own; the others' columns of `Wo` are zero, or as small as `noise`.
    """
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("planted")
    trained: dict[str, Run] = {}

    def small(heads: list[int]) -> Run:
        name = "x".join(map(str, heads))
        if name not in trained:
            config = load_config(
                tiny_yaml,
                [
                    f"run.dir={folder}",
                    f"run.name={name}",
                    stages({"name": "dense", "steps": PLANTED}),
                    f"model.n_heads={heads}",
                    f"model.d_head={H}",
                ],
            )
            trainer = Trainer(config)
            trainer.train()
            trainer.close()
            trained[name] = Run(folder / name)
        return trained[name]

    def build(live: list[list[int]], noise: float = 0.0) -> Path:
        source = small(list(map(len, live)))
        out = folder / f"planted_{len(list(folder.iterdir()))}"
        shutil.copytree(source.checkpoint(PLANTED), out)
        meta = source.meta(PLANTED)
        meta["model"]["n_heads"] = [4, 4]
        torch.manual_seed(5)
        wide = TransformerLM(ModelConfig(**meta["model"])).state_dict()
        found = load_file(out / "parameters.safetensors")
        for name, tensor in wide.items():
            if ".attention." not in name:
                if name in found:
                    tensor.copy_(found[name])
                continue
            heads = live[int(name.split(".")[1])]
            rows = [h * H + i for h in heads for i in range(H)]
            if name.endswith("output.weight"):
                tensor.normal_(std=noise) if noise else tensor.zero_()
                if heads:
                    tensor[:, rows] = found[name]
            elif heads:
                tensor[rows if name.endswith(".weight") else heads] = found[name]
        save_file(wide, out / "parameters.safetensors")
        meta["sha256"]["parameters.safetensors"] = sha256(out / "parameters.safetensors")
        (out / "meta.json").write_text(json.dumps(meta))
        return out

    return build


def left_by(make_config, train, start: Path, name: str, **values) -> list[list[int]]:
    """The heads that a method leaves; weights stand still, so what was planted stays so."""
    method = values.pop("method")
    steps = values.pop("steps", 60) if method in LEARNED else 2
    if method in LEARNED:
        own = {"gate_lr": 6 / steps, "warmup_steps": steps * 2 // 3, "output_scaling": False}
        values = own | values
    config = make_config(
        stages(pruning(method, steps, **values)), f"run.init_from={start}",
        "train.optimizer.lr=0", "train.log_every=20", name=name,
    )  # fmt: skip
    run = train(config)
    return run.events("removal")[-1]["head_ids"]


LIVE = [[0, 2, 3], [1, 3]]
FINDERS = {
    "hard concrete, target": {"method": "hard_concrete"},
    "hard concrete, noise by sequence": {"method": "hard_concrete", "noise": "sequence",
                                         "sampling": "straight_through", "steps": 150},
    "subset": {"method": "subset"},
    "subset, noise by sequence": {"method": "subset", "noise": "sequence"},
    "importance": {"method": "importance", "batches": 4},
    "importance, gradual": {"method": "importance", "batches": 4, "every": 1, "normalize": False},
    "magnitude": {"method": "magnitude"},
}  # fmt: skip


@pytest.mark.parametrize("finder", FINDERS)
def test_heads_that_do_nothing_go_first(make_config, train, plant, finder):
    values = {"keep": 5 / 8, **FINDERS[finder]}
    assert left_by(make_config, train, plant(LIVE), "run", **values) == LIVE


def test_a_penalty_closes_the_heads_that_do_nothing(make_config, train, plant):
    values = {"method": "hard_concrete", "penalty": 0.003}
    assert left_by(make_config, train, plant(LIVE), "run", **values) == LIVE


def test_random_does_not_know(make_config, train, plant):
    start = plant(LIVE)
    found = left_by(make_config, train, start, "run", method="random", keep=5 / 8)
    assert found != LIVE and sum(map(len, found)) == 5


@pytest.mark.parametrize(
    "finder", some_slow(FINDERS, "hard concrete, target", "subset", "importance", "magnitude")
)
@pytest.mark.parametrize(
    "last",
    [
        pytest.param([[], [2]], id="layer 1"),
        pytest.param([[1], []], id="layer 0", marks=pytest.mark.slow),
    ],
)
def test_the_one_head_that_matters_is_the_last(make_config, train, plant, finder, last):
    """The others add a little noise."""
    values = {"keep": 1 / 8, **FINDERS[finder]}
    assert left_by(make_config, train, plant(last, noise=1e-3), "run", **values) == last


# Warnings


def warned(run: Run, word: str) -> list[dict]:
    return [event for event in run.events("warning") if word in event["text"]]


STILL, COLLAPSE, FAR = "did not move", "about to close", "far from it"


def test_gates_that_do_not_move(make_config, train):
    for method in LEARNED:
        plan = stages(pruning(method, 4, keep=0.5, gate_lr=0.0))
        run = train(make_config(plan, "train.eval_every=1", name=method), 2)
        (event,) = warned(run, STILL)
        assert (event["step"], event["stage"]) == (4, "prune") and "gate_lr" in event["text"]
        assert not warned(run, COLLAPSE)


def test_gates_that_all_close_are_said_once_a_stage(make_config, train):
    values = {"penalty": 50, "gate_lr": 2.0, "remove": "end"}
    first = pruning("hard_concrete", 5, **values)
    run = train(make_config(stages(first), "train.eval_every=1"), 2, 3, 4)
    (event,) = warned(run, COLLAPSE)
    assert event["step"] < 5 and "penalty" in event["text"]
    assert not warned(run, STILL) and not warned(run, FAR)


def test_a_lagrangian_far_from_its_target(make_config, train):
    run = train(make_config("train.eval_every=1"))
    (event,) = warned(run, FAR)
    assert event["step"] == PRUNE_END and "4 are the target" in event["text"]
    assert not warned(run, COLLAPSE) and not warned(run, STILL)


def test_a_run_that_goes_well_is_not_warned_of(make_config, train):
    values = {"keep": 0.5, "gate_lr": 0.3, "lagrangian_lr": 1.0, "warmup_steps": 10}
    run = train(make_config(stages(pruning("hard_concrete", 60, **values)), "train.log_every=30"))
    assert run.events("warning") == []
    (decision,) = run.events("decision")
    last = [row for row in run.lines if row.get("split") == "train"][-1]
    assert last["expected_heads"] == pytest.approx(4, abs=0.5) and sum(decision["heads"]) == 4


# Ranks and micro-batches

EVERY_METHOD = [
    stages(
        {"name": "dense", "steps": 2},
        pruning("importance", 3, "a", keep=0.75, every=1, batches=2)
        | {"distill": {"weight": 0.3, "temperature": 2.0}},
        pruning("subset", 3, "b", keep=0.5, noise="sequence", gate_lr=0.3)
        | {"distill": {"weight": 0.3}},
        pruning("hard_concrete", 4, "c", keep=0.25, noise="sequence", gate_lr=0.3,
                remove={"every": 2}, patience=1),
        {"name": "tune", "steps": 1},
    ),
]  # fmt: skip
END = 13


def assert_same_decisions(run: Run, local: Run) -> None:
    """Masks, head_ids and reports; losses to 1e-5."""
    events = [decided(each) for each in (run, local)]
    assert len(events[0]) == len(events[1]) >= 8
    for a, b in zip(*events, strict=True):
        for key in a.keys() | b.keys():
            if key.startswith("loss"):
                assert a[key] == pytest.approx(b[key], abs=1e-5)
            else:
                assert a[key] == b[key], (key, a, b)
    losses = [each.losses() for each in (run, local)]
    assert losses[0].keys() == losses[1].keys()
    for key, loss in losses[0].items():
        assert losses[1][key] == pytest.approx(loss, abs=1e-5), key
    lines = [[r for r in each.lines if r.get("split") == "train"] for each in (run, local)]
    for a, b in zip(*lines, strict=True):
        for key in ("distill", "penalty", "expected_heads", "heads_open", "params", "sparsity"):
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-4), key
    metas = [each.meta(END) for each in (run, local)]
    assert metas[0]["head_ids"] == metas[1]["head_ids"]
    assert metas[0]["model"] == metas[1]["model"] and sum(metas[0]["model"]["n_heads"]) == 2


@pytest.fixture(scope="module")
def local(tiny_yaml: Path, tmp_path_factory) -> Run:
    """Every learned method and importance, one stage after the other, in one process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("local")
    trainer = Trainer(load_config(tiny_yaml, [f"run.dir={folder}", *EVERY_METHOD]))
    trainer.train()
    return Run(folder / "run")


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_micro_batches_decide_alike(make_config, train, local, size):
    run = train(make_config(*EVERY_METHOD, f"train.micro_batch_size={size}"))
    assert_same_decisions(run, local)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zero", [2, 0, 1, 3])
def test_two_ranks_decide_alike(tiny_yaml, tmp_path, local, zero):
    done = two_ranks(
        tiny_yaml, f"run.dir={tmp_path}", *EVERY_METHOD, "train.micro_batch_size=1",
        f"deepspeed.zero_optimization.stage={zero}",
    )  # fmt: skip
    assert [each.returncode for each in done] == [0, 0], [each.stdout[-1500:] for each in done]
    assert_same_decisions(Run(tmp_path / "run"), local)


# Configs that are refused

PRUNE = "stages[1].prune"
REFUSED = [
    ("method=importanse", "method", "importance"),
    ("method=movement", "method", "hard_concrete"),
    ("keep_params=0.5", "", "keep_params"),
    ("penalty=0.1", "", "penalty"),
    ("keep=null", "", "keep"),
    ("keep=1.5", "keep", "0 to 1"),
    ("scope=layers", "scope", "layer"),
    ("noise=lane", "noise", "sequence"),
    ("sampling=hard", "sampling", "soft"),
    ("schedule=cubical", "schedule", "cubic"),
    ("min_heads=-1", "min_heads", "0 or more"),
    ("batches=4", "batches", "importance"),
    ("normalize=false", "normalize", "importance"),
    ("every=2", "every", "magnitude"),
    ("schedule=linear", "schedule", "importance"),
    ("temperature=[1.0,0.5]", "temperature", "subset"),
    ("temperature=[1.0]", "temperature", "two numbers"),
    ("temperature=[1.0,0.0]", "temperature", "above 0"),
    ("temperature=[.inf,1.0]", "temperature", "above 0"),
    ("temperature=[-1.0,1.0]", "temperature", "above 0"),
]


def refused(tiny_yaml: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(tiny_yaml, overrides)
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize(("override", "key", "hint"), REFUSED)
def test_a_prune_section_that_cannot_be_used(tiny_yaml, override, key, hint):
    message = refused(tiny_yaml, f"{PRUNE}.{override}")
    assert message.startswith(f"{PRUNE}.{key}: " if key else f"{PRUNE}: ") and hint in message


OF_OTHERS = {
    "sampling": "straight_through", "lagrangian_lr": 0.5, "noise": "sequence", "gate_lr": 0.3,
    "gate_init": 1.0, "temperature": [1.0, 0.5], "batches": 4, "normalize": False, "every": 2,
    "schedule": "linear",
}  # fmt: skip
TAKES = {
    "hard_concrete": {"sampling", "lagrangian_lr", "noise", "gate_lr", "gate_init"},
    "subset": {"noise", "gate_lr", "gate_init", "temperature"},
    "importance": {"batches", "normalize", "every", "schedule"},
    "magnitude": {"every", "schedule"},
    "random": {"every", "schedule"},
}


@pytest.mark.parametrize("method", METHODS)
def test_options_of_other_methods_are_refused_and_its_own_taken(tiny_yaml, method):
    for key, value in OF_OTHERS.items():
        prune = yaml_of({"method": method, "keep": 0.5, key: value})
        stage = f"stages=[{{name: p, steps: 2, prune: {prune}}}]"
        if key in TAKES[method]:
            assert getattr(load_config(tiny_yaml, [stage]).stages[0].prune, key) == value
        else:
            message = refused(tiny_yaml, stage)
            assert message.startswith(f"stages[0].prune.{key}: ") and method in message
    if method != "hard_concrete":
        prune = yaml_of({"method": method, "penalty": 0.5})
        message = refused(tiny_yaml, f"stages=[{{name: p, steps: 2, prune: {prune}}}]")
        assert message.startswith("stages[0].prune.penalty: ")


@pytest.mark.parametrize("value", ["-0.1", "1.1", ".nan"])
def test_a_distill_weight_that_is_no_share(tiny_yaml, value):
    message = refused(tiny_yaml, f"stages[1].distill.weight={value}")
    assert message.startswith("stages[1].distill.weight: ")


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan"])
def test_a_distill_temperature_that_is_none(tiny_yaml, value):
    message = refused(tiny_yaml, f"stages[1].distill.temperature={value}")
    assert message.startswith("stages[1].distill.temperature: ")


def test_a_misspelt_distill_key(tiny_yaml):
    assert "weight" in refused(tiny_yaml, "stages[1].distill.wieght=0.5")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ([f"{PRUNE}.keep=null", f"{PRUNE}.keep_params=0.1", *TRANSFORMER_XL], "keep_params"),
        ([f"{PRUNE}.keep=null", f"{PRUNE}.keep_flops=0.1", *TRANSFORMER_XL], "keep_flops"),
        ([f"{PRUNE}.keep=0.25", f"{PRUNE}.min_heads=2"], "min_heads"),
    ],
)
def test_a_budget_out_of_reach_is_refused_before_the_run_begins(
    fails, tiny_yaml, tmp_path, options, key
):
    message = fails(2, "train", tiny_yaml, f"run.dir={tmp_path}", *options)
    assert message.startswith(f"{PRUNE}.{key}: ")
    assert not (tmp_path / "run").exists()


def test_a_later_stage_cannot_keep_more_than_is_left(tiny_yaml):
    message = refused(tiny_yaml, "stages[2].prune.keep=0.75")
    assert message.startswith("stages[2].prune.keep: ")
    assert DENSE_END < PRUNE_END  # the stage before it prunes to a half
