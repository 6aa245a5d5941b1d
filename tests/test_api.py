"""The Python API: every name of `__all__` used for real, equal to what the commands print."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import DENSE_END, HEADS, STEPS, Run

import allattn
from allattn.cli import main
from allattn.config import ArgumentError, ConfigError, UnavailableError

FUNCTIONS = [name for name in allattn.__all__ if inspect.isfunction(getattr(allattn, name))]


@pytest.fixture
def printed(capsys):
    """`printed("evaluate", path)`: what a command prints with --json."""

    def run(*argv: object):
        capsys.readouterr()
        assert main([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def timeless(result):
    """Without what differs from one run to the next: the speed."""
    if isinstance(result, list):
        return [timeless(row) for row in result]
    if isinstance(result, dict):
        return {k: timeless(v) for k, v in result.items() if k != "tokens_per_second"}
    return result


@pytest.fixture
def dense(finished_run):
    return finished_run / "checkpoints" / f"step_{DENSE_END:08d}"


# The promise


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_described(name):
    """A summary, each argument, what is returned, what is raised; and types for all of it."""
    function = getattr(allattn, name)
    signature, text = inspect.signature(function), inspect.getdoc(function)
    assert text and re.match(r"[A-Z][^\n]*\.(\n\n|$)", text), text
    parts = re.split(r"\n\n(Args|Returns|Raises):\n", "\n\n" + text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    documented = re.findall(r"^    \**(\w+): ", sections.get("Args", ""), flags=re.MULTILINE)
    assert documented == list(signature.parameters), f"{name}: {documented}"
    returns = signature.return_annotation
    assert ("Returns" in sections) == (returns not in ("None", None))
    assert re.search(r"^    \w+(, \w+)*: ", sections["Raises"], flags=re.MULTILINE)
    assert returns is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter}"


def test_there_is_nothing_in_the_shell_alone():
    """A command is a function of the same name, or of one that says it better."""
    from allattn.cli import build_parser

    actions = next(a for a in build_parser()._actions if a.dest == "command")
    others = {"show": "describe", "completion": None}  # completion is about the shell itself
    for command in actions.choices:
        name = others.get(command, command)
        assert name is None or name in FUNCTIONS


@pytest.mark.slow
def test_types_reach_a_type_checker(tmp_path):
    """`allattn.evaluate` is found by importing it, lazily, and by reading the source."""
    pytest.importorskip("mypy")
    path = tmp_path / "use.py"
    path.write_text("import allattn\nreveal_type(allattn.evaluate)\nallattn.train(5)\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", tmp_path / "cache",
         str(path)],
        cwd=Path(allattn.__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.search(r"Revealed type is .*split: .*str.* -> .*dict", done.stdout), done.stdout
    assert 'Argument 1 to "train" has incompatible type "int"' in done.stdout


# Configs


def test_configs_and_their_texts(capsys):
    found = allattn.configs()
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(None, 1) for line in lines] == [list(row) for row in found.items()]
    assert main(["configs", "tiny"]) == 0
    assert capsys.readouterr().out == allattn.config_text("tiny")


def test_a_config_to_start_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "tiny"]) == 0
    Path("mine.yaml").write_text(capsys.readouterr().out)
    mine = allattn.load_config("mine.yaml", {"model.n_layers": 2})
    assert mine == allattn.load_config("tiny", ["model.n_layers=2"])
    allattn.save_config(mine, "resolved.yaml")
    assert Path("resolved.yaml").read_text() == allattn.to_yaml(mine)
    assert allattn.load_config("resolved.yaml") == mine
    mine.model.n_layers = "two"
    with pytest.raises(ConfigError, match="n_layers"):
        allattn.to_yaml(mine)


def test_describe(tiny_yaml, printed):
    config = allattn.load_config(tiny_yaml)
    assert allattn.describe(config) == allattn.describe(tiny_yaml) == printed("show", tiny_yaml)
    assert allattn.describe("tiny") == printed("show", "tiny")


# A run


def test_train_and_go_on(make_config, finished_run):
    config = make_config()
    whole = dataclasses.replace(config, stages=config.stages[:1])
    final = allattn.train(whole)
    assert final == Path(config.run.dir) / "run" / "final"
    with pytest.raises(ConfigError, match="the run's folder exists"):
        allattn.train(config)
    again = allattn.train(config, resume=True)
    assert again == final
    assert Run(final.parent).losses() == Run(finished_run).losses()


def test_a_missing_corpus_is_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = {
        "model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "model.n_persistent": 4,
        "data.prepare.vocab_size": 400, "stages": [{"name": "dense", "steps": 2}],
    }  # fmt: skip
    config = allattn.load_config("tiny", small)
    final = allattn.train(config)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "preparing" in line]
    assert line.startswith("allattn: data/tiny is not there yet") and "sentencepiece" in line
    assert allattn.load_tokenizer("data/tiny").vocab_size == 400
    info = json.loads(Path("data/tiny/data.json").read_text())
    assert info["dataset"] == "tiny"
    before = Path("data/tiny/train.bin").stat().st_mtime_ns
    # a run that goes on takes what is there, also without, or with another, data.prepare
    longer = allattn.load_config(
        "tiny", small | {"stages": [{"name": "dense", "steps": 2}, {"name": "more", "steps": 1}],
                         "data.prepare": None},
    )  # fmt: skip
    assert allattn.train(longer, resume=True) == final
    assert "preparing" not in capsys.readouterr().err
    assert Path("data/tiny/train.bin").stat().st_mtime_ns == before


def test_a_missing_corpus_that_nothing_prepares(tiny_yaml, tmp_path, fails, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, command in (
        ("data/tiny", "allattn prepare --dataset tiny --out data/tiny"),
        ("wikitext-103", "allattn prepare --dataset wikitext-103 --source FOLDER --out"),
        ("mine", "allattn prepare --train FILE --valid FILE --out mine"),
    ):
        assert command in fails(1, "train", tiny_yaml, f"data.dir={folder}")
    # a folder that is there is not filled, whatever is in it
    (tmp_path / "mine").mkdir()
    line = fails(1, "train", tiny_yaml, "data.dir=mine", "data.prepare={dataset: tiny}")
    assert "allattn prepare" in line
    assert list((tmp_path / "mine").iterdir()) == []
    # what cannot be prepared is said, and no run begins
    wanted = "data.prepare={dataset: wikitext-2, source: nowhere}"
    assert "nowhere" in fails(1, "train", tiny_yaml, "data.dir=new", wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# Models


def test_evaluate(finished_run, printed, tmp_path):
    result = allattn.evaluate(finished_run, split="test")
    assert timeless(result) == timeless(printed("evaluate", finished_run, "--split", "test"))
    assert result["ppl"] == pytest.approx(math.exp(result["loss"]))
    options = {"mem_len": 4, "seq_len": 8, "batch_size": 2}
    other = allattn.evaluate(str(finished_run), **options)
    flags = ("--mem-len", 4, "--seq-len", 8, "--batch-size", 2)
    assert timeless(other) == timeless(printed("evaluate", finished_run, *flags))
    text = tmp_path / "text.txt"
    text.write_text("She had been forced into prudence in her youth\nshe learned romance\n")
    lines = allattn.evaluate(finished_run, text=text, per_line=True)
    flags = ("--text", text, "--per-line")
    assert timeless(lines) == timeless(printed("evaluate", finished_run, *flags))
    assert len(lines["lines"]) == 2


def test_prune(dense, printed, tmp_path):
    rows = allattn.prune(dense, method="importance", keep=[0.5, 0.75], out=tmp_path / "a")
    flags = ("--method", "importance", "--keep", "0.5,0.75", "--out", tmp_path / "b")
    assert timeless(rows) == timeless(printed("prune", dense, *flags))
    assert [row["keep"] for row in rows] == [0.75, 0.5]
    assert allattn.evaluate(tmp_path / "a" / "keep_0.5")["ppl"] == pytest.approx(rows[1]["ppl"])
    (row,) = allattn.prune(dense, method="importance", keep=0.5, normalize=False)
    flags = ("--method", "importance", "--keep", "0.5", "--no-normalize")
    assert timeless([row]) == timeless(printed("prune", dense, *flags))
    assert sum(row["heads"]) == HEADS // 2


def test_analyze(finished_run, printed, tmp_path):
    report = allattn.analyze(finished_run, tmp_path / "a", tokens=200, states=1)
    flags = ("--out", tmp_path / "b", "--tokens", 200, "--states", 1)
    assert printed("analyze", finished_run, *flags) == json.loads(json.dumps(report))
    for name in ("report.json", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_export_and_load(finished_run, tmp_path, capsys):
    folder = allattn.export(finished_run, tmp_path / "a")
    assert folder == tmp_path / "a"
    assert main(["export", str(finished_run), "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "b")
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    with pytest.raises(ValueError, match="exists"):
        allattn.export(finished_run, folder)
    half = allattn.export(finished_run, folder, dtype="bf16", overwrite=True)
    assert "perplexity" in json.loads((half / "config.json").read_text())


def test_models_and_tokenizers_of_a_run_a_checkpoint_and_an_export(finished_run):
    checkpoint = finished_run / "checkpoints" / f"step_{STEPS:08d}"
    places = (finished_run, checkpoint, finished_run / "final")
    models = [allattn.load_pretrained(place) for place in places]
    tokenizers = [allattn.load_tokenizer(place) for place in places]
    ids = tokenizers[0].encode("She had been")
    assert all(tokenizer.encode("She had been") == ids for tokenizer in tokenizers)
    assert tokenizers[0].decode(ids) == "She had been"
    with torch.no_grad():
        found = [model(torch.tensor([ids])).log_probs for model in models]
    assert all(isinstance(model, allattn.TransformerLM) for model in models)
    assert all(isinstance(model.config, allattn.ModelConfig) for model in models)
    assert all(torch.equal(log_probs, found[0]) for log_probs in found)
    for load in (allattn.load_pretrained, allattn.load_tokenizer):
        with pytest.raises(ValueError, match="no such run, checkpoint or export"):
            load(finished_run / "nowhere")


def test_the_tokenizer_of_a_corpus(tiny_corpus, finished_run):
    found = allattn.load_tokenizer(tiny_corpus)
    assert found.fingerprint() == allattn.load_tokenizer(finished_run).fingerprint()


def test_generate(finished_run, printed):
    result = allattn.generate(finished_run, "She had", max_new_tokens=5, top_k=3, seed=4)
    flags = ("--prompt", "She had", "--max-new-tokens", 5, "--top-k", 3, "--seed", 4)
    assert result == printed("generate", finished_run, *flags)
    assert len(result["tokens"]) == 5 and result["text"].startswith("She had")


def test_compare(finished_run, dense, printed, tmp_path):
    rows = allattn.compare({"dense": dense, "pruned": finished_run}, tmp_path / "a")
    named = (f"dense={dense}", f"pruned={finished_run}")
    assert timeless(rows) == timeless(printed("compare", *named, "--out", tmp_path / "b")["rows"])
    assert [row["run"] for row in rows] == ["dense", "pruned"]
    assert timeless(allattn.compare(named, tmp_path / "c")) == timeless(rows)
    (row,) = allattn.compare([finished_run], tmp_path / "d")
    assert row["run"] == str(finished_run)


def test_compare_of_folders_with_an_equals_sign(finished_run, tmp_path):
    """Sweeps name runs by their overrides."""
    folder = tmp_path / "keep=0.5"
    allattn.export(finished_run, folder, check=False)
    (row,) = allattn.compare([folder], tmp_path / "a", data=allattn_data(finished_run))
    assert row["run"] == str(folder)
    (row,) = allattn.compare({"half": folder}, tmp_path / "b", data=allattn_data(finished_run))
    assert row["run"] == "half"


def allattn_data(run: Path) -> str:
    return allattn.load_config(run / "config.yaml").data.dir


def test_prepare(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("one two three\n" * 20)
    info = allattn.prepare(out=tmp_path / "a", train=[text], tokenizer="byte")
    argv = ["prepare", "--out", tmp_path / "b", "--train", text, "--tokenizer", "byte"]
    assert main([str(a) for a in argv]) == 0
    assert info == json.loads((tmp_path / "b" / "data.json").read_text())
    assert "256 token types" in capsys.readouterr().out


# Wrong arguments

WRONG = [  # function, arguments, message in Python, and in the shell
    ("evaluate", {"batch_size": 0}, "batch_size: ", "--batch-size: "),
    ("evaluate", {"seq_len": 0}, "seq_len: ", "--seq-len: "),
    ("evaluate", {"text": "a", "data": "b"}, "data: a text needs no corpus; give text or data",
     "--data: a text needs no corpus; give --text or --data, not both"),
    ("evaluate", {"per_line": True}, "per_line: lines belong to a text; name it with text",
     "--per-line: lines belong to a text; name it with --text"),
    ("prune", {"method": "magnitud", "keep": 0.5}, "method: importance, magnitude or random",
     "--method: importance"),
    ("prune", {"method": "random", "keep": 0.5, "seed": -1}, "seed: a number", "--seed: a number"),
    ("export", {"out": ""}, "out: a folder is needed", "--out: a folder is needed"),
    ("export", {"out": "new", "aot": True}, "aot: compiles a program of format pt2, not of hf",
     "--aot: compiles a program of --format pt2, not of hf"),
    ("export", {"out": "new", "license": "no name"}, "license: a name such as",
     "--license: a name such as"),
    ("generate", {"top_p": 2.0}, "top_p: a share above 0", "--top-p: a share above 0"),
    ("generate", {"max_new_tokens": -1}, "max_new_tokens: 0 or more",
     "--max-new-tokens: 0 or more"),
    ("analyze", {"out": "new", "tokens": 0}, "tokens: 1 or more is needed, not 0",
     "--tokens: 1 or more is needed, not 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "python", "shell"), WRONG)
def test_a_wrong_argument_is_named_as_the_user_wrote_it(
    finished_run, fails, tmp_path, monkeypatch, name, arguments, python, shell
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as error:
        getattr(allattn, name)(finished_run, **arguments)
    assert str(error.value).startswith(python) and error.value.argument == python.split(":")[0]
    flags = []
    for key, value in arguments.items():
        flag = f"--{key.replace('_', '-')}"
        flags += [flag] if value is True else [f"{flag}={value}"]
    assert fails(2, name, finished_run, *flags).startswith(shell)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [  # what argparse keeps from a command
        ("evaluate", {"device": "tpu"}, "device: auto, cpu or cuda is needed, not 'tpu'"),
        ("export", {"out": "a", "format": "gguf"}, "format: hf, onnx or pt2 is needed"),
        ("export", {"out": "a", "dtype": "fp4"}, "dtype: fp32, bf16, fp16 or int8 is needed"),
        ("prune", {"method": "random"}, "keep: one of keep, keep_params and keep_flops is needed"),
        ("prune", {"method": "random", "keep": 0.5, "keep_params": 0.5}, "is needed, not 2"),
        ("prune", {"method": "random", "keep": "0.5"}, "keep: a share such as 0.5"),
        ("prune", {"method": "random", "keep_flops": []}, "keep_flops: a share such as 0.5"),
    ],
)
def test_what_only_python_can_get_wrong(
    finished_run, tmp_path, monkeypatch, name, arguments, words
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as error:
        getattr(allattn, name)(finished_run, **arguments)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_what_this_machine_lacks(finished_run, fails, monkeypatch):
    """Not the user's mistake: the status of a failure."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="^device: cuda is not available here"):
        allattn.evaluate(finished_run, device="cuda")
    line = fails(1, "evaluate", finished_run, "--device", "cuda")
    assert line.startswith("--device: cuda is not available here")


def test_braces_in_what_the_user_wrote_stay(finished_run, fails):
    line = fails(2, "export", finished_run, "--out", "x", "--license", "{format} {")
    assert "not '{format} {'" in line
