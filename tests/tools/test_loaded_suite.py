"""The loaded suite: its verdict, its logs, and that no busy loop outlives it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "loaded_suite.py"
spec = importlib.util.spec_from_file_location("loaded_suite", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture
def suite(tmp_path):
    def build(body: str) -> list[str]:
        path = tmp_path / "test_it.py"
        path.write_text(f"def test_it():\n    {body}\n")
        return ["-p", "no:cacheprovider", "-c", os.devnull, str(path)]

    return build


@pytest.mark.parametrize(("body", "status", "word"), [("assert True", 0, "green"),
                                                      ("assert False", 1, "FAILED")])  # fmt: skip
def test_a_run_is_judged(suite, tmp_path, capsys, body, status, word):
    arguments = ["--runs", "2", "--loops", "1", "--workers", "0", "--seeds", "--logs",
                 str(tmp_path / "logs"), "--", *suite(body)]  # fmt: skip
    assert tool.main(arguments) == status
    out = capsys.readouterr().out
    assert len(re.findall(rf"loaded_[12] +{word}", out)) == 2
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"loaded_1.log", "loaded_2.log"}
    assert f"{0 if status else 2} of 2 runs were green" in out


def test_the_loops_end_with_an_error():
    with pytest.raises(RuntimeError), tool.busy(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
        raise RuntimeError
    assert [loop.returncode for loop in loops] == [-signal.SIGKILL] * 2


def test_a_loop_whose_parent_is_killed_ends_by_itself():
    """The loop inherits the pipe: it is closed only when the loop has ended as well."""
    program = (
        f"import sys, time; sys.path.insert(0, {str(TOOL.parent)!r})\n"
        "from loaded_suite import busy\n"
        "with busy(1) as loops:\n"
        "    print(loops[0].pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    loop = int(parent.stdout.readline())
    os.kill(loop, 0)  # it is there
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # returns once the loop has ended too
