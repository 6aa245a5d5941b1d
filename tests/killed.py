"""Processes that are killed at a named moment (see `allattn.moments`), and never after a delay."""

from __future__ import annotations

import multiprocessing
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from allattn.cli import main
from allattn.data.lanes import Corpus
from allattn.inference import proof
from allattn.inference.evaluate import evaluate_source
from allattn.inference.load import open_source
from allattn.inference.stored import evaluate_program, open_program
from allattn.moments import ANNOUNCE_TO, PAUSE_AT

# Seconds after which a process counts as hung. Nothing here takes a tenth of it on a busy machine,
# so it measures nothing: it only keeps a hang from being waited for.
HANG = 1200

# Processes are forked from one that has imported everything already, which saves seconds each
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["allattn.inference.export", "allattn.training.trainer", "allattn.data.prepare", "killed"]
)


def evaluate_here(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """What `proof.evaluate_afresh` finds, without a fresh process: that saves seconds each."""
    program = open_program(folder)
    if program is not None:
        return evaluate_program(program, str(corpus.dir), proof.SPLIT)
    return evaluate_source(open_source(folder), corpus, proof.SPLIT)


class Announcement:
    """A pipe on which a process says that it has come to a moment."""

    def __init__(self, moment: str):
        """Of a moment, as `ALLATTN_PAUSE_AT` has it."""
        self.moment = moment
        self.receiver, self.sender = multiprocessing.Pipe(duplex=False)

    def environment(self) -> dict[str, str]:
        """What the process needs to know, where it has inherited `sender`."""
        return {PAUSE_AT: self.moment, ANNOUNCE_TO: f"/dev/fd/{self.sender.fileno()}"}

    def wait(self) -> int:
        """The id of the process that waits there; AssertionError where all ended without."""
        self.sender.close()  # so that a process that ends is the last to hold it
        ready, _, _ = select.select([self.receiver], [], [], HANG)
        said = os.read(self.receiver.fileno(), 1000).decode() if ready else "hung"
        self.receiver.close()
        moment, _, pid = said.strip().rpartition(" ")
        assert moment == self.moment.partition("#")[0].partition("@")[0], f"{self.moment}: {said!r}"
        return int(pid)


class Child:
    """`allattn ARGUMENTS` in a process of its own, which pauses at a moment or runs to its end."""

    def __init__(self, folder: Path, *arguments: object, at: str | None = None, **limits: int):
        """Start it.

        Args:
            folder: for what it prints; made where it is missing.
            arguments: of the command.
            at: the moment to pause at.
            limits: of `resource.setrlimit`, by name.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.announcement = folder, Announcement(at or "never")
        sender = self.announcement.sender
        argv = [str(argument) for argument in arguments]
        self.process = FORKS.Process(target=_run, args=(folder, argv, at, sender, limits))
        self.process.start()
        if at is None:
            sender.close()

    def wait(self) -> None:
        """It has come to its moment."""
        try:
            self.announcement.wait()
        except AssertionError as error:
            self.process.join(HANG)
            raise AssertionError(f"{error}\n{self.printed()}") from None

    def killed(self, how: signal.Signals = signal.SIGKILL) -> None:
        """It is killed where it waits, and has ended of that."""
        os.kill(self.process.pid, how)
        assert self.ended() == -how, self.printed()

    def ended(self) -> int:
        """Its exit status."""
        self.process.join(HANG)
        assert self.process.exitcode is not None, f"hung\n{self.printed()}"
        return self.process.exitcode

    def printed(self, *names: str) -> str:
        """What it printed on `stdout`, on `stderr`, or on both."""
        return "".join((self.folder / name).read_text() for name in names or ("stdout", "stderr"))


def done(folder: Path, *arguments: object) -> Child:
    """`allattn ARGUMENTS`, which ends well."""
    child = Child(folder, *arguments)
    assert child.ended() == 0, child.printed()
    return child


def killed(folder: Path, *arguments: object, at: str) -> None:
    """`allattn ARGUMENTS`, killed at a moment."""
    child = Child(folder, *arguments, at=at)
    child.wait()
    child.killed()


def _run(folder: Path, argv: list[str], at: str | None, sender, limits: dict[str, int]) -> None:
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream.fileno())
    torch.set_num_threads(1)
    proof.evaluate_afresh = evaluate_here
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if at is not None:
        os.environ |= {PAUSE_AT: at, ANNOUNCE_TO: f"/dev/fd/{sender.fileno()}"}
    sys.exit(main(argv))
