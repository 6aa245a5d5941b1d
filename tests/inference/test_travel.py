"""The code in an export: the package's own, and enough by itself."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killed import HANG
from safetensors.torch import load_file

import allattn
from allattn.cli import main
from allattn.inference.load import load_pretrained
from allattn.inference.travel import travelling_code
from allattn.model.generate import generate

NEEDED = {"torch", "numpy", "safetensors", "sentencepiece", "transformers", "__future__"}


def test_nothing_of_the_package_and_little_else_is_imported():
    code, stdlib = travelling_code(), set(sys.stdlib_module_names)
    assert {"modeling_allattn.py", "transformer.py", "kernel.py", "words.py"} <= code.keys()
    for name, source in code.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                roots = {node.module.split(".")[0]}
            else:
                if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                    assert f"{node.module}.py" in code, name
                continue
            assert roots <= stdlib | NEEDED, name
            assert "allattn" not in roots, name


def test_it_is_the_implementation_line_by_line():
    """But for a first line that says so, imports, and the list at the end of the entries."""
    for name, source in travelling_code().items():
        head, *lines = source.splitlines()
        module = head.split(" from ")[1].split(";")[0]
        own = Path(allattn.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
        wanted = own.read_text(encoding="utf-8").splitlines()
        assert len(lines) >= len(wanted), name
        for line, original in zip(lines, wanted, strict=False):
            assert line == original or "from ." in line and "from allattn." in original, name
        assert all(x == "" or x.startswith(("#", "from .")) for x in lines[len(wanted) :]), name


SCRIPT = """
import json, sys
for name in ("allattn", "deepspeed", "omegaconf"):
    sys.modules[name] = None  # as where it is not installed: importing it fails
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
folder, text = sys.argv[1], sys.argv[2]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer([text, "It"], return_tensors="pt", padding=True)
ids = tokenizer(text, return_tensors="pt")["input_ids"]
with torch.no_grad():
    logits = model(ids).logits
beams = model.generate(**inputs, max_new_tokens=5, num_beams=2)
greedy = model.generate(ids, max_new_tokens=8, do_sample=False)
model.save_pretrained("again"); tokenizer.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
assert torch.equal(again.generate(ids, max_new_tokens=8, do_sample=False), greedy)
assert AutoTokenizer.from_pretrained("again", trust_remote_code=True)(text)["input_ids"] == ids[0].tolist()
written = pipeline("text-generation", model="again", trust_remote_code=True)([text], max_new_tokens=3)
assert written[0][0]["generated_text"].startswith(text)
assert beams.shape == (2, ids.shape[1] + 5)
save_file({"logits": logits, "greedy": greedy.contiguous(), "ids": ids}, "out.safetensors")
"""  # noqa: E501


def test_where_allattn_is_not_installed(finished_run, tmp_path):
    """A path with a space and letters beyond ASCII; the run's own logits, bit by bit or nearly."""
    pytest.importorskip("transformers")
    folder = tmp_path / "ä b" / "é"
    assert main(["export", str(finished_run), "--out", str(folder)]) == 0
    (tmp_path / "elsewhere").mkdir()
    text = "She had been\nforced into prudence in her youth, she learned romance as she grew older"
    env = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), text],
        cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True, timeout=HANG,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = load_file(tmp_path / "elsewhere" / "out.safetensors")
    model, ids = load_pretrained(folder), found["ids"]
    assert ids[0].tolist() == allattn.load_tokenizer(folder).encode(text) and ids.shape[1] > 32
    memory, expected = model.empty_cache(), []
    with torch.no_grad():
        for piece in ids.split(16, dim=1):
            output = model(piece, memory=memory)
            memory = output.memory
            expected.append(output.log_probs)
    torch.testing.assert_close(found["logits"], torch.cat(expected, dim=1), atol=1e-4, rtol=1e-4)
    new = [row[0] for row in generate(model, ids.tolist(), max_new_tokens=8, temperature=0)]
    assert found["greedy"][0, ids.shape[1] :].tolist() == new
    saved = json.loads((tmp_path / "elsewhere" / "again" / "config.json").read_text())
    assert saved["num_attention_heads"] == model.config.heads
    assert load_pretrained(tmp_path / "elsewhere" / "again").config == model.config
