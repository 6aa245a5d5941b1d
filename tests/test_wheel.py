"""The wheel and the sdist, built and used away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TWENTY_STEPS = ["stages[0].steps=10", "stages[1].steps=6", "stages[2].steps=4"]


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def files_of(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)) for path in found}


@pytest.mark.slow
def test_a_wheel_works_without_the_checkout(tmp_path):
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")

    inside = set(zipfile.ZipFile(wheel).namelist())
    configs = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    wanted = {f"allattn/configs/{name}" for name in configs}
    wanted |= {"allattn/py.typed", "allattn/constraints.txt", "allattn/model/fused_cpu.cpp"}
    wanted |= {f"allattn/corpora/tiny/{split}.txt" for split in ("train", "valid", "test")}
    assert wanted <= inside
    assert not [name for name in inside if name.startswith(("tests/", "tools/"))]
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("run.sh", "configs/tiny.yaml", "constraints.txt", "tests/test_wheel.py"):
        assert name in names, name

    venv, work, home = tmp_path / "venv", tmp_path / "work", tmp_path / "home"
    work.mkdir(), home.mkdir()
    run(sys.executable, "-m", "venv", venv, cwd=work)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel, cwd=work)
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XDG_CACHE_HOME")}
    env = clean | {"HOME": str(home), "PATH": f"{venv / 'bin'}{os.pathsep}{clean['PATH']}"}
    env.pop("TORCH_EXTENSIONS_DIR", None)
    where = "import allattn, pathlib; print(pathlib.Path(allattn.__file__).parent)"
    package = Path(run(python, "-c", where, cwd=work, env=env).strip())
    assert package.is_relative_to(venv)
    before = files_of(package)

    assert "tiny" in run("allattn", "configs", cwd=work, env=env)
    run("allattn", "prepare", "--dataset", "tiny", "--tokenizer", "byte", "--out", "data/bytes",
        cwd=work, env=env)  # fmt: skip
    # the corpus of the config itself is prepared on the way
    said = run("allattn", "train", "tiny", "run.name=own", *TWENTY_STEPS, cwd=work, env=env)
    assert (work / "runs" / "own" / "final").is_dir(), said
    run("allattn", "train", "tiny", "run.name=bytes", "data.dir=data/bytes", *TWENTY_STEPS,
        cwd=work, env=env)  # fmt: skip
    assert "word_ppl" in run("allattn", "evaluate", "runs/own", cwd=work, env=env)
    run("allattn", "export", "runs/own", "--out", "exports/own", cwd=work, env=env)
    assert (work / "exports" / "own" / "model.safetensors").is_file()
    # the kernel is compiled into the user's cache, and nothing is written beside the code
    assert files_of(package) == before
    assert list((home / ".cache").rglob("fused_cpu-*.so"))
