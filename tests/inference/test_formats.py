"""Exports as ONNX and torch.export programs, and in fewer bits: run without the package."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killed import HANG
from safetensors.torch import load_file
from test_programs import every_shape

from allattn.cli import main
from allattn.data.lanes import Corpus
from allattn.inference import onnx, pt2
from allattn.inference.evaluate import evaluate_source
from allattn.inference.load import load_pretrained, open_source
from allattn.inference.programs import (
    TOLERANCE,
    Program,
    model_call,
    program_perplexity,
    worst_difference,
)
from allattn.inference.stored import evaluate_program, open_program

PRINTED = re.compile(r"perplexity a token on valid: ([\d.]+) in fp32, ([\d.]+) in (\w+)\n")
TEXT = "She had been forced into prudence in her youth .\n"


@pytest.fixture(scope="session")
def needs_onnx() -> None:
    for name in onnx.NEEDED:
        pytest.importorskip(name)


@pytest.fixture(scope="session")
def as_onnx(needs_onnx, finished_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("onnx") / "ex port"
    assert main(["export", str(finished_run), "--format", "onnx", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def as_pt2(finished_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("pt2") / "ex port"
    assert main(["export", str(finished_run), "--format", "pt2", "--out", str(out)]) == 0
    return out


def run_readme(folder: Path, *blocked: str) -> str:
    """What the snippet in a README.md prints, where some packages cannot be imported."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{block}{code}"],
        cwd=folder, capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected_output(run: Path, tmp_path: Path, capsys) -> tuple[float, str]:
    """Perplexity of TEXT, and the likeliest continuation, by this package's commands."""
    (tmp_path / "text.txt").write_text(TEXT)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--text", str(tmp_path / "text.txt"), "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["ppl"]
    argv = ["generate", str(run), "--prompt", "She had", "--max-new-tokens", "20"]
    assert main([*argv, "--temperature", "0", "--json"]) == 0
    return score, json.loads(capsys.readouterr().out)["text"]


def test_onnx_runs_as_its_readme_says(as_onnx, finished_run, tmp_path, capsys):
    assert {path.name for path in as_onnx.iterdir()} == {
        "config.json", "model.onnx", "README.md", "tokenizer.json", "tokenizer.model",
    }  # fmt: skip
    score, text = expected_output(finished_run, tmp_path, capsys)
    first, _, rest = run_readme(as_onnx, "allattn", "torch").partition("\n")
    assert float(first.removeprefix("perplexity a token: ")) == pytest.approx(score, rel=1e-4)
    assert rest == text + "\n"


def test_pt2_runs_as_its_readme_says(as_pt2, finished_run, tmp_path, capsys):
    assert {path.name for path in as_pt2.iterdir()} == {
        "config.json", "model.pt2", "README.md", "tokenizer.json", "tokenizer.model",
    }  # fmt: skip
    score, text = expected_output(finished_run, tmp_path, capsys)
    first, _, rest = run_readme(as_pt2, "allattn").partition("\n")
    assert float(first.removeprefix("perplexity a token: ")) == pytest.approx(score, rel=1e-4)
    assert rest == text + "\n"


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_program_is_evaluated_from_its_file(request, finished_run, tmp_path, fails, format):
    """`allattn evaluate` of a program gives what the run's does, and the card says it."""
    folder = request.getfixturevalue(f"as_{format}")
    found = evaluate_program(open_program(folder), None, "valid")
    source = open_source(finished_run)
    expected = evaluate_source(source, source.corpus(), "valid")
    for key in ("loss", "word_ppl", "bits_per_byte"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5)
    for key in ("tokens", "words", "mem_len", "heads"):
        assert found[key] == expected[key]
    assert f"| perplexity a token | {expected['ppl']:.3f} |" in (folder / "README.md").read_text()
    assert "--seq-len" in fails(2, "evaluate", folder, "--seq-len", 8)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    data = (broken / f"model.{format}").read_bytes()
    (broken / f"model.{format}").write_bytes(data[:-10])
    assert f"model.{format}" in fails(1, "evaluate", broken)


def test_onnx_in_fewer_bits(as_onnx, finished_run, tiny_corpus, tmp_path, monkeypatch):
    """Half and about a quarter of the size; rounding is what PyTorch rounds."""
    import onnx as library

    monkeypatch.setattr(onnx, "_SMALL", 8)
    model = load_pretrained(finished_run, attention="reference")
    program = Program(load_pretrained(finished_run, attention="reference"))
    corpus, plain = Corpus(tiny_corpus), as_onnx / "model.onnx"
    before = program_perplexity(program, program, corpus, "valid")
    sizes = {"fp32": plain.stat().st_size}
    for dtype in ("bf16", "fp16"):
        proto, path = library.load(plain), tmp_path / f"{dtype}.onnx"
        onnx.store_as(proto, dtype)
        library.save(proto, path)
        same = Program(load_pretrained(finished_run, attention="reference"))
        onnx.round_program(same, dtype)
        call = onnx.session_call(path)
        assert worst_difference(call, same, program) < TOLERANCE
        assert worst_difference(call, model_call(model), program) > 1e-3
        sizes[dtype] = path.stat().st_size
    onnx.quantise(plain, tmp_path / "int8.onnx")
    call = onnx.session_call(tmp_path / "int8.onnx")
    after = program_perplexity(call, program, corpus, "valid")
    assert after == pytest.approx(before, rel=0.05) and after != before
    graph = library.load(tmp_path / "int8.onnx").graph
    large = [t for t in graph.initializer if t.data_type == 1 and len(t.dims) > 1]
    # of the weights only the positions' table, which is sliced, stays in float32
    assert {t.name for t in large if max(t.dims) > 8} <= {"fixed.0.positions", "fixed.1.positions"}
    weights = sum(t.numel() for t in program.state_dict().values())
    assert sizes["fp32"] - sizes["bf16"] == pytest.approx(2 * weights, rel=0.1)
    assert sizes["fp16"] == pytest.approx(sizes["bf16"], abs=100)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_in_fewer_bits(finished_run, tmp_path, capsys, dtype):
    """What is printed is what evaluating the export gives."""
    out = tmp_path / "small"
    assert main(["export", str(finished_run), "--dtype", dtype, "--out", str(out)]) == 0
    path, printed = capsys.readouterr().out.split("\n", 1)
    before, after, name = PRINTED.fullmatch(printed).groups()
    assert path == str(out) and name == dtype and before != after
    for source, ppl in ((finished_run, before), (out, after)):
        assert main(["evaluate", str(source), "--json"]) == 0
        assert f"{json.loads(capsys.readouterr().out)['ppl']:.5f}" == ppl
    stored = load_file(out / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {
        getattr(torch, {"bf16": "bfloat16"}.get(dtype, "float16"))
    }  # noqa: E501
    model = load_pretrained(out)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(
        torch.equal(p, stored[f"model.{name}"].float()) for name, p in model.named_parameters()
    )


# Refusals


def test_what_does_not_go_together(finished_run, fails, tmp_path):
    export = ["export", finished_run, "--out", tmp_path / "out"]
    assert "--format pt2" in fails(2, *export, "--aot")
    assert "--format onnx" in fails(2, *export, "--dtype", "int8")
    assert "--format onnx" in fails(2, *export, "--format", "pt2", "--dtype", "int8")
    assert "--seq-len" in fails(2, *export, "--seq-len", "8")
    assert "--seq-len" in fails(2, *export, "--format", "pt2", "--seq-len", "0")
    assert not any(tmp_path.iterdir())


def test_a_missing_extra(finished_run, fails, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    line = fails(1, "export", finished_run, "--format", "onnx", "--out", tmp_path / "out")
    assert "onnxscript" in line and "pip install 'allattn[onnx]'" in line
    assert not any(tmp_path.iterdir())


def test_no_compiler(finished_run, fails, tmp_path, monkeypatch):
    monkeypatch.setattr(pt2.shutil, "which", lambda name: None)
    line = fails(1, "export", finished_run, "--format", "pt2", "--aot", "--out", tmp_path / "out")
    assert "C++ compiler" in line and not any(tmp_path.iterdir())


def test_numbers_too_large_for_fp16(finished_run, fails, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    assert main(["export", str(finished_run), "--out", str(source)]) == 0
    from test_export import believe

    from allattn.training.state import save_tensors

    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][0] = 70000.0
    save_tensors(source / "model.safetensors", tensors)
    believe(source / "model.safetensors")
    line = fails(1, "export", source, "--dtype", "fp16", "--no-check", "--out", out)
    assert "norm.weight" in line and "7e+04" in line and not out.exists()


@pytest.mark.parametrize("text", ["a b\u2028c d\x85e\n\nf", "She had\n"])
def test_the_readme_reads_text_as_we_do(as_onnx, finished_run, text):
    """Its tokenizer: ids of a text of several lines."""
    (code,) = re.findall(r"```python\n(.*?)```", (as_onnx / "README.md").read_text(), re.S)
    names: dict = {}
    code = code.replace('folder = "."', f"folder = {str(as_onnx)!r}")
    exec(code[: code.index("nats, tokens = score")], names)
    tokenizer = open_source(finished_run).tokenizer()
    assert names["encode_text"](text) == tokenizer.encode(text)
    ids = tokenizer.encode(text)
    assert names["decode"](ids) == tokenizer.decode(ids)


def test_programs_of_other_versions(as_onnx, fails, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(as_onnx, other)
    config = json.loads((other / "config.json").read_text())
    for change, word in (({"format_version": 99}, "update allattn"), ({"sha256": {}}, "sha256")):
        (other / "config.json").write_text(json.dumps(config | change))
        assert word in fails(1, "evaluate", other)
    del config["data"]
    (other / "config.json").write_text(json.dumps(config))
    assert "config.json" in fails(1, "evaluate", other)


def test_a_program_is_no_source(as_pt2, fails, tmp_path):
    line = fails(1, "generate", as_pt2)
    assert str(as_pt2) in line and "README.md" in line
    with pytest.raises(ValueError, match="format pt2"):
        load_pretrained(as_pt2)


# Long: every shape through both exporters, and the compiler


@pytest.mark.slow
@every_shape
def test_every_shape_as_onnx(needs_onnx, tiny_model, tmp_path, shape):
    import onnx as library

    model = tiny_model(**shape, attention="reference").float()
    program = Program(tiny_model(**shape, attention="reference").float())
    library.save(onnx.to_onnx(program), tmp_path / "model.onnx")
    call = onnx.session_call(tmp_path / "model.onnx")
    assert worst_difference(call, model_call(model), program) < TOLERANCE


@pytest.mark.slow
@every_shape
def test_every_shape_as_pt2(tiny_model, tmp_path, shape):
    model = tiny_model(**shape, attention="reference").float()
    program = Program(tiny_model(**shape, attention="reference").float())
    call = pt2.save(program, tmp_path / "model.pt2")
    assert worst_difference(call, model_call(model), program) < TOLERANCE


@pytest.mark.slow
def test_compiled_ahead(finished_run, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["export", str(finished_run), "--format", "pt2", "--aot", "--out", str(out)]
    assert main(argv) == 0
    model = load_pretrained(finished_run, attention="reference")
    program = Program(load_pretrained(finished_run, attention="reference"))
    call = pt2.load_compiled(out / "compiled.pt2")
    assert worst_difference(call, model_call(model), program) < TOLERANCE
    assert "aoti_load_package" in (out / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("options", [["onnx", "int8"], ["onnx", "fp16"], ["pt2", "bf16"]])
def test_perplexity_is_printed(needs_onnx, finished_run, tmp_path, capsys, options):
    out, (format, dtype) = tmp_path / "out", options
    argv = ["export", str(finished_run), "--format", format, "--dtype", dtype, "--out", str(out)]
    assert main(argv) == 0
    before, after, name = PRINTED.search(capsys.readouterr().out).groups()
    assert name == dtype and float(after) == pytest.approx(float(before), rel=0.05)
    program = Program(load_pretrained(finished_run, attention="reference"))
    assert (
        after in (out / "README.md").read_text()
        or f"{float(after):.4f}" in (out / "README.md").read_text()
    )
    assert program.config.heads == json.loads((out / "config.json").read_text())["heads"]


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["word", "byte"])
def test_readme_with_other_tokenizers(
    needs_onnx, tiny_yaml, tiny_corpus, tmp_path, capsys, tokenizer
):
    texts = [f"--{s}={tiny_corpus.parent / s}.txt" for s in ("train", "valid", "test")]
    data, run = tmp_path / "data", tmp_path / "runs" / "run"
    assert main(["prepare", *texts, "--tokenizer", tokenizer, "--out", str(data)]) == 0
    common = [f"data.dir={data}", f"run.dir={tmp_path / 'runs'}", "model.vocab_size=null"]
    assert main(["train", str(tiny_yaml), *common]) == 0
    argv = ["export", str(run), "--format", "onnx", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    score, text = expected_output(run, tmp_path, capsys)
    first, _, rest = run_readme(tmp_path / "out", "allattn", "torch").partition("\n")
    assert float(first.removeprefix("perplexity a token: ")) == pytest.approx(score, rel=1e-4)
    assert rest == text + "\n"
