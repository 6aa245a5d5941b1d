"""Every command and every piece of code in a README is run, or its arguments are read.

Each page is tried in a scratch folder of its own, from its first command to its last. The default
suite leaves out the commands that take long (SLOW), which the slow test of a page runs in their
place among the others. What cannot run here is in CANNOT_RUN, with the reason; its arguments are
read by the real parser, and its config is loaded.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import TINY_RUN

import allattn
from allattn.cli import main
from allattn.cli.arguments import build_parser
from allattn.config import load_config

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("allattn", "configs", "tools")
READMES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("README.md")),
]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))]
LANGUAGES = {"sh", "python", "yaml", "text", "mermaid"}
LIMIT = 10_000  # bytes of the first page

# What is written in a page, and what the test writes in its place so that it takes seconds
SHORTER = {
    "step_00000300": "step_00000004",
    "--vocab-size 8000": "--vocab-size 330",
    'load_config("tiny", {': 'load_config("tiny", {**SMALL, ',
    "'stages[1].prune.keep=0.75,0.5,0.25'": "'stages[1].prune.keep=0.75,0.5,0.25' " + "SMALL",
    "keep_0.25 --write": "keep_0.25",
    "sentencepiece --vocab-size 4000 --out data/wikitext-2-sp4000":
        "sentencepiece --vocab-size 4000 --out data/wikitext-2-sp4000 --workers 1",
}  # fmt: skip
SMALL = {
    "model.n_layers": 2, "model.d_model": 16, "model.n_heads": 4, "model.n_persistent": 8,
    "model.seq_len": 64, "model.mem_len": 64, "model.dropout": 0.0, "train.batch_size": 4,
    "train.eval_every": 1000, "train.save_every": 1000,
    "stages[0].steps": 4, "stages[1].steps": 6, "stages[2].steps": 4,
}  # fmt: skip
MORE_ARGUMENTS = {  # after the beginning of a command
    "allattn train": [f"{key}={value}" for key, value in SMALL.items()],
    "deepspeed --num_accelerators": [f"{key}={value}" for key, value in SMALL.items()],
    "python tools/benchmark.py train": ["--repeats", "1"],
    "python tools/benchmark.py evaluate": ["--repeats", "1"],
    "python tools/benchmark.py scaling": ["--repeats", "1"],
    "python tools/benchmark.py generate": ["--tokens", "64", "--repeats", "1"],
    "python tools/benchmark.py save": ["--size", "small", "--repeats", "1"],
    "python tools/benchmark.py export": ["--repeats", "1", "--tokens", "2"],
    "python tools/readme_picture.py": ["--out", "demo.png"],
}
SLOW = (
    "deepspeed --num_accelerators", "python tools/experiments", "python tools/benchmark.py",
    "allattn export runs/demo --format", "allattn analyze", "mkdir -p data/wt2", "head -n",
    "allattn prepare --dataset wikitext", "python tools/readme_picture.py",
    "allattn compare dense=runs/readme", "allattn prune exports/demo --method magnitude",
)  # fmt: skip
CANNOT_RUN = {
    "./run.sh": "it would install an environment and run this suite inside of itself",
    "pip install /path": "a test of the package installs it into an environment of its own",
    "tensorboard": "it serves until it is stopped",
    "deepspeed --num_gpus": "it needs eight GPUs",
    "deepspeed --hostfile": "it needs several machines",
    "lm_eval": "the harness is no dependency of the tests",
    "python tools/loaded_suite.py": "it runs this suite eight times",
    "allattn prepare --dataset wikitext-103": "its train split is not among the corpora",
    "OMP_NUM_THREADS=1 python tools/experiments/run.py": "it trains for hours",
    "python tools/experiments/run.py claim1_figure --seeds": "it trains for hours",
}
NEEDS_WIKITEXT = ("mkdir -p data/wt2", "head -n", "allattn prepare --dataset wikitext-2",
                  "python tools/experiments/run.py")  # fmt: skip


@dataclass
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int

    @property
    def commands(self) -> list[str]:
        """Its lines, those that end in a backslash joined with the next."""
        whole = self.text.replace("\\\n", " ")
        return [line.strip() for line in whole.splitlines() if line.strip()]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text[: match.start()].count("\n") + 1)
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def cannot_run(command: str) -> str | None:
    return next((why for start, why in CANNOT_RUN.items() if command.startswith(start)), None)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory, tiny_corpus) -> Path:
    """What the pages take for granted: a corpus, a run of the demo, texts, a treebank."""
    folder = tmp_path_factory.mktemp("workshop")
    shutil.copytree(tiny_corpus, folder / "data" / "tiny")
    for name in ("tools", "allattn"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "demo.yaml").write_text(TINY_RUN.replace("DATA", "data/tiny").replace("RUNS", "runs"))
    text = (ROOT / "allattn/corpora/tiny/valid.txt").read_text(encoding="utf-8")[:3000]
    for name in ("a.txt", "b.txt", "c.txt", "texts/d.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "more" / "e").mkdir(parents=True)
    (folder / "more" / "e" / "f.txt.gz").write_bytes(gzip.compress(text.encode()))
    rows = [json.dumps({"body": line}) for line in text.splitlines()[:20]]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    words = [("She", 2, "nsubj"), ("saw", 0, "root"), ("Anne", 2, "obj"), ("there", 2, "advmod")]
    lines = [f"{i}\t{w}\t_\t_\t_\t_\t{h}\t{r}\t_\t_" for i, (w, h, r) in enumerate(words, 1)]
    (folder / "en_ewt-ud-dev.conllu").write_text(("\n".join(lines) + "\n\n") * 4)
    here = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", "demo.yaml", "run.name=demo"]) == 0
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def scratch(workshop, tmp_path, monkeypatch) -> Path:
    """A copy of the workshop, to work in."""
    folder = tmp_path / "scratch"
    shutil.copytree(workshop, folder, symlinks=True)
    monkeypatch.chdir(folder)
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return folder


def shortened(text: str) -> str:
    for written, tried in SHORTER.items():
        text = text.replace(written, tried)
    return text.replace(" SMALL", "".join(f" {key}={value}" for key, value in SMALL.items()))


def run_command(written: str, capsys) -> None:
    """Run one line of a page, as a shell would, with what makes it short."""
    more = next((m for start, m in MORE_ARGUMENTS.items() if written.startswith(start)), [])
    command, _, target = shortened(written).partition(" > ")
    words = [*shlex.split(command), *more]
    if words[0] in ("mkdir", "head"):
        subprocess.run(shortened(written), shell=True, check=True)
        return
    if words[0] == "allattn":
        capsys.readouterr()
        status, output = main(words[1:]), capsys.readouterr()
        assert status == 0, f"{written}\n{output.err}"
        out = output.out
    else:
        programs = {"python": [sys.executable],
                    "deepspeed": [str(Path(sys.executable).parent / "deepspeed")]}  # fmt: skip
        done = subprocess.run(
            [*programs[words[0]], *words[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{written}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        out = done.stdout
    if target:
        Path(target).write_text(out, encoding="utf-8")


def read_arguments(written: str, slow: bool) -> None:
    """What can be known of a command without running it; importing a tool for that is slow."""
    words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", written))
    if words[0] == "./run.sh":
        subprocess.run(["bash", "-n", str(ROOT / "run.sh")], check=True)
    elif words[0] == "deepspeed":
        assert words[words.index("--module") + 1] == "allattn", written
        argv = words[words.index("--module") + 2 :]
        args, _ = build_parser().parse_known_args(argv)
        assert args.command == "train"
        load_config(args.config, args.overrides)
    elif words[0] == "allattn":
        args, extra = build_parser().parse_known_args(words[1:])
        assert not extra and args.command == words[1], written
    elif words[0] == "python":
        assert (ROOT / words[1]).exists()
        if not slow:
            return
        help_text = subprocess.run(
            [sys.executable, str(ROOT / words[1]), "--help"], capture_output=True, check=True,
            text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout  # fmt: skip
        options = [word for word in words[2:] if word.startswith("--")]
        assert all(option in help_text for option in options), written
    elif words[0] == "tensorboard":
        from tensorboard import program

        program.TensorBoard().configure(argv=words)
    elif words[0] == "lm_eval":
        folder = words[words.index("--include_path") + 1]
        task = words[words.index("--tasks") + 1]
        assert Path(folder, f"{task}.yaml").exists(), "the command before makes the task"
        (model,) = re.findall(r"pretrained=([^,]+)", written)
        assert Path(model, "config.json").exists(), "the command before makes the export"
    else:
        assert words[:2] == ["pip", "install"], written


def try_page(page: Path, slow: bool, capsys, shared: Path | None) -> list[str]:
    """All blocks of a page, in order; returns the commands left out for want of WikiText."""
    left_out = []
    for block in blocks(page):
        if block.language == "yaml":
            Path("mine.yaml").write_text(block.text, encoding="utf-8")
            load_config("mine.yaml")
        elif block.language == "python":
            exec(compile(shortened(block.text), f"{page}:{block.line}", "exec"), {"SMALL": SMALL})
        elif block.language == "sh":
            for command in block.commands:
                is_slow = command.startswith(SLOW)
                if command.startswith(NEEDS_WIKITEXT) and cannot_run(command) is None:
                    if not slow or shared is None:
                        left_out.append(command)
                        continue
                    command = command.replace("DIR/", f"{shared / 'wikitext-2'}/")
                    command = command.replace(
                        "--source wikitext-2/", f"--source {shared}/wikitext-2"
                    )
                if cannot_run(command) is not None:
                    read_arguments(command, slow)
                elif slow or not is_slow:
                    run_command(command, capsys)
    return left_out


every_page = pytest.mark.parametrize("page", READMES, ids=name_of)
WITH_SLOW = [page for page in READMES
             if any(c.startswith(SLOW) and cannot_run(c) is None
                    for b in blocks(page) if b.language == "sh" for c in b.commands)]  # fmt: skip


def test_the_pages_are_found():
    names = {name_of(page) for page in READMES}
    assert names >= {"README.md", "CONTRIBUTING.md", "configs/README.md", "allattn/README.md",
                     "tools/README.md", "tools/experiments/README.md"}  # fmt: skip
    for room in ("pruning", "training", "data", "inference", "analysis"):
        assert f"allattn/{room}/README.md" in names
    commands = [
        c for page in READMES for b in blocks(page) if b.language == "sh" for c in b.commands
    ]
    assert len(commands) > 60
    for start in (*SLOW, *MORE_ARGUMENTS, *CANNOT_RUN, *NEEDS_WIKITEXT):
        assert any(command.startswith(start) for command in commands), f"no command: {start}"


def test_every_room_is_in_the_architecture():
    text = (ROOT / "allattn/README.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (ROOT / "allattn").glob("*/__init__.py")]
    assert len(rooms) > 8
    assert [room for room in rooms if f"| `{room}/` |" not in text] == []


def test_the_first_page_is_short():
    assert (ROOT / "README.md").stat().st_size < LIMIT


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_has_a_language(page):
    """So no command hides from these tests."""
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks(page))
    assert {block.language for block in blocks(page)} <= LANGUAGES


@every_page
def test_quick_commands(page, scratch, capsys):
    if page in (ROOT / "README.md", ROOT / "allattn/data/README.md"):  # they begin with nothing
        shutil.rmtree("runs")
        shutil.rmtree("data")
    try_page(page, False, capsys, None)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SLOW, ids=name_of)
def test_all_commands(page, scratch, capsys, request):
    if page == ROOT / "allattn/data/README.md":
        shutil.rmtree("data")
    shared = Path(__file__).resolve().parents[2] / "shared" / "data"
    left_out = try_page(page, True, capsys, shared if shared.is_dir() else None)
    if left_out:
        pytest.skip(f"no corpora at {shared}; all ran but {'; '.join(left_out)}")


@pytest.mark.slow
def test_deepspeed_reads_its_own_arguments():
    from deepspeed.launcher.runner import parse_args

    commands = [c for page in READMES for b in blocks(page) for c in b.commands
                if c.startswith("deepspeed")]  # fmt: skip
    assert len(commands) > 5
    for command in commands:
        args = parse_args(shlex.split(command)[1:])
        assert args.module and args.user_script == "allattn" and args.user_args[0] == "train"


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may be called."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = [title.strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        assert ROOT in target.resolve().parents or target.resolve() == ROOT
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: {link}"


def test_versions_agree():
    assert allattn.__version__ in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{allattn.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
