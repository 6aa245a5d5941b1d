"""Evaluate an export in the formats `onnx` and `pt2`: the program that is in its file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allattn.config import ModelConfig
from allattn.data.checksum import check_sha256
from allattn.inference import onnx, pt2
from allattn.inference.evaluate import scores
from allattn.inference.load import open_corpus
from allattn.inference.numbers import DTYPES
from allattn.inference.programs import Call, program_nats
from allattn.training.state import blaming, check_export_version, read_json


class StoredProgram:
    """A program and what `program_nats` needs to know of it.

    Attributes:
        info: the export's config.json.
        config: the model's shape; its seq_len is the longest call.
        call: runs the program.
    """

    def __init__(self, folder: Path, info: dict[str, Any]):
        """Load it.

        Raises:
            ValueError: a damaged file, or what runs it is not installed.
        """
        self.info, self.folder = info, folder
        with blaming(folder / "config.json"):
            check_export_version(folder / "config.json", info)
            check_sha256(folder, info["sha256"], f"model.{info['format']}")
            self.data, self.tokenizer = str(info["data"]), info["tokenizer"]
            self.config = ModelConfig(**info["model"])
            self._shapes = info["program"]["state_shapes"]
            self._dtype = torch.float32
            if info["format"] == "pt2":
                self._dtype = DTYPES[info["numbers"]]
        if info["format"] == "onnx":
            onnx.need_onnxruntime()
            self.call: Call = onnx.session_call(folder / onnx.MODEL_FILE)
        else:
            self.call = pt2.load_call(folder / pt2.MODEL_FILE)

    def start(self, batch: int) -> list[Tensor]:
        """The state of a stream's start, as `Program.start` gives it."""
        state = [torch.full((batch,), self.config.mem_len)]
        return state + [torch.zeros(batch, *shape, dtype=self._dtype) for shape in self._shapes]

    def parameters(self) -> Iterator[Tensor]:
        """One, for its device."""
        yield torch.zeros(0)


def open_program(folder: str | Path) -> StoredProgram | None:
    """An export in the formats `onnx` or `pt2`; None: the folder is something else."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        return None
    info = read_json(folder / "config.json")
    if not isinstance(info, dict) or info.get("format") not in ("onnx", "pt2"):
        return None
    return StoredProgram(folder, info)


def evaluate_program(program: StoredProgram, data: str | Path | None, split: str) -> dict[str, Any]:
    """As `evaluate.evaluate`, for a program.

    Args:
        program: in its file.
        data: a prepared corpus; None: that of training.
        split: of it.

    Raises:
        ValueError, FileNotFoundError: no such corpus, or one with another tokenizer.
    """
    corpus = open_corpus(data, program.data, program.tokenizer, program.folder)
    started = time.perf_counter()
    nats, n = program_nats(program.call, program, corpus, split)
    result = scores(program.config, nats, n, corpus.splits[split], started)
    return {"model": str(program.folder), "split": split} | result
