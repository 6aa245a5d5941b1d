"""Configs: every mistake is one line that names the key; what is right comes through unchanged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from allattn.config import (
    CHOICES,
    Config,
    ConfigError,
    LrConfig,
    ModelConfig,
    OptimizerConfig,
    PrepareConfig,
    PruneConfig,
    RunConfig,
    StageConfig,
    TrainConfig,
    load_config,
    model_config_from_dict,
    save_config,
    shipped,
    to_yaml,
)
from allattn.config.shipped import config_text, configs

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def fails_with(tiny_yaml, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(tiny_yaml, overrides)
    message = str(error.value)
    assert message and "\n" not in message
    return message


def load_text(tmp_path, text: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


# Unknown keys and the nearest known one

MISSPELT = [
    ("rum.name=x", "rum", "run"),
    ("model.n_layer=2", "model.n_layer", "n_layers"),
    ("model.d_modle=2", "model.d_modle", "d_model"),
    ("model.atention=auto", "model.atention", "attention"),
    ("train.optimiser.lr=1", "train.optimiser", "optimizer"),
    ("train.optimizer.lrr=1", "train.optimizer.lrr", "lr"),
    ("train.optimizer.beta=[0.9, 0.9]", "train.optimizer.beta", "betas"),
    ("stages[1].step=2", "stages[1].step", "steps"),
    ("stages[1].lr.shedule=linear", "stages[1].lr.shedule", "schedule"),
    ("stages[1].prune.kep=0.2", "stages[1].prune.kep", "keep"),
    ("stages[0].prune.gate_lrs=0.2", "stages[0].prune.gate_lrs", "gate_lr"),
    ("data.dri=x", "data.dri", "dir"),
]


@pytest.mark.parametrize(("override", "key", "near"), MISSPELT)
def test_a_misspelt_override(tiny_yaml, override, key, near):
    message = fails_with(tiny_yaml, override)
    assert f"unknown key {key};" in message and message.endswith(f"did you mean {near}?")


@pytest.mark.parametrize(
    ("override", "key", "near"), [row for row in MISSPELT if "[0]" not in row[0]]
)
def test_a_misspelt_key_in_a_file(tmp_path, tiny_yaml, override, key, near):
    raw = yaml.safe_load(tiny_yaml.read_text())
    path, _, value = override.partition("=")
    node, parts = raw, path.replace("[", ".").replace("]", "").split(".")
    for part in parts[:-1]:
        node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
    node[parts[-1]] = yaml.safe_load(value)
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, yaml.safe_dump(raw))
    message = str(error.value)
    assert message == f"{tmp_path / 'c.yaml'}: unknown key {key}; did you mean {near}?"


def test_a_key_like_no_other_lists_the_known_ones(tiny_yaml):
    message = fails_with(tiny_yaml, "zzz=1")
    assert "unknown key zzz; known: " in message
    assert all(field.name in message for field in dataclasses.fields(Config))


def test_unknown_keys_inside_a_mapping_given_whole(tiny_yaml):
    assert "did you mean name?" in fails_with(tiny_yaml, "run={nme: x}")
    assert "stages[1].prune.kep" in fails_with(tiny_yaml, "stages[1].prune={kep: 0.2}")
    assert "name" in fails_with(tiny_yaml, "stages=[{nme: x}]")


# Wrong types

WRONG_TYPES = [
    "model.n_layers=two", "model.n_layers=2.5", "model.n_layers=null", "model.n_layers=[2]",
    "model.n_layers=true", "model.dropout=much", "model.dropout=true", "model.dropout=",
    "model.same_length=perhaps", "model.cutoffs=5", "model.cutoffs=[a]", "model.d_head=wide",
    "model.n_heads=a", "model.n_heads=null", "model.n_heads=true", "model.n_heads=4.0",
    "model.n_heads={a: 1}", "train.batch_size=1.5", "train.batch_size=.inf",
    "train.batch_size=.nan", "train.optimizer=adamw", "train.optimizer.betas=0.9",
    "train.optimizer.betas=[a,b]",
    "train.optimizer.lr=fast", "stages[1].steps=many", "stages[1].prune.keep=half",
    "stages[1].lr.warmup_steps=1.5", "stages[1].prune.output_scaling=maybe", "run.name=null",
    "data.dir=[1]", "stages[1].lr=5",
]  # fmt: skip


@pytest.mark.parametrize("override", WRONG_TYPES)
def test_a_wrong_type(tiny_yaml, override):
    assert override.partition("=")[0] in fails_with(tiny_yaml, override)


@pytest.mark.parametrize("override", ["model=5", "model=null", "stages=null", "stages=5",
                                      "stages={}", "deepspeed=5", "train=[1]"])  # fmt: skip
def test_a_section_that_is_none(tiny_yaml, override):
    assert override.partition("=")[0] in fails_with(tiny_yaml, override)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model: 5", "model"), ("model: {n_layers: two}", "model.n_layers"),
        ("train: [1]", "train"), ("stages: {name: a}", "stages"), ("stages: [5]", "stages[0]"),
        ("stages: [{steps: [1]}]", "stages[0].steps"),
        ("stages: [{name: a, lr: 5}]", "stages[0].lr"),
        ("deepspeed: 5", "deepspeed"), ("run: text", "run"),
    ],
)  # fmt: skip
def test_a_wrong_type_in_a_file(tmp_path, text, key):
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, text + "\n")
    message = str(error.value)
    path = f"{tmp_path / 'c.yaml'}: "
    assert message.startswith(path) and "\n" not in message
    assert key in message.removeprefix(path).replace(":", " ").split()


# Indices

INDICES = [
    ("stages[3].steps=1", "stages has 3 entries, the last is stages[2]"),
    ("stages[-1].steps=1", "[-1] is not a list index"),
    ("stages[a].steps=1", "[a] is not a list index"),
    ("stages[1.steps=1", "is not a list index"),
    ("stages.steps=1", "stages is a list; write stages[0].steps"),
    ("run[0].name=x", "run is not a list"),
    ("run.name[0]=x", "run.name is not a list"),
    ("model.n_layers.x=1", "model.n_layers has no keys inside"),
]


@pytest.mark.parametrize(("override", "words"), INDICES)
def test_a_wrong_index(tiny_yaml, override, words):
    assert words in fails_with(tiny_yaml, override)


def test_an_index_into_an_empty_list(tiny_yaml):
    message = fails_with(tiny_yaml, "model.cutoffs[0]=5")
    assert "model.cutoffs" in message and "[-1]" not in message  # no index would be right


@pytest.mark.parametrize("override", ["model.dropout", "=1", "", "model.dropout=[1", "a b"])
def test_what_is_no_override(tiny_yaml, override):
    assert override in fails_with(tiny_yaml, override)


# Values

VALUES = [
    ("model.n_layers=0", "model.n_layers"), ("model.d_model=0", "model.d_model"),
    ("model.seq_len=0", "model.seq_len"), ("model.mem_len=-1", "model.mem_len"),
    ("model.n_persistent=-1", "model.n_persistent"), ("model.d_ff=-1", "model.d_ff"),
    ("model.dropout=1.0", "model.dropout"), ("model.dropout=.nan", "model.dropout"),
    ("model.attn_dropout=-0.1", "model.attn_dropout"), ("model.clamp_len=0", "model.clamp_len"),
    ("model.vocab_size=1", "model.vocab_size"), ("model.div_value=0", "model.div_value"),
    ("model.d_head=0", "model.d_head"), ("model.n_heads=3", "model.n_heads"),
    ("model.n_heads=0", "model.n_heads"), ("model.n_heads=-1", "model.n_heads"),
    ("model.cutoffs=[5]", "model.cutoffs"), ("model.position=absolute", "model.position"),
    ("model.embedding=tide", "model.embedding"), ("model.attention=fast", "model.attention"),
    ("train.precision=fp8", "train.precision"), ("train.engine=horovod", "train.engine"),
    ("train.device=tpu", "train.device"), ("train.optimizer.name=sgd", "train.optimizer.name"),
    ("train.batch_size=0", "train.batch_size"),
    ("train.eval_batch_size=0", "train.eval_batch_size"),
    ("train.log_every=0", "train.log_every"), ("train.eval_every=0", "train.eval_every"),
    ("train.save_every=0", "train.save_every"), ("train.clip_norm=-1", "train.clip_norm"),
    ("train.clip_norm=.inf", "train.clip_norm"), ("train.clip_norm=.nan", "train.clip_norm"),
    ("train.micro_batch_size=3", "train.micro_batch_size"),
    ("train.micro_batch_size=0", "train.micro_batch_size"),
    ("train.optimizer.lr=-1", "train.optimizer.lr"),
    ("train.optimizer.weight_decay=-1", "train.optimizer.weight_decay"),
    ("train.optimizer.betas=[0.9]", "train.optimizer.betas"),
    ("train.optimizer.betas=[0.9, 1.0]", "train.optimizer.betas"),
    ("train.optimizer.eps=-1", "train.optimizer.eps"),
    ("run.name=a/b", "run.name"), ("run.name=..", "run.name"), ("run.name=''", "run.name"),
    ("run.seed=-1", "run.seed"), ("run.seed=99999999999999999999999", "run.seed"),
    ("stages=[]", "stages"), ("stages[1].name=dense", "stages"),
    ("stages[1].steps=0", "stages[1].steps"),
    ("stages[1].lr.schedule=step", "stages[1].lr.schedule"),
    ("stages[1].lr.warmup_steps=-1", "stages[1].lr.warmup_steps"),
    ("stages[1].lr.peak=-1", "stages[1].lr.peak"), ("stages[1].lr.final=-1", "stages[1].lr.final"),
    ("stages[1].prune.method=subsets", "stages[1].prune.method"),
    ("stages[1].prune.sampling=hard", "stages[1].prune.sampling"),
    ("stages[1].prune.keep=1.5", "stages[1].prune.keep"),
    ("stages[1].prune.keep=.nan", "stages[1].prune.keep"),
    ("stages[1].prune.keep=null", "stages[1].prune"),
    ("stages[1].prune.penalty=0.1", "stages[1].prune"),
    ("stages[1].prune.gate_lr=-1", "stages[1].prune.gate_lr"),
    ("stages[1].prune.gate_init=.nan", "stages[1].prune.gate_init"),
    ("stages[1].prune.patience=0", "stages[1].prune.patience"),
    ("stages[1].prune.warmup_steps=-1", "stages[1].prune.warmup_steps"),
    ("stages[1].prune.remove=now", "stages[1].prune.remove"),
    ("stages[1].prune.remove=3", "stages[1].prune.remove"),
    ("stages[1].prune.remove={every: 0}", "stages[1].prune.remove"),
    ("stages[1].prune.remove={every: 1.5}", "stages[1].prune.remove"),
    ("stages[1].prune.remove={every: true}", "stages[1].prune.remove"),
    ("stages[1].prune.remove={evry: 2}", "stages[1].prune.remove"),
    ("stages[1].prune.remove={every: 2, at: 3}", "stages[1].prune.remove"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "key"), VALUES)
def test_a_value_out_of_range(tiny_yaml, override, key):
    message = fails_with(tiny_yaml, override)
    assert message.startswith((key, f"override '{key}"))


@pytest.mark.parametrize("override", ["run.name=${nope}", "run.name=???", "model.n_layers=${x}"])
def test_omegaconfs_own_signs(tiny_yaml, override):
    assert override.partition("=")[0] in fails_with(tiny_yaml, override)


def test_choices_name_the_nearest(tiny_yaml):
    message = fails_with(tiny_yaml, "stages[1].lr.schedule=linar")
    assert message.endswith("did you mean linear?") and "cosine" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.n_heads=[4,4,4]", "model.d_head=4"], "3 numbers for model.n_layers 2"),
        (["model.n_heads=[]", "model.d_head=4"], "0 numbers for model.n_layers 2"),
        (["model.n_heads=[4,-1]", "model.d_head=4"], "whole numbers from 0 on"),
        (["model.n_heads=[4,2.5]", "model.d_head=4"], "whole numbers from 0 on"),
        (["model.n_heads=[4,true]", "model.d_head=4"], "whole numbers from 0 on"),
        (["model.n_heads=[4,4]"], "model.d_head: needed"),
        (["model.persistent_share=1.0"], "model.persistent_share: a share between 0 and 1"),
        (["model.persistent_share=0"], "model.persistent_share: a share between 0 and 1"),
        (["model.persistent_share=0.5", "model.n_persistent=0"], "model.persistent_share"),
        (["model.d_model=15", "model.n_heads=3"], "model.d_model: sinusoids need an even number"),
        (["model.embedding=adaptive", "model.cutoffs=[9,5]"], "model.cutoffs: rising"),
        (["model.embedding=adaptive", "model.cutoffs=[5,5]"], "model.cutoffs: rising"),
        (["model.embedding=adaptive", "model.cutoffs=[0]"], "model.cutoffs: rising"),
        (["model.embedding=adaptive", "model.cutoffs=[9]", "model.vocab_size=9"], "below the voc"),
        (["model.embedding=adaptive", "model.cutoffs=[5,9]", "model.div_value=5"], "div_value"),
    ],
)
def test_values_that_do_not_fit_together(tiny_yaml, overrides, words):
    assert words in fails_with(tiny_yaml, *overrides)


@pytest.mark.parametrize("key", ["train_batch_size", "gradient_accumulation_steps", "optimizer",
                                 "train_micro_batch_size_per_gpu", "gradient_clipping", "fp16",
                                 "bf16", "scheduler"])  # fmt: skip
def test_what_is_ours_in_deepspeed(tiny_yaml, key):
    message = fails_with(tiny_yaml, f"deepspeed.{key}=1")
    assert message.startswith(f"deepspeed.{key}: set ")


# Files


@pytest.mark.parametrize(
    "content", ["", "just text", "[1, 2]", "5", "model: {n_layers: 2", "a: b: c", "\t- x", "%"]
)
def test_a_file_that_is_no_config(tmp_path, content):
    with pytest.raises(ConfigError) as error:
        load_text(tmp_path, content)
    message = str(error.value)
    assert message.startswith(str(tmp_path / "c.yaml")) and "\n" not in message


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yaml", "binary", "."):
        with pytest.raises(ConfigError) as error:
            load_config(tmp_path / name)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_syntax_errors_name_the_line(tmp_path):
    with pytest.raises(ConfigError, match=r"c\.yaml:3: "):
        load_text(tmp_path, "run: {name: x}\nmodel:\n  n_layers: : 2\n")


# What is right


def test_overrides(tiny_yaml):
    config = load_config(
        tiny_yaml,
        [
            "stages[1].prune.keep=0.3", "stages[2].lr.schedule=linear", "train.optimizer.lr=5e-4",
            "train.optimizer.betas=[0.8, 0.95]", "model.n_heads=[3, 0]", "model.d_head=5",
            "model.clamp_len=7", "run.name=other", "model.same_length=true",
            "stages[1].prune.remove={every: 5}", "deepspeed.zero_optimization.stage=2",
            "train.optimizer.betas[1]=0.9", "stages[0].prune.keep=0.9",
        ],
    )  # fmt: skip
    assert config.stages[1].prune.keep == 0.3 and config.stages[1].prune.gate_lr == 0.2
    assert config.stages[2].lr.schedule == "linear"
    assert config.train.optimizer.lr == 5e-4 and config.train.optimizer.betas == [0.8, 0.9]
    assert config.model.n_heads == config.model.heads == [3, 0]
    assert (config.model.d_head, config.model.clamp_len) == (5, 7)
    assert config.run.name == "other" and config.model.same_length is True
    assert config.stages[1].prune.remove == {"every": 5}
    assert config.deepspeed == {"zero_optimization": {"stage": 2}}
    assert config.stages[0].prune == PruneConfig(keep=0.9)  # a section that was not there


def test_later_overrides_win_and_null_takes_away(tiny_yaml):
    config = load_config(tiny_yaml, ["run.seed=5", "run.seed=6", "stages[1].prune=null"])
    assert config.run.seed == 6 and config.stages[1].prune is None


def test_a_file_is_not_changed_by_loading(tiny_yaml):
    before = tiny_yaml.read_bytes()
    a, b = load_config(tiny_yaml, ["run.seed=9"]), load_config(tiny_yaml)
    assert (a.run.seed, b.run.seed) == (9, 3) and tiny_yaml.read_bytes() == before


def test_names_that_look_like_numbers_stay_text(tiny_yaml):
    for name in ("7", "007", "1e3", "1.50", "2024-01-01", "+1"):
        assert load_config(tiny_yaml, [f"run.name={name}"]).run.name == name


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.n_heads=[4,0]", "model.d_head=3", "stages[1].prune.remove={every: 3}"],
        ["model.position=learned", "run.init_from=a/b", "deepspeed.zero_optimization={stage: 3}"],
        ["model.embedding=adaptive", "model.cutoffs=[5,9]", "model.div_value=2"],
        ["run.name=007", "train.optimizer.lr=1e-7", "stages[1].prune=null", "model.clamp_len=3"],
        ["run.name='yes'", "data.dir='null'", "run.dir='# a: b'"],
    ],
)
def test_the_resolved_config_is_the_same_config(tiny_yaml, tmp_path, overrides):
    config = load_config(tiny_yaml, overrides)
    save_config(config, tmp_path / "resolved.yaml")
    again = load_config(tmp_path / "resolved.yaml")
    assert again == config and dataclasses.asdict(again) == dataclasses.asdict(config)
    assert to_yaml(again) == (tmp_path / "resolved.yaml").read_text(encoding="utf-8")


def test_every_key_has_its_place_in_the_resolved_config(tiny_yaml):
    raw = yaml.safe_load(to_yaml(load_config(tiny_yaml)))
    for section, node in (
        (Config, raw), (RunConfig, raw["run"]), (ModelConfig, raw["model"]),
        (TrainConfig, raw["train"]), (OptimizerConfig, raw["train"]["optimizer"]),
        (StageConfig, raw["stages"][0]), (LrConfig, raw["stages"][0]["lr"]),
        (PruneConfig, raw["stages"][1]["prune"]),
    ):  # fmt: skip
        assert node.keys() == {field.name for field in dataclasses.fields(section)}


def test_no_choice_is_a_bare_yaml_boolean():
    """DESIGN section 4: YAML 1.1 reads on, off, yes and no as booleans."""
    for choices in CHOICES.values():
        assert all(yaml.safe_load(choice) == choice for choice in choices)


def test_derived_values(tiny_yaml):
    config = load_config(tiny_yaml)
    assert (config.model.d_head, config.model.heads) == (4, [4, 4])
    learned = load_config(tiny_yaml, ["model.position=learned"])
    assert learned.model.clamp_len == 16 + 16 - 1
    families = {
        "all-attention": [], "transformer-xl": ["model.n_persistent=0", "model.d_ff=8"],
        "hybrid": ["model.d_ff=8"],
    }  # fmt: skip
    for family, overrides in families.items():
        assert load_config(tiny_yaml, overrides).model.family == family


def test_a_model_config_from_an_export():
    model = model_config_from_dict({"n_layers": 2, "n_heads": [1, 0], "d_head": 3}, "config.json")
    assert model.heads == [1, 0]
    for values in ({"n_layer": 2}, {"n_layers": "two"}, {"n_layers": 0}, {"n_heads": [1]}):
        with pytest.raises(ConfigError) as error:
            model_config_from_dict(values, "config.json")
        assert "\n" not in str(error.value)


# From the command line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.n_layer=2", "unknown key model.n_layer; did you mean n_layers?"),
        ("model.n_layers=two", "model.n_layers"),
        ("stages[9].steps=1", "stages has 3 entries"),
        ("model.n_heads=[1,2,3]", "model.n_heads: 3 numbers"),
        ("run.name=${nope}", "run.name"),
    ],
)
@pytest.mark.parametrize("command", ["show", "train"])
def test_exit_status_2(tiny_yaml, fails, command, override, words):
    assert words in fails(2, command, tiny_yaml, override)


def test_exit_status_2_without_a_config(tmp_path, fails):
    path = tmp_path / "missing.yaml"
    assert str(path) in fails(2, "show", path)
    assert str(path) in fails(2, "train", path)


# Shipped configs, found by name


def test_a_shipped_config_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny") == load_config(CONFIGS / "tiny.yaml")
    (tmp_path / "tiny").mkdir()  # a folder, of data say, is no config
    assert load_config("tiny").run.name == "demo"
    (tmp_path / "tiny").rmdir()
    (tmp_path / "tiny").write_text("run: {name: mine}\nstages: [{name: a}]\n")
    assert load_config("tiny").run.name == "mine"  # a file that exists wins


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tinny", "did you mean tiny?"),
        ("wikitext103_alattn", "did you mean wikitext103_allattn?"),
        ("zebra", "known: tiny, wikitext103_allattn"),
        ("configs/tiny.yaml", "a config that ships with allattn is named tiny"),
    ],
)
def test_a_name_that_no_config_has(tmp_path, monkeypatch, fails, name, words):
    monkeypatch.chdir(tmp_path)
    line = fails(2, "show", name)
    assert line.startswith(f"{name}: ") and words in line


def test_every_shipped_config_says_what_it_is():
    found = configs()
    assert found.keys() == {path.stem for path in CONFIGS.glob("*.yaml")}
    for name, about in found.items():
        assert config_text(name) == (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
        assert config_text(name).startswith(f"# {about}\n")
        assert len(about) > 40 and about[0].isupper() and about.endswith(".")
    with pytest.raises(ConfigError, match="did you mean tiny"):
        config_text("tinny")


def test_a_folder_beside_the_package_must_be_ours(tmp_path, monkeypatch):
    """In site-packages, a folder `configs` may belong to another package."""
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(shipped, "_PACKAGE", tmp_path / "allattn")
    assert shipped.shipped_file("configs") is None and shipped.configs() == {}
    (tmp_path / "allattn" / "configs").mkdir(parents=True)
    assert shipped.shipped_file("configs") == tmp_path / "allattn" / "configs"


# Overrides from Python


def test_overrides_as_a_dict(tiny_yaml):
    strings = [
        "run.seed=9", "stages[1].prune.keep=0.25", "model.n_heads=[2,4]", "model.d_head=5",
        "stages[2].lr.schedule=linear", "train.keep_last=null", "run.name=007",
    ]  # fmt: skip
    values = {
        "run.seed": 9, "stages[1].prune.keep": 0.25, "model.n_heads": (2, 4), "model.d_head": 5,
        "stages[2]": {"lr": {"schedule": "linear"}}, "train.keep_last": None, "run.name": "007",
    }  # fmt: skip
    assert load_config(tiny_yaml, values) == load_config(tiny_yaml, strings)
    assert load_config(tiny_yaml, {"data.dir": tiny_yaml.parent}).data.dir == str(tiny_yaml.parent)
    assert load_config(tiny_yaml, "run.seed=9").run.seed == 9  # one by itself


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.n_layer", 2, "unknown key model.n_layer; did you mean n_layers?"),
        ("model", {"n_layer": 2}, "unknown key model.n_layer; did you mean n_layers?"),
        ("stages[3].steps", 1, "stages has 3 entries, the last is stages[2]"),
        ("model.n_layers", "two", "override 'model.n_layers=two'"),
        ("model.n_layers", [2], "model.n_layers: one value is needed"),
        ("model.n_layers", object(), "model.n_layers"),
        ("model.dropout", 1.5, "model.dropout"),
        (5, 1, "override 5: a key such as"),
        ("", 1, "override ''"),
    ],
)
def test_a_wrong_override_as_a_dict(tiny_yaml, key, value, words):
    with pytest.raises(ConfigError) as error:
        load_config(tiny_yaml, {key: value})
    assert words in str(error.value) and "\n" not in str(error.value)


# data.prepare


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("{dataset: tinny}", "data.prepare.dataset: 'tinny' is not one of tiny, wikitext-2"),
        ("{tokenizer: char}", "data.prepare.tokenizer: 'char' is not one of word, sentencepiece"),
        ("{vocab_size: 100}", "data.prepare.vocab_size: only for"),
        ("{tokenizer: sentencepiece, vocab_size: 0}", "data.prepare.vocab_size: 1 or more"),
        ("{dataset: wikitext-2}", "data.prepare.source: wikitext-2 needs"),
        ("{source: a}", "data.prepare.source: the dataset tiny ships with allattn"),
        ("{vocab: 100}", "unknown key data.prepare.vocab; did you mean vocab_size?"),
        ("tiny", "data.prepare"),
    ],
)
def test_a_wrong_data_prepare(tiny_yaml, values, words):
    assert words in fails_with(tiny_yaml, f"data.prepare={values}")


def test_data_prepare(tiny_yaml):
    assert load_config(tiny_yaml).data.prepare is None
    config = load_config(tiny_yaml, ["data.prepare.tokenizer=byte"])
    assert config.data.prepare == PrepareConfig(tokenizer="byte")
    config = load_config(tiny_yaml, {"data.prepare": {"dataset": "wikitext-2", "source": "a.zip"}})
    assert config.data.prepare == PrepareConfig("wikitext-2", "a.zip")


# What is no config at all


@pytest.mark.parametrize("what", [None, 3, {}, ""])
def test_a_config_is_a_path_or_a_name(what):
    with pytest.raises(ConfigError, match="a config is a path or the name of a shipped one, not"):
        load_config(what)


def test_an_override_is_text(tmp_path):
    with pytest.raises(ConfigError, match="override 3: write 'key=value'"):
        load_config("tiny", [3])


def test_what_cannot_be_read_as_a_config(tmp_path):
    with pytest.raises(ConfigError, match="a folder; a config is a YAML file"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"run: \xff")
    with pytest.raises(ConfigError, match=r"bytes.yaml: not UTF-8 at byte 5; a config is a YAML"):
        load_config(tmp_path / "bytes.yaml")
