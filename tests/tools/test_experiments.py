"""tools/experiments/run.py: every claim is well formed; a shared first stage changes nothing."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from killed import HANG
from runs import DENSE_END, STEPS
from safetensors.torch import load_file

from allattn.config import save_config
from allattn.data.lock import alone
from allattn.training.state import read_json, write_json

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "experiments"
CLAIMS = sorted(path.parent.name for path in FOLDER.glob("*/experiment.yaml"))


@pytest.fixture(scope="module")
def run():
    """The module, as a script has it."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("run")
    sys.path.remove(str(FOLDER))


@pytest.fixture
def experiment(tiny_yaml, tmp_path):
    """A folder with a first stage and a run that goes on from it."""

    def write(**second):
        folder = tmp_path / "experiment"
        folder.mkdir(exist_ok=True)
        first = {"name": "trunk", "config": str(tiny_yaml), "stages": 1}
        second = {"name": "run", "config": str(tiny_yaml), "after": "trunk", "group": "g", **second}
        value = {"claim": "It works", "report": "size", "seeds": [3], "runs": [first, second]}
        (folder / "experiment.yaml").write_text(yaml.safe_dump(value), encoding="utf-8")
        return folder

    return write


def test_the_claims_are_there():
    assert sorted({name[:6] for name in CLAIMS}) == [f"claim{i}" for i in range(1, 7)]


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("smoke", [False, True])
def test_every_run_is_valid_and_has_the_same_budget(run, claim, smoke, tmp_path):
    made = run.load_experiment(FOLDER / claim, tmp_path, [], None, smoke)
    assert made.report in run.REPORTS
    tokens = {
        r.steps * r.config.train.batch_size * r.config.model.seq_len
        for r in made.runs
        if "stages" not in r.entry
    }
    assert len(tokens) == 1 or smoke
    names = {r.name for r in made.runs}
    for r in made.runs:
        assert r.after is None or r.after in names
        structure = r.config.run.init_structure
        assert structure is None or Path(structure).name in names


def test_claims_share_runs_of_one_config(run, tmp_path):
    found = {}
    for claim in CLAIMS:
        for r in run.load_experiment(FOLDER / claim, tmp_path, [], None, False).runs:
            assert found.setdefault(r.name, r.config) == r.config, r.name


@pytest.mark.slow
def test_going_on_after_a_shared_stage_is_the_run_itself(
    run, experiment, tiny_yaml, tiny_corpus, finished_run, tmp_path, capsys
):
    folder, runs = experiment(), tmp_path / "runs"
    argv = [str(folder), "--data", str(tiny_corpus), "--runs", str(runs), "train.save_every=1"]
    assert run.main([*argv, "--jobs", "2"]) == 0  # the second waits for its first stage
    own, wanted = (
        load_file(p / "final" / "model.safetensors") for p in (runs / "run-s3", finished_run)
    )
    assert own.keys() == wanted.keys() and all(own[n].equal(wanted[n]) for n in own)
    assert not (folder / "results.json").exists()  # other settings than the file's
    results = runs / "results_experiment"
    found = read_json(results / "results.json")
    assert found["missing"] == [] and not found["smoke"]
    trunk, row = found["runs"]
    assert row["circumstances"]["torch"] and row["circumstances"]["threads"]
    assert (trunk["steps"], row["steps"], row["after"]) == (DENSE_END, STEPS, "trunk-s3")
    assert row["seed"] == 3 and row["valid_curve"][-1][0] == STEPS and sum(row["heads"]) == 4
    assert 0 < row["train_seconds"] and 0 < row["wall_seconds"]
    assert row["valid_curve"][0] == trunk["valid_curve"][-1]  # of the stage that they share
    assert f"| run, seed 3 | {STEPS} | 4 |" in (results / "table.md").read_text()
    assert (results / "plot.png").stat().st_size > 1000

    capsys.readouterr()
    assert run.main(argv) == 0
    assert capsys.readouterr().err.count("finished before") == 2
    experiment(set=["stages[1].prune.keep=0.25"])  # not the run of this name any more
    assert run.main(argv) == 2
    assert "another config (stages.1)" in capsys.readouterr().err

    for name, report in run.REPORTS.items():
        if name != "removable":  # prunes: `slow`
            made = run.load_experiment(experiment(), runs, argv[5:], None, False)
            assert "run, seed 3" in report(made, found), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"setting": []}, "unknown ['setting']"),
        ({"after": "nothing"}, "no run nothing-s3 before it"),
        ({"name": "trunk"}, "two runs are named trunk-s3"),
        ({"set": ["stages[1].prune.kep=1"]}, "did you mean keep?"),
        ({"set": [1]}, "set: a list of key=value"),
        ({"set": ["run.init_structure={RUNS}/other-s3"]}, "no run other-s3 before it"),
        ({"set": ["run.init_from={RUNS}/run-s3"]}, "no run run-s3 before it"),
        ({"config": 3}, "config: 3 is not a str"),
        ({"label": None}, "label: None is not a str"),
        ({"name": ""}, "name: empty"),
        ({"stages": True}, "stages: True is not a int"),
        ({"share": 50}, "share: above 0, at most 1"),
        ({"share": "half"}, "'half' is not a int or float"),
        ({"seeds": ["one"]}, "seeds: 'one' is not a number"),
    ],
)
def test_a_wrong_entry_starts_nothing(run, experiment, tmp_path, capsys, change, words):
    assert run.main([str(experiment(**change)), "--runs", str(tmp_path / "runs")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["claim7"], "no such experiment; there are claim1_figure, "),
        (["claim2_techniques", "--data", "nowhere"], "nowhere"),
        (["claim2_techniques", "--list", "--data", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_call_starts_nothing(run, tmp_path, capsys, options, words):
    assert run.main([*options, "--runs", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs claim, report and runs"),
        ("claim: [", "not YAML"),
        ("{claim: a, report: size, tset: true, runs: []}", "needs claim, report and runs"),
        ("{claim: a, report: size, runs: [text]}", "runs: a list"),
        ("{claim: a, report: size, runs: [{name: a}]}", "needs name and config"),
        ("{claim: a, report: size, runs: [{config: a}]}", "run number 1: needs name and config"),
        ("{claim: a, report: size, seeds: 1, runs: []}", "seeds: 1 is not a list"),
        ("{claim: a, report: size, runs: []}", "runs: empty"),
        ("{claim: a, report: size, test: no way, runs: [{}]}", "test: 'no way' is not a bool"),
    ],
)
def test_a_broken_experiment_is_one_line(run, tiny_corpus, tmp_path, capsys, text, words):
    (tmp_path / "experiment.yaml").write_text(text, encoding="utf-8")
    assert run.main([str(tmp_path), "--data", str(tiny_corpus)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_an_unknown_report_is_refused(run, experiment, tiny_corpus, capsys):
    path = experiment() / "experiment.yaml"
    path.write_text(path.read_text().replace("report: size", "report: sise"))
    assert run.main([str(path.parent), "--data", str(tiny_corpus)]) == 2
    assert "report: one of size" in capsys.readouterr().err


def test_what_is_not_there_is_said(run, experiment, tiny_corpus, tmp_path, capsys):
    """Nothing trained; a run of another config, or of another corpus; a run that lost a file."""
    folder, runs = experiment(), tmp_path / "runs"
    argv = [str(folder), "--data", str(tiny_corpus), "--runs", str(runs)]

    def said(*options):
        assert run.main([*argv, *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "nothing is trained yet" in said("--report")
    made = run.load_experiment(folder, runs, [f"data.dir={tiny_corpus}"], None, False)
    (trunk, _), runner = made.runs, importlib.import_module("runner")
    (made.path(trunk) / "final").mkdir(parents=True)
    (made.path(trunk) / "final" / "config.json").write_text("{")
    assert "trunk-s3: lost or damaged" in said("--report")
    save_config(trunk.config, runs / "trunk-s3.yaml")
    assert "another config (train.batch_size)" in said("--report", "train.batch_size=2")
    write_json(runs / "trunk-s3.json", {"corpus": runner.corpus_id(trunk.config)})
    assert "lost or damaged" in said("--report")
    write_json(runs / "trunk-s3.json", {"corpus": {"train": "another"}})
    assert "another config (the corpus in data.dir)" in said("--list")


def test_one_command_at_a_time(run, experiment, tiny_corpus, tmp_path, capsys):
    with alone(tmp_path / "runs"):
        argv = [str(experiment()), "--data", str(tiny_corpus), "--runs", str(tmp_path / "runs")]
        assert run.main(argv) == 2
    assert "another process is writing there" in capsys.readouterr().err


def test_a_structure_is_waited_for(run, tmp_path):
    made = run.load_experiment(FOLDER / "claim4_scratch", tmp_path, [], None, False)
    needs = {r.name: r.needs for r in made.runs}
    assert needs["aa-scratch-0.5-s1"] == {"aa-0.5-s1"} and needs["aa-0.5-s1"] == {"aa-trunk-s1"}


def test_results_are_not_lost(run, tmp_path):
    def rows(*names, corpus=None):
        circumstances = {} if corpus is None else {"corpus": {"train": corpus}}
        return {"runs": [{"name": n, "seed": 1, "circumstances": circumstances} for n in names]}

    path = tmp_path / "results.json"
    assert not run.loses(path, rows())
    write_json(path, rows("a"))
    assert not run.loses(path, rows("a", "b", corpus="x")) and run.loses(path, rows("b"))
    write_json(path, rows("a", corpus="x"))
    assert not run.loses(path, rows("a", corpus="x")) and run.loses(path, rows("a", corpus="y"))


def test_a_size_stands_with_the_mean_and_number_of_its_seeds(run):
    row = {"name": "a", "share": 0.5, "group": "g", "params_non_embedding": 2_000_000}
    rows = [row | {"seed": 1, "test_ppl": 10.0}, row | {"seed": 2, "test_ppl": 20.0}]
    rows += [row | {"name": "b", "group": "h", "seed": 1, "test_ppl": 1.0}]
    rows += [row | {"name": "no test", "seed": 1, "test_ppl": None}]
    lines = importlib.import_module("report").share_table({"runs": rows}).splitlines()
    assert lines[0] == "| share | g | h |"
    assert lines[2:] == ["| 50% | 15.00 (2.00M, 2 seeds) | 1.00 (2.00M) |"]


def test_a_term_signal_stops_the_runs(run, experiment, tmp_path, monkeypatch):
    """A run left behind would train on, beside the command that goes on with it."""
    made = run.load_experiment(experiment(), tmp_path / "runs", [], None, False)
    runner, children = importlib.import_module("runner"), []

    class Sleeper(subprocess.Popen):
        """The first look at it finds that it runs; then the signal comes."""

        looked_at = False

        def poll(self):
            if not self.looked_at:
                self.looked_at = True
                assert super().poll() is None
                os.kill(os.getpid(), signal.SIGTERM)
            return super().poll()

    def start(*_):
        children.append(Sleeper(["sleep", str(HANG)]))
        return children[0]

    monkeypatch.setattr(runner, "_start", start)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        runner.train_missing(made)
    assert [child.poll() for child in children] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == handler
    assert read_json(tmp_path / "runs" / "trunk-s3.json")["seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_smoke(run, claim, tiny_corpus, tmp_path):
    argv = [claim, "--smoke", "--data", str(tiny_corpus), "--runs", str(tmp_path)]
    assert run.main(argv) == 0
    folder = tmp_path / f"smoke-{claim}" / f"results_{claim}"
    assert read_json(folder / "results.json")["smoke"] and (folder / "plot.png").exists()
