"""Every config key is documented, the reference is current, and each stated range is enforced."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from pathlib import Path

import pytest

from allattn.config import CHOICES, ConfigError, load_config
from allattn.config.keys import Range, documentation

ROOT = Path(__file__).resolve().parents[1]


def load_tool():
    spec = importlib.util.spec_from_file_location(
        "config_reference", ROOT / "tools" / "config_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
KEYS = {
    f"{path}.{field.name}".lstrip("."): field
    for path, section in tool.sections()
    for field in tool.keys(section)
}
RANGES = {name: field for name, field in KEYS.items()
          if isinstance(getattr(documentation(field), "allowed", None), Range)}  # fmt: skip
NUMBERS = re.compile(r"int|float")
every_key = pytest.mark.parametrize("name", KEYS)

# What a value at the edge of its range needs beside it, in the config of the tests
WITH = {
    "data.prepare.vocab_size": ["data.prepare={tokenizer: sentencepiece}"],
    "model.d_model": ["model.n_heads=1", "model.position=learned"],
    "model.persistent_share": ["model.n_persistent=8"],
    "model.div_value": ["model.embedding=adaptive"],
    "stages[i].prune.keep_params": ["stages[1].prune.keep=null"],
    "stages[i].prune.keep_flops": ["stages[1].prune.keep=null"],
    "stages[i].prune.penalty": ["stages[1].prune.keep=null"],
    "stages[i].prune.temperature": ["stages[1].prune.method=subset"],
    "stages[i].prune.batches": [
        "stages[1].prune.method=importance", "stages[1].prune.gate_lr=null",
    ],
    "stages[i].prune.every": [
        "stages[1].prune.method=magnitude", "stages[1].prune.gate_lr=null",
    ],
}  # fmt: skip


def load(tiny_yaml, name: str, value: object):
    number = repr(value).replace("inf", ".inf").replace("nan", ".nan")
    overrides = [*WITH.get(name, []), f"{name.replace('[i]', '[1]')}={number}"]
    return load_config(tiny_yaml, overrides)


def edges(field) -> tuple[list, list]:
    """Values just inside a range, and values just outside of it."""
    allowed = documentation(field).allowed
    whole = "int" in field.type
    inside, outside = [], [] if whole else [math.inf, -math.inf, math.nan]
    for bound, excluded, away in (
        (allowed.low, allowed.above, -math.inf),
        (allowed.high, allowed.below, math.inf),
    ):
        if bound is None:
            continue
        if whole:
            beyond, within = bound + (1 if away > 0 else -1), bound
        else:
            beyond, within = math.nextafter(bound, away), math.nextafter(bound, -away)
        inside.append(within if excluded else bound)
        outside.append(bound if excluded else beyond)
    if allowed.count is not None:
        inside = [[value] * allowed.count for value in inside]
        outside = [[value] * allowed.count for value in outside] + [inside[0][1:]]
        outside.append([*inside[0], inside[0][0]])
    return inside, outside


def test_there_are_keys():
    assert len(KEYS) > 60 and len(RANGES) > 35
    assert {"model.n_layers", "train.optimizer.lr", "stages[i].prune.keep"} <= KEYS.keys()


@every_key
def test_every_key_is_documented(name):
    field = KEYS[name]
    found = documentation(field)
    assert found is not None, f"{name}: write it as key(default, meaning, ...)"
    assert found.meaning.endswith(".") and found.meaning[0] in "`" + found.meaning[0].upper()
    assert found.allowed or field.type == "bool"
    assert bool(found.unit) == bool(NUMBERS.search(field.type)) or field.type == "Any"
    assert found.type or field.type != "Any"
    assert "|" not in found.meaning and "\n" not in found.meaning


@every_key
def test_every_number_states_a_range(name):
    """Only a list of any length, which `cutoffs` is, has a rule of its own."""
    if NUMBERS.search(KEYS[name].type):
        assert name in RANGES or name == "model.cutoffs"


def test_the_reference_in_the_guide_is_current(capsys):
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.filled(page) == page, "run: python tools/config_reference.py --write"
    assert tool.main(["--check"]) == 0
    for name in KEYS:
        assert f"| `{name.rpartition('.')[2]}` |" in page


def test_a_page_without_its_markers_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    assert tool.main(["--write"]) == 1
    tool.PAGE.write_text("nothing\n")
    assert tool.main(["--write"]) == 1
    assert tool.PAGE.read_text() == "nothing\n"
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(line.startswith("config_reference: error") for line in errors)


def test_an_old_reference_is_replaced(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "PAGE", tmp_path / "page.md")
    tool.PAGE.write_text(f"before\n{tool.BEGIN}\nyesterday\n{tool.END}\nafter\n")
    assert tool.main(["--check"]) == 1
    assert tool.main(["--write"]) == 0
    text = tool.PAGE.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "yesterday" not in text and tool.reference() in text
    assert tool.main(["--check"]) == 0


@pytest.mark.parametrize("name", RANGES)
def test_the_edges_of_a_range(tiny_yaml, name):
    inside, outside = edges(RANGES[name])
    for value in inside:
        load(tiny_yaml, name, value)
    path = name.replace("[i]", "[1]")
    assert outside or RANGES[name].type == "float"
    for value in outside:
        with pytest.raises(ConfigError) as error:
            load(tiny_yaml, name, value)
        message = str(error.value)
        assert message.startswith(f"{path}: ") and "\n" not in message, message
        assert " needed, not " in message


def test_choices_are_those_of_the_schema():
    for name, field in KEYS.items():
        allowed = documentation(field).allowed
        if isinstance(allowed, tuple):
            assert CHOICES[name.replace("stages[i]", "stage")] == allowed
            assert field.default in allowed


@pytest.mark.parametrize("name", [n for n, f in KEYS.items()
                                  if isinstance(documentation(f).allowed, tuple)])  # fmt: skip
def test_a_word_that_is_no_choice(tiny_yaml, name):
    path = name.replace("[i]", "[1]")
    with pytest.raises(ConfigError) as error:
        load_config(tiny_yaml, [f"{path}=zzz"])
    assert str(error.value).startswith(f"{path}: 'zzz' is not one of ")


def test_defaults_are_allowed():
    for name, field in RANGES.items():
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        assert default is None or documentation(field).allowed.holds(default), name


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (Range(), "a number"),
        (Range(low=1), "1 or more"),
        (Range(low=0, above=True), "a number above 0"),
        (Range(high=5), "a number up to 5"),
        (Range(low=0, high=1), "a number from 0 to 1"),
        (Range(low=0, high=1, below=True), "a number from 0 to just below 1"),
        (Range(low=0, high=1, above=True, below=True), "a number between 0 and 1, both excluded"),
        (Range(low=0, above=True, count=2), "two numbers above 0"),
    ],
)
def test_a_range_in_words(allowed, words):
    assert allowed.words() == words
