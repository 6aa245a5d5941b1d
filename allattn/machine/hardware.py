"""Looks at the devices, the compiler and the speed of this machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from allattn.machine.check import Check
from allattn.model import build, kernel
from allattn.training.speed import matmul_rate

_ROOM = 2e9  # bytes; checkpoints of a small model fill less
_SECONDS = 0.2  # to repeat a product in


def cpu_name() -> str:
    """Name the processor, and say how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def device_name() -> str:
    """Name the device that `auto` takes."""
    if not torch.cuda.is_available():
        return f"cpu ({cpu_name()})"
    return f"cuda ({torch.cuda.device_count()} x {torch.cuda.get_device_name()})"


def check_devices() -> list[Check]:
    """Check the processor and every GPU, each with its memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.exists() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        total = min(total, int(text) / 1e9)
    value = {"memory_gb": total, "threads": float(torch.get_num_threads())}
    text = f"{cpu_name()}, {torch.get_num_threads()} threads, {total:.1f} GB of memory"
    checks = [Check("cpu", "ok", text, value=value)]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, size = (n / 1e9 for n in torch.cuda.mem_get_info(i))
            text = f"{torch.cuda.get_device_name(i)}, {free:.1f} of {size:.1f} GB free"
            value = {"memory_gb": size, "free_gb": free}
            checks.append(Check(f"cuda:{i}", "ok", text, value=value))
    elif shutil.which("nvidia-smi"):
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "is for CPUs"
        todo = "install a PyTorch for CUDA that is not newer than the driver (see nvidia-smi)"
        text = f"this machine has nvidia-smi, but PyTorch, which {built}, finds no GPU"
        checks.append(Check("cuda", "warning", text, todo))
    else:
        checks.append(Check("cuda", "ok", "no GPU: training takes the CPU"))
    return checks


def check_kernel() -> list[Check]:
    """Check the compiler and the attention kernel that it makes for the CPU; compile nothing."""
    built = build.find_built()
    try:
        compiler = build.find_compiler()
        found = " and ".join(build.instructions()) or "no wide vectors"
        checks = [Check("compiler", "ok", f"{compiler}, which has {found} on this CPU")]
    except (OSError, subprocess.SubprocessError) as error:
        if built is None:
            text = f"{error}: attention on the CPU goes through PyTorch's own operations, slower"
            return [Check("compiler", "warning", text, "install g++, or set CXX to a C++ compiler")]
        checks = [Check("compiler", "ok", f"{error}; the kernel was compiled before")]
    if built is not None:
        if why := kernel.what_is_wrong(built):
            return [*checks, Check("kernel", "warning", f"{built}: {why}", f"delete {built}")]
        return [*checks, Check("kernel", "ok", f"compiled and checked: {built}")]
    folder = build.cache_folder()
    if folder is None:
        todo = "set TORCH_EXTENSIONS_DIR to a folder that can be written"
        text = "no folder to keep the compiled kernel in"
        return [*checks, Check("kernel", "warning", text, todo)]
    text = f"not compiled yet: the first training does it, in about 10 s, in {folder}"
    return [*checks, Check("kernel", "ok", text)]


def check_disk(runs: Path) -> Check:
    """Check that there is room where runs go by default."""
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB free in {place}"
    value = {"free_gb": free / 1e9}
    if not os.access(place, os.W_OK):
        todo = "go to a folder that can be written, or set run.dir"
        return Check("disk", "warning", f"{place} cannot be written", todo, value)
    if free < _ROOM:
        todo = "make room, set run.dir to another disk, or keep fewer checkpoints: train.keep_last"
        return Check("disk", "warning", text, todo, value)
    return Check("disk", "ok", text, value=value)


def check_speed() -> Check:
    """Measure, for a moment, the fastest matrix product in float32 and bfloat16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    rates = {k: matmul_rate(device, dtype, _SECONDS) / 1e9 for k, dtype in dtypes.items()}
    text = ", ".join(f"{rate:,.0f} GFLOP/s in {name}" for name, rate in rates.items())
    if rates["bf16"] < rates["fp32"]:
        text += "; train.precision fp32 is the faster one here"
    return Check("matrix products", "ok", f"{text} ({device.type})", value=rates)
