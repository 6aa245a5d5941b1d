"""A text of the size of WikiText-103 on a laptop: seconds, megabytes, and a start at once."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from allattn.data.lanes import Corpus, Lanes
from allattn.data.tokenizers import WordTokenizer

pytestmark = pytest.mark.slow
COPIES = 50  # of WikiText-2, lines permuted: 540 MB
LEAST = {"word": 5, "sentencepiece": 2, "byte": 5}  # MB/s a core


@pytest.fixture(scope="module")
def large_text(shared_data, tmp_path_factory):
    lines = (shared_data / "wikitext-2" / "wiki.train.tokens").read_bytes().splitlines(True)
    path = tmp_path_factory.mktemp("large") / "train.txt"
    draw = random.Random(1)
    with path.open("wb") as file:
        for _ in range(COPIES):
            draw.shuffle(lines)
            file.writelines(lines)
    yield path
    path.unlink()


def resident(pid: int) -> int:
    """Bytes in memory of a process and those that it started."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = {c for task in tasks for c in (task / "children").read_text().split()}
    except (OSError, ValueError):
        return 0  # it has just ended
    return pages * resource.getpagesize() + sum(resident(int(child)) for child in children)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", LEAST)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_speed_and_memory(large_text, tmp_path, kind, workers):
    argv = ["prepare", "--train", str(large_text), "--out", str(tmp_path / "out")]
    argv += ["--tokenizer", kind, "--workers", str(workers)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "allattn", *argv], env=env)
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(0.1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    speed = large_text.stat().st_size / 1e6 / seconds  # of all cores together
    print(f"{kind}, {workers} workers: {speed:.1f} MB/s a core, {peak / 1e6:.0f} MB")
    assert peak < 1.5e9 and speed > LEAST[kind]
    if kind == "word":
        assert Corpus(tmp_path / "out").splits["train"]["tokens"] == COPIES * 2_088_628


def test_a_corpus_of_100_million_tokens_starts_within_a_second(tmp_path):
    words = WordTokenizer(["<eos>", "<unk>", *map(str, range(267_733))])
    words.save(tmp_path)
    n = 100_000_000
    np.memmap(tmp_path / "train.bin", "<u4", "w+", shape=(n,))[-1] = 267_734
    info = {"format_version": 1, "dtype": "uint32", "vocab_size": words.vocab_size}
    info |= {"splits": {"train": {"tokens": n, "sha256": ""}}, "tokenizer": words.describe()}
    (tmp_path / "data.json").write_text(json.dumps(info))
    started = time.perf_counter()
    lanes = Lanes(Corpus(tmp_path).tokens("train"), 64, 150, shift_seed=1)
    lanes.batch(0, 0, 64)
    assert time.perf_counter() - started < 1
    np.memmap(tmp_path / "train.bin", "<u4", "r+", shape=(n,))[-1] = 267_735
    with pytest.raises(ValueError, match="token id 267735 in a vocabulary of 267735"):
        Corpus(tmp_path).tokens("train")
