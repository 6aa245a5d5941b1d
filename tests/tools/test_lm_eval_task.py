"""The task for lm-evaluation-harness: what it writes, and the real harness's figure."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from killed import HANG

from allattn.cli import main
from allattn.inference.evaluate import evaluate_source
from allattn.inference.load import open_source

TOOL = Path(__file__).resolve().parents[2] / "tools" / "lm_eval_task.py"
write_task = runpy.run_path(str(TOOL))["write_task"]
TEXT = "one two\r\n\nthree\u2028four  five\nlast"  # 6 words, 4 line ends once the last has its own


def test_what_it_writes(tmp_path):
    (tmp_path / "t.txt").write_bytes(TEXT.encode())
    write_task(tmp_path / "t.txt", tmp_path / "task", "mine")
    (row,) = (tmp_path / "task" / "mine.jsonl").read_text().splitlines()
    assert json.loads(row)["text"] == TEXT + "\n"
    assert "task: mine\n" in (tmp_path / "task" / "mine.yaml").read_text()
    counts = runpy.run_path(str(tmp_path / "task" / "words.py"))["process_results"]
    found = counts(json.loads(row), [-3.5])
    assert found["word_perplexity"] == (-3.5, 6 + 4)
    assert found["byte_perplexity"] == found["bits_per_byte"] == (-3.5, len(TEXT.encode()) + 1)
    write_task(tmp_path / "t.txt", tmp_path / "task", "mine", lines=3)
    rows = (tmp_path / "task" / "mine.jsonl").read_text().splitlines()
    assert [json.loads(r)["text"] for r in rows] == [
        "one two\r\n\nthree\u2028four  five\n", "last\n",
    ]  # fmt: skip


def test_what_it_refuses(tmp_path):
    (tmp_path / "t.txt").write_text("")
    with pytest.raises(ValueError, match="empty"):
        write_task(tmp_path / "t.txt", tmp_path, "x")
    with pytest.raises(ValueError, match="--name"):
        write_task(tmp_path / "t.txt", tmp_path, "a b")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_gives_the_perplexity_of_evaluate(finished_run, tiny_corpus, tmp_path):
    folder, text = tmp_path / "model", tiny_corpus.parent / "valid.txt"
    assert main(["export", str(finished_run), "--out", str(folder)]) == 0
    write_task(text, tmp_path / "task", "mine")
    env = {**os.environ, "HF_HOME": str(tmp_path / "hub")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--batch_size", "1"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--device", "cpu"]
    command += ["--include_path", str(tmp_path / "task"), "--tasks", "mine"]
    subprocess.run(
        [*command, "--output_path", str(tmp_path / "out")], env=env, check=True, timeout=HANG
    )
    (results,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(results.read_text())["results"]["mine"]
    wanted = evaluate_source(open_source(folder), None, "valid", text=text)
    assert found["word_perplexity,none"] == pytest.approx(wanted["word_ppl"], rel=1e-3)
    assert found["bits_per_byte,none"] == pytest.approx(wanted["bits_per_byte"], rel=1e-3)
