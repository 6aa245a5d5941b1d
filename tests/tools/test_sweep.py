"""tools/experiments/sweep.py: every combination once, going on after a stop, one bad run alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from allattn.config import ConfigError
from allattn.training.state import read_json

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "experiments" / "sweep.py"
spec = importlib.util.spec_from_file_location("sweep", SCRIPT)
sweep = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sweep)


def test_the_plan():
    runs = sweep.plan(["stages[1].prune.keep=0.5,0.25", "run.seed=1,2"])
    assert runs == {
        f"keep_{keep}-seed_{seed}": [f"stages[1].prune.keep={keep}", f"run.seed={seed}"]
        for keep in ("0.5", "0.25")
        for seed in ("1", "2")
    }
    assert sweep.split_values("[1,0.1],{every: 2},3") == ["[1,0.1]", "{every: 2}", "3"]
    for wrong in ("run.seed", "=1", "run.seed="):
        with pytest.raises(ConfigError, match="--set"):
            sweep.plan([wrong])
    with pytest.raises(ConfigError, match="both be named"):
        sweep.plan(["run.seed=1,1"])


@pytest.mark.slow
def test_runs_go_on_and_are_compared(tiny_yaml, tmp_path, capsys):
    out = tmp_path / "runs"
    argv = [str(tiny_yaml), "--set", "run.seed=1,2", "--out", str(out), "stages[1].steps=2"]
    short = [str(tiny_yaml), "--set", "run.seed=1", "--out", str(out), "stages[1].steps=2"]
    assert sweep.main(short) == 0
    assert sweep.main(short) == 0
    assert "seed_1: finished before" in capsys.readouterr().err
    assert sweep.main([*argv, "data.dir=/nowhere"]) == 1  # seed 2 fails, seed 1 is compared
    captured = capsys.readouterr()
    assert "seed_2: failed, status" in captured.err and "seed_1" in captured.out
    assert "nowhere" in (out / "seed_2.log").read_text()
    assert sweep.main(argv) == 0
    rows = read_json(out / "compare" / "compare.json")
    assert [row["run"] for row in rows] == ["seed_1", "seed_2"]
    assert (out / "compare" / "compare.png").stat().st_size > 1000


def test_a_wrong_key_starts_nothing(tiny_yaml, tmp_path, capsys):
    assert sweep.main([str(tiny_yaml), "--set", "run.sed=1", "--out", str(tmp_path / "r")]) == 2
    assert "did you mean seed?" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
