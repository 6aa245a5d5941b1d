"""How fast a corpus is prepared, opened and read: the `data` part of benchmark.py."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import device_name

from allattn.data.lanes import FORMAT_VERSION, Corpus, Lanes
from allattn.data.prepare import TINY
from allattn.data.tokenizers import WordTokenizer

KINDS = ("word", "sentencepiece", "byte")
LANES, SEGMENT = 64, 150  # of the batches that are timed
_PREPARE = """
import resource, sys
from allattn.cli import main
if __name__ == "__main__":
    status = main(sys.argv[1:])
    print(*(resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    sys.exit(status)
"""


def benchmark_data(args: argparse.Namespace) -> dict[str, Any]:
    """Preparing a text with each tokenizer, opening a large corpus, and a batch of it."""
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        text = Path(args.paths[0]) if args.paths else _text(folder, args.megabytes)
        rows = [
            prepared(text, folder / "out", kind, workers)
            for kind in KINDS
            for workers in args.workers
        ]
        opened = opening(folder / "large", args.corpus_tokens, args.repeats)
    return {"device": device_name(), "megabytes": rows[0]["megabytes"], **opened, "rows": rows}


def prepared(text: Path, out: Path, kind: str, workers: int) -> dict[str, Any]:
    """Prepare a text in a process of its own.

    Returns:
        MB of text a second of wall time, MB a second of all cores' time together, and a bound on
        the memory of all its processes: its own peak, and the largest worker's for each worker.
    """
    options = ["--train", text, "--out", out, "--tokenizer", kind, "--workers", workers]
    options += ["--overwrite"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE, "prepare", *map(str, options)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    own, worker = map(int, done.stdout.splitlines()[-1].split())
    unit = 1 if sys.platform == "darwin" else 1024
    megabytes = text.stat().st_size / 1e6
    return {
        "tokenizer": kind,
        "workers": workers,
        "megabytes": megabytes,
        "megabytes_per_second": megabytes / seconds,
        "megabytes_per_core_second": megabytes / busy,
        "memory_mb": unit * (own + workers * worker) / 1e6 if workers > 1 else unit * own / 1e6,
    }


def opening(folder: Path, n: int, repeats: int) -> dict[str, float]:
    """Time from opening a corpus of n tokens to its first batch, and of a batch after that."""
    folder.mkdir()
    words = WordTokenizer(["<eos>", "<unk>", *map(str, range(267_733))])
    words.save(folder)
    np.memmap(folder / "train.bin", "<u4", "w+", shape=(n,))[-1] = words.vocab_size - 1
    info = {"format_version": FORMAT_VERSION, "dtype": "uint32", "vocab_size": words.vocab_size}
    info |= {"splits": {"train": {"tokens": n, "sha256": ""}}, "tokenizer": words.describe()}
    (folder / "data.json").write_text(json.dumps(info), encoding="utf-8")
    started = time.perf_counter()
    lanes = Lanes(Corpus(folder).tokens("train"), LANES, SEGMENT, shift_seed=1)
    lanes.batch(0, 0, LANES)
    opened = time.perf_counter() - started
    times = []
    for step in range(1, 1 + max(repeats, 1) * 20):
        started = time.perf_counter()
        lanes.batch(step, 0, LANES)
        times.append(time.perf_counter() - started)
    return {
        "corpus_tokens": n,
        "seconds_to_first_batch": opened,
        "batch_milliseconds": 1000 * statistics.median(times),
    }


def _text(folder: Path, megabytes: float) -> Path:
    """The text of the tiny corpus, again and again."""
    path, once = folder / "train.txt", (TINY / "train.txt").read_bytes()
    path.write_bytes(once * max(1, round(megabytes * 1e6 / len(once))))
    return path
