"""The picture and the table of the README come from the runs named, or one line says why not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

import allattn

TOOL = Path(__file__).resolve().parents[2] / "tools" / "readme_picture.py"
spec = importlib.util.spec_from_file_location("readme_picture", TOOL)
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture(scope="session")
def compared(finished_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    allattn.compare({"dense": finished_run, "small": finished_run}, folder)
    return folder / "compare.json"


def test_a_picture_and_a_table(compared, finished_run, tmp_path, capsys):
    out = tmp_path / "demo.png"
    run = str(finished_run)
    assert tool.main([str(compared), run, run, "--out", str(out)]) == 0
    with Image.open(out) as picture:
        assert picture.width > 1200 and picture.height > 600
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
    rows = json.loads(compared.read_text())
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 4 and table[0].startswith("| heads kept | heads by layer |")
    heads = " ".join(map(str, rows[1]["heads"]))
    assert table[3].startswith(f"| 50% | {heads} | {rows[1]['params_non_embedding']:,} | ")
    assert table[3].endswith(f"| {rows[1]['valid_ppl']:.2f} | {rows[1]['test_ppl']:.2f} |")


def test_the_table_of_the_readme_is_that_of_the_picture():
    rows = json.loads(tool.OUT.with_suffix(".json").read_text(encoding="utf-8"))
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.filled(page, rows) == page
    assert [row["keep"] for row in rows] == [1, 0.75, 0.5, 0.25]
    for row in rows:
        assert [sum(layer) for layer in row["map"]] == row["heads"]


def test_it_writes_into_the_page(compared, finished_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "PAGE", tmp_path / "README.md")
    out, run = tmp_path / "demo.png", str(finished_run)
    arguments = [str(compared), run, run, "--out", str(out), "--write"]
    tool.PAGE.write_text("no markers\n")
    assert tool.main(arguments) == 1 and not out.exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tool.PAGE) in line and tool.PAGE.read_text() == "no markers\n"
    tool.PAGE.write_text(f"before\n{tool.BEGIN}yesterday{tool.END}\nafter\n")
    assert tool.main(arguments) == 0
    table = capsys.readouterr().out.strip()
    assert tool.PAGE.read_text() == f"before\n{tool.BEGIN}{table}{tool.END}\nafter\n"
    assert tool.table(json.loads(out.with_suffix(".json").read_text())) == table


def test_the_map_has_the_heads_that_are_left(finished_run):
    found = tool.heads_left(finished_run)
    assert [sum(layer) for layer in found] == allattn.load_pretrained(finished_run).config.heads
    assert [len(layer) for layer in found] == [4, 4]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder, run: (folder / "compare.json").unlink(), "No such file"),
        (lambda folder, run: (folder / "compare.json").write_text("{"), "not JSON"),
        (lambda folder, run: (folder / "compare.json").write_text("[]"), "has 0 rows for 2 runs"),
        (lambda folder, run: (folder / "compare.json").write_text("5"), "has 0 rows for 2 runs"),
        (lambda folder, run: (folder / "compare.json").write_text("[{}, {}]"), "a row has no run"),
        (lambda folder, run: (folder / "compare.json").write_text("[1, 2]"), "a row has no run"),
        (lambda folder, run: (run / "metrics.jsonl").unlink(), "No such file"),
        (lambda folder, run: (run / "metrics.jsonl").write_text("{}\n"), "no evaluation"),
        (lambda folder, run: (run / "metrics.jsonl").write_text("{}\nx\n"), ":2: not a line"),
        (
            lambda folder, run: (run / "metrics.jsonl").write_text('{"p_open": [[0.5], [null]]}\n'),
            "has other heads than 'dense'",
        ),
    ],
)
def test_what_is_wrong_is_one_line(compared, finished_run, tmp_path, capsys, break_it, words):
    run, out = tmp_path / "run", tmp_path / "demo.png"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes((finished_run / "metrics.jsonl").read_bytes())
    (tmp_path / "compare.json").write_bytes(compared.read_bytes())
    break_it(tmp_path, run)
    arguments = [str(tmp_path / "compare.json"), str(run), str(run), "--out", str(out)]
    assert tool.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("readme_picture: error: ") and words in line
    assert not out.exists()
