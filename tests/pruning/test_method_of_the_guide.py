"""The method that CONTRIBUTING.md shows works once it is in the two lists that the page names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import MappingProxyType

import pytest
from runs import STEPS, same_tensors

from allattn.config.stages import PruneConfig
from allattn.pruning.methods import METHODS

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
HARD = ["stages[1].prune.gate_lr=null", "stages[1].prune.method=lowest"]


@pytest.fixture
def lowest(monkeypatch) -> None:
    """As if the file were there: the class in METHODS, its name among the choices."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    monkeypatch.setitem(METHODS, "lowest", names["Lowest"])
    (field,) = [f for f in dataclasses.fields(PruneConfig) if f.name == "method"]
    key = field.metadata["key"]
    more = dataclasses.replace(key, allowed=(*key.allowed, "lowest"))
    monkeypatch.setattr(field, "metadata", MappingProxyType({"key": more}))


@pytest.mark.parametrize(("scope", "min_heads", "heads"), [("global", 0, [4, 0]),
                                                          ("global", 1, [3, 1]),
                                                          ("layer", 0, [2, 2])])  # fmt: skip
def test_it_prunes_a_run(lowest, make_config, train, scope, min_heads, heads):
    overrides = [*HARD, f"stages[1].prune.scope={scope}", f"stages[1].prune.min_heads={min_heads}"]
    run = train(make_config(*overrides))
    assert run.meta(STEPS)["model"]["n_heads"] == heads
    (removal,) = run.events("removal")
    assert removal["loss_after"] == pytest.approx(removal["loss_before"], rel=1e-5)
    (decision,) = run.events("decision")
    assert decision["undecided"] == 0 and decision["cut_open"] == sum([4, 4]) - sum(heads)


def test_it_resumes(lowest, make_config, train):
    whole = train(make_config(*HARD, name="whole"))
    parts = train(make_config(*HARD, name="parts"), 6, 9, 11)
    assert same_tensors(whole.tensors(STEPS, "parameters"), parts.tensors(STEPS, "parameters"))
