"""Named moments at which a test can stop this program, to see what a kill there leaves behind.

`ALLATTN_PAUSE_AT=folder:whole#3` names the third time that a process comes to a moment (`#1` is
the default; `@1` after it means rank 1 alone). The process then writes `MOMENT PID` to the file or
pipe at `ALLATTN_ANNOUNCE_TO` and waits to be killed; a signal that it handles ends the wait, and it
goes on. Without the variable nothing happens.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

PAUSE_AT, ANNOUNCE_TO = "ALLATTN_PAUSE_AT", "ALLATTN_ANNOUNCE_TO"
MOMENTS = {
    "step:backward": "The gradients of a step are there; no weight has moved.",
    "step:logged": "A step is done and its line is in metrics.jsonl; no checkpoint has it.",
    "write:FILE": "FILE, of tensors or JSON, is written, but perhaps not on the disk yet.",
    "folder:whole": "A checkpoint or an export is written; it has not its name yet.",
    "folder:aside": "What had the name is renamed; the new folder does not have the name yet.",
    "folder:placed": "The new folder has the name; the one before it is still there, renamed.",
    "checkpoint:kept": "A checkpoint has its name; older ones are not deleted yet.",
    "checkpoint:going": "An older checkpoint is renamed, to be deleted.",
    "removal:decided": "The gates of a stage are decided; the closed heads are still there.",
    "removal:cut": "Weights, moments and memory are cut; the smaller model is not built yet.",
    "evaluate:segment": "A segment of an evaluation is scored; more are to come.",
    "resume:lines": "The lines of metrics.jsonl that are to stay are written to another file.",
    "export:unproved": "An export is written; no fresh process has evaluated it yet.",
    "prepare:vocabulary": "The words of a block are counted, or sentencepiece has read it.",
    "prepare:block": "The ids of a block are written; more are to come.",
    "prepare:ids": "The ids of all splits are written; the tokenizer is not.",
    "prepare:whole": "A corpus is written; it has not its name yet.",
    "prepare:aside": "The corpus that had the name is renamed; the new one does not have it yet.",
    "prepare:placed": "The new corpus has the name; the one before it is still there, renamed.",
}
_times: Counter[str] = Counter()


def reached(moment: str) -> None:
    """Announce this moment and wait to be killed, if the environment asks for it.

    Args:
        moment: a key of `MOMENTS`, with the name of a file in place of `FILE`.
    """
    wanted = os.environ.get(PAUSE_AT)
    if wanted is None:
        return
    wanted, _, rank = wanted.partition("@")
    name, _, time = wanted.partition("#")
    _times[moment] += 1
    if (moment, _times[moment]) != (name, int(time or 1)) or rank not in (
        "", os.environ.get("RANK", "0"),
    ):  # fmt: skip
        return
    ready, handled = os.pipe()
    os.set_blocking(handled, False)
    before = signal.set_wakeup_fd(handled)  # also a signal that comes before we wait ends the wait
    try:
        with open(os.environ[ANNOUNCE_TO], "a") as file:
            file.write(f"{moment} {os.getpid()}\n")
        os.read(ready, 1)
    finally:
        signal.set_wakeup_fd(before)
        os.close(ready)
        os.close(handled)
