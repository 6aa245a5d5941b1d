"""The command line: exit status, one line for a mistake, one JSON object, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from runs import STEPS, Run
from safetensors.torch import load_file, save_file

import allattn
from allattn.cli import build_parser, main

COMMANDS = {
    "prepare", "configs", "show", "train", "evaluate", "prune", "analyze", "export", "generate",
    "compare", "doctor", "completion",
}  # fmt: skip


def test_every_command_explains_itself(capsys):
    actions = [a for a in build_parser()._actions if a.dest == "command"]
    assert actions[0].choices.keys() >= COMMANDS
    for command in actions[0].choices:
        with pytest.raises(SystemExit) as exit_:
            main([command, "--help"])
        assert exit_.value.code == 0
        assert command in capsys.readouterr().out


def test_no_command(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "usage" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"], ["evaluate"], ["train"], ["evaluate", "x", "--seq-len", "two"],
        ["export", "x"], ["compare", "x"], ["prepare", "--out", "x", "--tokenizer", "char"],
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "c.yaml", "--fast"], ["train", "c.yaml", "--resume", "--fast"],
        ["evaluate", "x", "a=1"], ["generate", "x", "stray"],
    ],
)  # fmt: skip
def test_an_unknown_argument(argv, fails):
    line = fails(2, *argv)
    assert argv[-1] in line and f"allattn {argv[0]} -h" in line


def test_overrides_may_follow_options(tiny_yaml, capsys):
    assert main(["show", str(tiny_yaml), "--json", "model.d_model=32"]) == 0
    a = json.loads(capsys.readouterr().out)
    assert main(["show", str(tiny_yaml), "model.d_model=32", "--json"]) == 0
    assert a == json.loads(capsys.readouterr().out)


def test_show(tiny_yaml, capsys):
    assert main(["show", str(tiny_yaml), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["heads"] == [4, 4]
    assert shown["params"] == shown["params_embedding"] + shown["params_non_embedding"]
    stages = [(s["name"], s["first_step"], s["last_step"]) for s in shown["stages"]]
    assert stages == [("dense", 1, 4), ("prune", 5, 10), ("tune", 11, 14)]
    assert "4 of 8 heads stay" in shown["stages"][1]["what"]


def test_show_without_the_corpus(tiny_yaml, capsys, tmp_path):
    """Sizes of the vocabulary are unknown then; the rest is shown."""
    assert main(["show", str(tiny_yaml), "data.dir=/nowhere", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["params"] is None and shown["params_non_embedding"] > 0
    assert main(["show", str(tiny_yaml), "data.dir=/nowhere"]) == 0
    assert "unknown until /nowhere is prepared" in capsys.readouterr().out


def test_show_trains_nothing(tiny_yaml, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert main(["show", str(tiny_yaml), f"run.dir={tmp_path / 'runs'}"]) == 0
    assert sorted(tmp_path.iterdir()) == before


def test_help_and_mistakes_need_no_torch(tmp_path):
    code = (
        "import sys; from allattn.cli import main; "
        "status = main(['show', 'missing.yaml']); "
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "allattn: error: missing.yaml: no such config file\n"


def test_as_a_module(tmp_path):
    """Exit status and streams of a real process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "allattn", "show", "x.yaml"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


# What helps to report a problem


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    first, second = capsys.readouterr().out.splitlines()
    versions = [metadata.version(name) for name in ("torch", "deepspeed")]
    assert first.startswith(f"allattn {allattn.__version__} (")
    assert f"torch {versions[0]}, DeepSpeed {versions[1]}, Python 3." in first
    assert second.startswith("device: " + ("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.parametrize(
    "argv", [["--debug", "show", "missing.yaml"], ["show", "missing.yaml", "--debug"],
             ["show", "--debug", "missing.yaml"]],
)  # fmt: skip
def test_the_traceback_of_a_users_error(argv, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "Traceback (most recent call last):"
    assert lines[-2].endswith("ConfigError: missing.yaml: no such config file")
    assert lines[-1] == "allattn: error: missing.yaml: no such config file"


def test_debug_changes_nothing_else(tiny_yaml, capsys):
    assert main(["show", str(tiny_yaml), "--json"]) == 0
    plain = capsys.readouterr()
    assert main(["--debug", "show", str(tiny_yaml), "--json"]) == 0
    assert capsys.readouterr() == plain


# Completion


@pytest.fixture
def completions():
    """`completions("allattn train ti")`: what bash offers for the last word."""
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")

    def complete(line: str, folder: Path, script: str) -> set[str]:
        ask = (
            f"{script}\nCOMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
            'COMPREPLY=(); _shtab_allattn; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            [bash, "-c", ask], cwd=folder, capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    return complete


def test_what_bash_completes(completions, tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "timid.yaml").touch()
    (tmp_path / "tidy").mkdir()
    for line, expected in (
        ("allattn tra", {"train"}),
        ("allattn train ti", {"tiny", "timid.yaml", "tidy"}),
        ("allattn configs wiki", {name for name in allattn.configs() if name[:4] == "wiki"}),
        ("allattn evaluate ti", {"tidy"}),
        ("allattn evaluate x --text ti", {"timid.yaml", "tidy"}),
        ("allattn export x --format o", {"onnx"}),
        ("allattn export x --over", {"--overwrite"}),
        ("allattn --ver", {"--version"}),
    ):
        assert completions(line, tmp_path, script) == expected, line


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_for_each_shell(shell, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "evaluate" in script and (shell == "tcsh" or "wikitext103_allattn" in script)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_completion_needs_its_extra(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)  # as if it were not installed
    line = fails(1, "completion", "bash")
    assert "shtab" in line and "pip install 'allattn[completion]'" in line


# The bad input of issue 2


@pytest.fixture
def corpus_files(tmp_path):
    def write(content: bytes):
        path = tmp_path / "text.txt"
        path.write_bytes(content)
        return ["--train", path, "--out", tmp_path / "data"]

    return write


@pytest.mark.parametrize("kind", ["word", "sentencepiece", "byte"])
@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "empty"), (b"\n \n", "no words"), (b"caf\xe9 au lait\n", "line 1")],
    ids=["empty", "blank", "not UTF-8"],
)
def test_a_bad_corpus(corpus_files, fails, tmp_path, content, word, kind):
    line = fails(1, "prepare", *corpus_files(content), "--tokenizer", kind)
    assert word in line and "text.txt" in line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_vocabulary_too_large_for_the_corpus(corpus_files, fails, tmp_path):
    argv = [*corpus_files(b"the cat sat on the mat\n" * 20), "--tokenizer", "sentencepiece"]
    line = fails(1, "prepare", *argv, "--vocab-size", "5000")
    assert "5000" in line and "largest possible is" in line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    size = line.rsplit(" ", 1)[1]
    assert main(["prepare", *map(str, argv), "--vocab-size", size]) == 0


def test_a_missing_source(fails, tmp_path):
    path = tmp_path / "none.txt"
    assert str(path) in fails(1, "prepare", "--train", path, "--out", tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_preparing_over_another_corpus(corpus_files, fails, tmp_path, contents):
    argv = corpus_files(b"one two three\n" * 30)
    assert main(["prepare", *map(str, argv)]) == 0
    before = contents(tmp_path / "data")
    fails(1, "prepare", *argv, "--tokenizer", "byte")
    assert contents(tmp_path / "data") == before
    argv = corpus_files(b"")
    fails(1, "prepare", *argv, "--overwrite")
    assert contents(tmp_path / "data") == before


def test_a_missing_data_folder(tiny_yaml, tmp_path, fails):
    where = [f"run.dir={tmp_path / 'runs'}", f"data.dir={tmp_path / 'none'}"]
    line = fails(1, "train", tiny_yaml, *where)
    assert str(tmp_path / "none") in line and "allattn prepare" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["truncated tokens", "no tokens", "not json", "no tokenizer"])
def test_a_damaged_data_folder(tiny_yaml, tiny_corpus, tmp_path, fails, contents, how):
    data = tmp_path / "data"
    data.mkdir()
    for path in tiny_corpus.iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    if how == "truncated tokens":
        (data / "train.bin").write_bytes((data / "train.bin").read_bytes()[:-3])
    elif how == "no tokens":
        (data / "valid.bin").unlink()
    elif how == "not json":
        (data / "data.json").write_text("{")
    else:
        (data / "tokenizer.model").unlink()
    before = contents(tmp_path)
    line = fails(1, "train", tiny_yaml, f"run.dir={tmp_path / 'runs'}", f"data.dir={data}")
    assert str(data) in line
    assert contents(tmp_path) == before


def test_a_corpus_shorter_than_a_segment_a_lane(tiny_yaml, tmp_path, fails):
    where = f"run.dir={tmp_path / 'runs'}"
    line = fails(1, "train", tiny_yaml, where, "train.batch_size=400")
    assert "too few for 400 lanes of seq_len 16" in line and "at least 6401" in line
    fails(1, "train", tiny_yaml, where, "model.seq_len=1000")
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_of_another_size(tiny_yaml, tmp_path, fails):
    where = f"run.dir={tmp_path / 'runs'}"
    assert fails(2, "train", tiny_yaml, where, "model.vocab_size=5").startswith("model.vocab_size:")
    cut = ["model.embedding=adaptive", "model.cutoffs=[5000]"]
    assert fails(2, "train", tiny_yaml, where, *cut).startswith("model.cutoffs:")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_folder(tiny_yaml, tmp_path, fails, contents):
    argv = ["train", str(tiny_yaml), f"run.dir={tmp_path}", "stages=[{name: a, steps: 2}]"]
    assert main(argv) == 0
    before = contents(tmp_path)
    line = fails(2, *argv)
    assert str(tmp_path / "run") in line and "--resume" in line
    assert contents(tmp_path) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("x")
    fails(2, *argv, "run.name=other")
    assert [path.name for path in other.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_run_folder_that_cannot_be(tiny_yaml, tmp_path, fails, contents, where):
    (tmp_path / "file").write_text("precious")
    before = contents(tmp_path)
    line = fails(1, "train", tiny_yaml, f"run.dir={tmp_path / where}")
    assert str(tmp_path / "file") in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("damage", ["truncated", "another shape"])
def test_resuming_from_a_damaged_checkpoint(tiny_yaml, tmp_path, fails, contents, damage):
    argv = ["train", str(tiny_yaml), f"run.dir={tmp_path}", "train.save_every=3"]
    assert main(argv) == 0
    run = Run(tmp_path / "run")
    path = run.checkpoint(STEPS) / "parameters.safetensors"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        tensors = load_file(path)
        tensors["vocabulary.bias"] = tensors["vocabulary.bias"][1:].contiguous()
        save_file(tensors, path)
    before = contents(tmp_path)
    assert str(path) in fails(1, *argv, "--resume")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_a_bad_init_from(tiny_yaml, tmp_path, fails, path):
    (tmp_path / "empty").mkdir()
    where = [f"run.dir={tmp_path / 'runs'}", f"run.init_from={tmp_path / path}"]
    assert str(tmp_path / path) in fails(1, "train", tiny_yaml, *where)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "override", ["run.seed=-1", "run.seed=99999999999999999999999", "train.optimizer.eps=-1"]
)
def test_values_that_only_a_library_refuses(tiny_yaml, tmp_path, fails, override):
    line = fails(2, "train", tiny_yaml, f"run.dir={tmp_path / 'runs'}", override)
    assert override.partition("=")[0] in line
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_is_no_traceback(tiny_yaml, tmp_path, monkeypatch, capsys):
    from allattn.training.trainer import Trainer

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_train_step", interrupted)
    assert main(["train", str(tiny_yaml), f"run.dir={tmp_path}"]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "allattn: interrupted; --resume continues from the newest checkpoint"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("Tried to\nallocate")])
def test_too_little_memory_is_no_mistake_of_ours(tiny_yaml, tmp_path, monkeypatch, fails, error):
    from allattn.training.trainer import Trainer

    def full(self):
        raise error

    monkeypatch.setattr(Trainer, "_train_step", full)
    line = fails(1, "train", tiny_yaml, f"run.dir={tmp_path}")
    assert line.startswith("out of memory: use a smaller batch")
    assert "Tried to allocate" in line or not str(error)


def test_our_own_mistakes_do_show_a_traceback(tiny_yaml, tmp_path, monkeypatch, capsys):
    """Only what a user caused is cut to a line."""
    from allattn.training.trainer import Trainer

    def broken(self):
        return [][1]

    monkeypatch.setattr(Trainer, "_train_step", broken)
    with pytest.raises(IndexError):
        main(["train", str(tiny_yaml), f"run.dir={tmp_path}"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "a mistake in allattn or in a library" in said and "allattn --version" in said


def test_a_whole_run_from_the_command_line(finished_run, capsys):
    names = {path.name for path in finished_run.iterdir()}
    files = {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "final", ".lock"}
    assert names == files | {"pictures"}
    assert len(list((finished_run / "checkpoints").iterdir())) == STEPS
    assert main(["show", str(finished_run / "config.yaml"), "--json"]) == 0  # it can be run again
    assert json.loads(capsys.readouterr().out)["heads"] == [4, 4]


def test_resume_from_the_command_line(tiny_yaml, tmp_path, capsys, finished_run):
    argv = ["train", str(tiny_yaml), f"run.dir={tmp_path}"]
    assert main([*argv, "stages=[{name: dense, steps: 4, lr: {schedule: linear, "
                        "warmup_steps: 2, final: 0.5}}]"]) == 0  # fmt: skip
    assert main([*argv, "--resume"]) == 0
    assert Run(tmp_path / "run").losses() == Run(finished_run).losses()
    a, b = (load_file(f / "final" / "model.safetensors") for f in (tmp_path / "run", finished_run))
    assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
