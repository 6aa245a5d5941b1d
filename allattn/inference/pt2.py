"""`export --format pt2`: the model through torch.export, and compiled ahead of time with `--aot`.

`model.pt2` runs wherever PyTorch is, without this package. `compiled.pt2` (AOTInductor) holds
machine code for the processor that it was made on.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from allattn.config import UnavailableError
from allattn.inference.programs import Call, Program, trace

MODEL_FILE = "model.pt2"
COMPILED_FILE = "compiled.pt2"


def need_compiler() -> None:
    """Refuse in one line where there is no C++ compiler.

    Raises:
        ValueError: none was found.
    """
    from torch._inductor import config

    wanted = [
        c for c in (config.cpp.cxx if isinstance(config.cpp.cxx, tuple) else (config.cpp.cxx,)) if c
    ]
    if not any(shutil.which(name) for name in wanted):
        raise UnavailableError(
            "aot", f"needs a C++ compiler ({' or '.join(wanted)}); install g++, or set CXX to one"
        )


def save(program: Program, path: Path) -> Call:
    """Write `model.pt2`; returns what is in the file, as a function of tensors."""
    torch.export.save(trace(program), path)
    return load_call(path)


def load_call(path: Path) -> Call:
    """A file that `save` wrote."""
    module = torch.export.load(path).module()

    def call(ids: Tensor, wanted: Tensor, state: list[Tensor]) -> list[Tensor]:
        return list(module(ids, wanted, state))

    return call


def compile_ahead(program: Program, path: Path) -> Call:
    """Write `compiled.pt2`; returns what is in the file."""
    torch._inductor.aoti_compile_and_package(trace(program), package_path=str(path))
    return load_compiled(path)


def load_compiled(path: Path) -> Call:
    """A file that `compile_ahead` wrote, on a processor like the one that wrote it."""
    module = torch._inductor.aoti_load_package(str(path))

    def call(ids: Tensor, wanted: Tensor, state: list[Tensor]) -> list[Tensor]:
        return list(module(ids, wanted, state))

    return call
