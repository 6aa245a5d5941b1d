"""Run the test suite while every core is busy, and then in random order, to find tests that race.

    python tools/loaded_suite.py                      five loaded runs, then three random orders
    python tools/loaded_suite.py --runs 1 --seeds     one loaded run, no random order
    python tools/loaded_suite.py -- tests/training    arguments for pytest

A busy loop per core runs beside the suite. The loops end with this script, whatever ends it: each
of them watches its parent. The random orders need pytest-random-order. Exit status 1 if a run had a
failure; the logs are in the folder that is named at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOOP = """
import os
parent = int(__import__("sys").argv[1])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy(loops: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep so many cores busy for as long as the context lasts.

    Args:
        loops: how many busy loops to run.

    Yields:
        Their processes.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(loops):
            started.append(subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())]))
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def run_suite(name: str, arguments: list[str], logs: Path) -> bool:
    """Run the suite once, with its output in a log, and print a line about it.

    Args:
        name: of the run, and of its log.
        arguments: for pytest.
        logs: the folder of the logs.

    Returns:
        Whether everything passed.
    """
    log, started = logs / f"{name}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "pytest", *arguments]
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False).returncode
    lines = log.read_text(encoding="utf-8").splitlines() or [""]
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    word = "green" if status == 0 else f"FAILED, status {status}"
    print(f"{name:<12} {word}, {minutes} min {seconds} s: {lines[-1].strip('= ')}", flush=True)
    return status == 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="loaded runs (default: 5)")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[1, 2, 3], help="of random orders (default: 1 2 3)"
    )
    parser.add_argument("--loops", type=int, default=os.cpu_count() or 1, help="default: the cores")
    parser.add_argument("--workers", type=int, default=2, help="of pytest (default: 2)")
    parser.add_argument("--logs", type=Path, help="a folder (default: a temporary one)")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST_ARGUMENT", help="after --")
    args = parser.parse_args(argv)
    if min(args.runs, args.loops, args.workers) < 0:
        parser.error("--runs, --loops and --workers: 0 or more is needed")
    logs = args.logs or Path(tempfile.mkdtemp(prefix="loaded_suite_"))
    logs.mkdir(parents=True, exist_ok=True)
    always = ["-n", str(args.workers), "--dist", "worksteal", *args.arguments]

    def end(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with busy(args.loops):
            good = [run_suite(f"loaded_{i}", always, logs) for i in range(1, args.runs + 1)]
        for seed in args.seeds:
            order = ["--random-order", f"--random-order-seed={seed}"]
            good.append(run_suite(f"order_{seed}", [*order, *always], logs))
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{sum(good)} of {len(good)} runs were green; logs in {logs}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
