"""A text of the size of WikiText-103 on a laptop; `tools/benchmark.py data` says how fast it is."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest

from allattn.data.lanes import Corpus, Lanes
from allattn.data.tokenizers import WordTokenizer

pytestmark = pytest.mark.slow
COPIES = 50  # of WikiText-2, lines permuted: 540 MB
KINDS = ["word", "sentencepiece", "byte"]


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


# It prints the peak of its own memory and that of its largest worker
PREPARE = """
import resource, sys
from allattn.cli import main
if __name__ == "__main__":
    status = main(sys.argv[1:])
    print(*(resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    sys.exit(status)
"""


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_memory(large_text, tmp_path, kind, workers):
    argv = ["prepare", "--train", str(large_text), "--out", str(tmp_path / "out")]
    argv += ["--tokenizer", kind, "--workers", str(workers)]
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, *argv], stdout=subprocess.PIPE, text=True, check=True
    )
    own, worker = map(int, done.stdout.splitlines()[-1].split())
    unit = 1 if sys.platform == "darwin" else 1024
    assert unit * (own + (workers * worker if workers > 1 else 0)) < 1.5e9
    if kind == "word":
        assert Corpus(tmp_path / "out").splits["train"]["tokens"] == COPIES * 2_088_628


def test_a_corpus_of_100_million_tokens(tmp_path):
    words = WordTokenizer(["<eos>", "<unk>", *map(str, range(267_733))])
    words.save(tmp_path)
    n = 100_000_000
    np.memmap(tmp_path / "train.bin", "<u4", "w+", shape=(n,))[-1] = 267_734
    info = {"format_version": 1, "dtype": "uint32", "vocab_size": words.vocab_size}
    info |= {"splits": {"train": {"tokens": n, "sha256": ""}}, "tokenizer": words.describe()}
    (tmp_path / "data.json").write_text(json.dumps(info))
    lanes = Lanes(Corpus(tmp_path).tokens("train"), 64, 150, shift_seed=1)
    assert lanes.batch(0, 0, 64)[0].shape == (64, 150)
    np.memmap(tmp_path / "train.bin", "<u4", "r+", shape=(n,))[-1] = 267_735
    with pytest.raises(ValueError, match="token id 267735 in a vocabulary of 267735"):
        Corpus(tmp_path).tokens("train")
