"""`allattn doctor`: looks at everything that training here depends on, in a few seconds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

from allattn.config.shipped import shipped_configs
from allattn.machine.check import Check, worst
from allattn.machine.versions import check_versions

_SECONDS = 60  # DeepSpeed is given up after so long
# in a process of its own: it imports for seconds, and sets up logging and signal handlers
_ASK_DEEPSPEED = """
import os, torch
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
from deepspeed.accelerator import get_accelerator
found = get_accelerator()
print("accelerator", found.device_name(), found.communication_backend_name())
"""


def doctor() -> dict[str, Any]:
    """Look at what training on this machine depends on; compiles and changes nothing.

    Returns:
        `status` (the worst of the checks: `ok`, `warning` or `error`) and `checks`, a list of
        `name`, `status`, `text` (what was found), `todo` (what to do about it) and `value`
        (figures, or None).

    Raises:
        OSError: A file of the installation cannot be read.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _ASK_DEEPSPEED],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as deepspeed:  # works while this process looks at the rest
        try:
            checks = [*check_versions(), _shipped()]
            checks += [*_machine(), _accelerator(deepspeed), *_speed()]
        finally:
            deepspeed.kill()
    return {"status": worst(checks), "checks": [dataclasses.asdict(check) for check in checks]}


def _shipped() -> Check:
    names = ", ".join(shipped_configs())
    if names:
        return Check("configs", "ok", names)
    return Check("configs", "warning", "none ship with this installation", "install allattn again")


def _machine() -> list[Check]:
    try:
        from allattn.machine.hardware import check_devices, check_disk, check_kernel
    except (ImportError, OSError) as error:
        text = f"cannot be imported ({' '.join(str(error).split())})"
        return [Check("PyTorch", "error", text, "pip install --force-reinstall torch")]
    return [*check_devices(), *check_kernel(), check_disk(Path("runs"))]


def _speed() -> list[Check]:
    """Measure last, when nothing else of ours runs."""
    try:
        from allattn.machine.hardware import check_speed
    except (ImportError, OSError):
        return []  # said before
    return [check_speed()]


def _accelerator(process: subprocess.Popen[str]) -> Check:
    """Check what DeepSpeed would compute on and communicate with."""
    todo = "train without its launcher, in one process; or install it again"
    try:
        out, err = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"its import took more than {_SECONDS} s"
        return Check("DeepSpeed's accelerator", "warning", text, todo)
    answers = [line for line in out.splitlines() if line.startswith("accelerator ")]
    if process.returncode or not answers:
        said = (err.strip().splitlines() or ["no message"])[-1]
        return Check("DeepSpeed's accelerator", "warning", f"cannot be imported: {said}", todo)
    _, device, backend = answers[-1].split()
    return Check("DeepSpeed's accelerator", "ok", f"{device}, ranks communicate by {backend}")
