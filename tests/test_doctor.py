"""`allattn doctor`: what it finds here, and what it would say elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import allattn
from allattn.cli import main
from allattn.machine import doctor as doctor_module
from allattn.machine import hardware, versions
from allattn.machine.check import Check, worst
from allattn.model import build

NAMES = {
    "Python", "allattn", "torch", "deepspeed", "numpy", "configs", "cpu", "compiler", "disk",
    "DeepSpeed's accelerator", "matrix products", "extra hf", "extra onnx",
}  # fmt: skip


@pytest.fixture(scope="module")
def report():
    return allattn.doctor()


def named(report, name: str) -> dict:
    return next(check for check in report["checks"] if check["name"] == name)


def test_what_it_finds_here(report):
    names = [check["name"] for check in report["checks"]]
    assert len(set(names)) == len(names) and set(names) >= NAMES
    for check in report["checks"]:
        assert check.keys() == {"name", "status", "text", "todo", "value"}
        assert check["status"] in ("ok", "warning", "error") and check["text"]
        assert check["status"] == "ok" or check["todo"], check  # each says what to do
        assert "\n" not in check["text"] + check["todo"]
    assert report["status"] != "error"  # the suite runs here
    assert named(report, "torch")["text"].startswith(metadata.version("torch"))
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    assert named(report, "DeepSpeed's accelerator")["text"].startswith(accelerator)
    rates = named(report, "matrix products")["value"]
    assert rates.keys() == {"fp32", "bf16"} and min(rates.values()) > 0
    assert named(report, "cpu")["value"]["memory_gb"] > 0
    assert "tiny" in named(report, "configs")["text"]


def test_the_command(report, monkeypatch, capsys):
    monkeypatch.setattr(doctor_module, "doctor", lambda: report)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = [line for line in lines if line.startswith(("ok", "warning", "error"))]
    assert [line.split()[0] for line in first] == [c["status"] for c in report["checks"]]
    todo = [line.strip() for line in lines if line.strip().startswith("->")]
    assert todo == [f"-> {c['todo']}" for c in report["checks"] if c["todo"]]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("error", 1)])
def test_the_exit_status(monkeypatch, capsys, status, code):
    check = {"name": "torch", "status": status, "text": "x", "todo": "y", "value": None}
    report = {"status": status, "checks": [check]}
    monkeypatch.setattr(doctor_module, "doctor", lambda: report)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines() == [f"{status:<8} torch  x", f"{'':<15} -> y"]


def test_the_worst_of_them():
    checks = [Check("a", "ok", "x"), Check("b", "warning", "x", "y")]
    assert worst(checks) == "warning" and worst(checks[:1]) == worst([]) == "ok"
    assert worst([Check("c", "error", "x", "y"), *checks]) == "error"


# Versions


def test_a_library_within_beyond_and_without_its_bounds():
    version = metadata.version("numpy")
    library = versions._library
    assert library(Requirement("numpy>=1"), {}) == Check("numpy", "ok", version)
    tested = library(Requirement("numpy>=1"), {"numpy": version})
    assert (tested.status, tested.text) == ("ok", f"{version}, as tested")
    local = library(Requirement("numpy>=1"), {"numpy": f"{version}+cpu"})  # the same sources
    assert local.status == "ok"
    other = library(Requirement("numpy>=1"), {"numpy": "1.0"})
    assert (other.status, other.text) == ("warning", f"{version}, tested with 1.0")
    assert other.todo == "if something fails: pip install 'numpy==1.0'"
    below = library(Requirement("numpy>=999"), {})
    assert (below.status, below.todo) == ("error", "pip install 'numpy>=999'")
    assert ">=999 is needed" in below.text
    missing = library(Requirement("no-such-library>=2"), {})
    assert (missing.status, missing.text) == ("error", "not installed")
    assert missing.todo == "pip install 'no-such-library>=2'"


def test_an_extra_is_no_error():
    missing = versions._extra("onnx", [Requirement("no-such-library>=2")], {})
    assert missing.status == "ok" and "pip install 'allattn[onnx]'" in missing.text
    old = versions._extra("onnx", [Requirement("numpy>=999"), Requirement("torch")], {})
    assert old.status == "warning" and old.todo == "pip install 'numpy>=999'"
    there = versions._extra("onnx", [Requirement("numpy"), Requirement("torch")], {})
    assert there.status == "ok" and metadata.version("numpy") in there.text


def test_the_tested_versions_are_read(tmp_path, monkeypatch):
    path = tmp_path / "constraints.txt"
    path.write_text(
        "# what the suite ran with\n\nTorch==2.6.0  # the oldest\nruamel.yaml==0.18\n"
        'numpy==1.0; python_version < "3"\nnumpy==2.0; python_version >= "3"\n'
    )
    monkeypatch.setattr(versions, "shipped_file", lambda name: tmp_path / name)
    assert versions.tested_versions() == {"torch": "2.6.0", "ruamel-yaml": "0.18", "numpy": "2.0"}
    monkeypatch.setattr(versions, "shipped_file", lambda name: None)
    assert versions.tested_versions() is None
    (check,) = [c for c in versions.check_versions() if c.name == "tested versions"]
    assert check.status == "warning" and "constraints.txt" in check.text


def test_a_wrong_python():
    assert versions._python(">=3.10").status == "ok"
    wrong = versions._python("<3")
    assert wrong.status == "error" and wrong.todo == "use Python <3"


def test_on_the_path_but_not_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "metadata", missing)
    python, own = versions.check_versions()
    assert python.status == "ok" and own.status == "warning" and "not installed" in own.text


def test_every_extra_says_what_it_gives():
    """But those that are for working on allattn itself."""
    declared = set(metadata.metadata("allattn").get_all("Provides-Extra"))
    assert declared - versions.EXTRAS.keys() <= {"dev"}


# The machine


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (check,) = hardware.check_kernel()
    assert check.status == "warning" and check.todo.startswith("install g++")
    assert "no C++ compiler (no-such-compiler)" in check.text
    (tmp_path / "allattn").mkdir()
    (tmp_path / "allattn" / build._file_name()).write_text("half a libr")
    compiler, damaged = hardware.check_kernel()
    assert compiler.status == "ok" and "compiled before" in compiler.text
    assert damaged.status == "warning" and damaged.todo.startswith(f"delete {tmp_path}")


def test_before_the_kernel_is_compiled(monkeypatch, tmp_path):
    try:
        build.find_compiler()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    compiler, check = hardware.check_kernel()
    assert compiler.status == check.status == "ok"
    assert "not compiled yet" in check.text and str(tmp_path) in check.text
    assert list((tmp_path / "allattn").iterdir()) == []  # it compiles nothing itself


def test_a_driver_that_pytorch_does_not_use(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    _, none = hardware.check_devices()
    assert (none.name, none.status) == ("cuda", "ok")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o700)
    _, unused = hardware.check_devices()
    assert unused.status == "warning" and "finds no GPU" in unused.text


def test_a_full_disk(monkeypatch, tmp_path):
    roomy = hardware.check_disk(tmp_path / "runs" / "not" / "there")
    assert roomy.status == "ok" and str(tmp_path) in roomy.text
    monkeypatch.setattr(hardware, "_ROOM", 1e18)
    full = hardware.check_disk(tmp_path / "runs")
    assert full.status == "warning" and full.todo.startswith("make room")
    assert full.value == pytest.approx(roomy.value, rel=0.1)


def test_deepspeed_that_cannot_be_imported(monkeypatch):
    broken = [sys.executable, "-c", "raise ImportError('no libcuda.so.1')"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(broken, **pipes) as process:
        check = doctor_module._accelerator(process)
    assert check.status == "warning" and "no libcuda.so.1" in check.text
    monkeypatch.setattr(doctor_module, "_SECONDS", 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, **pipes) as p:
        assert "took more than 0 s" in doctor_module._accelerator(p).text
        p.kill()


@pytest.mark.slow
def test_torch_that_cannot_be_imported(tmp_path):
    """A half-installed venv: it says so, and does not fail itself."""
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so: cannot open')\n")
    paths = [tmp_path, Path(allattn.__file__).parents[1]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    ask = [sys.executable, "-m", "allattn"]
    done = subprocess.run(
        [*ask, "doctor", "--json"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    broken = [c for c in report["checks"] if c["name"] == "PyTorch"]
    assert [c["status"] for c in broken] == ["error"] and "libc10.so" in broken[0]["text"]
    done = subprocess.run([*ask, "--version"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "torch cannot be imported (libc10.so" in done.stdout
