"""What `allattn export` writes into the folder, by format and by how numbers are stored.

`hf`: the weights themselves. `onnx`, `pt2`: the model as a program for other people's tools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allattn.config import ArgumentError
from allattn.data.lanes import Corpus
from allattn.inference import onnx, pt2
from allattn.inference.export import Write, write_weights
from allattn.inference.load import Source, build_model
from allattn.inference.numbers import SPLIT, round_weights, rounded, source_perplexity
from allattn.inference.programs import (
    Call,
    Program,
    check,
    model_call,
    program_perplexity,
)

FORMATS = ("hf", "onnx", "pt2")
NUMBERS = ("fp32", "bf16", "fp16", "int8")


@dataclass
class Numbers:
    """What an export stores.

    Attributes:
        dtype: one of NUMBERS.
        corpus: to measure perplexity before and after on, where dtype is not fp32; None: do not.
    """

    dtype: str = "fp32"
    corpus: Corpus | None = None

    def measured(self, source: Source, after: Callable[[Corpus], float]) -> dict[str, Any]:
        """`perplexity` for config.json."""
        if self.corpus is None or self.dtype == "fp32":
            return {}
        before = source_perplexity(source, self.corpus)
        found = {"split": SPLIT, "fp32": before, self.dtype: after(self.corpus)}
        return {"perplexity": found}


def writer(
    format: str, numbers: Numbers, *, aot: bool = False, seq_len: int | None = None
) -> Write:
    """The function that fills an export's folder.

    Args:
        format: one of FORMATS.
        numbers: how they are stored.
        aot: pt2: compile as well.
        seq_len: onnx, pt2: tokens of the longest call; None: those of a segment in training.

    Raises:
        ConfigError, ValueError: what cannot be, or what is not installed.
    """
    if format != "pt2" and aot:
        raise ArgumentError(
            "aot", f"compiles a program of {{format}} pt2, not of {format}", ("format",)
        )
    if format == "hf" and seq_len is not None:
        raise ArgumentError(
            "seq_len", "weights have no longest call; for {format} onnx or pt2", ("format",)
        )
    if seq_len is not None and seq_len < 1:
        raise ArgumentError("seq_len", f"1 or more is needed, not {seq_len}")
    if format != "onnx" and numbers.dtype == "int8":
        raise ArgumentError(
            "dtype",
            "{format} onnx has int8; PyTorch's own quantisation covers no persistent vectors",
            ("format",),
        )
    if format == "hf":
        return lambda source, folder, info: _write_weights(source, folder, info, numbers)
    if format == "onnx":
        onnx.need_onnx()
    elif aot:
        pt2.need_compiler()

    def write(source: Source, folder: Path, info: dict[str, Any]) -> None:
        changes: dict[str, Any] = {"attention": "reference"}
        if seq_len is not None:
            changes["seq_len"] = seq_len
        model = build_model(source.weights, **changes)
        program = Program(build_model(_copied(source).weights, **changes))
        check(program, model_call(model), program, "this model")
        info.update(format=format, numbers=numbers.dtype, heads=source.config.heads)
        info["model"] = dataclasses.asdict(program.config)
        info["program"] = {
            "longest_call": program.config.seq_len,
            "state": program.state_names(),
            "state_shapes": [list(t.shape[1:]) for t in program.start(1)[1:]],
        }
        if format == "onnx":
            call = _write_onnx(program, model_call(model), folder, numbers.dtype)
        else:
            call = _write_pt2(program, model_call(model), folder, numbers.dtype)
            if aot:
                compiled = pt2.compile_ahead(program, folder / pt2.COMPILED_FILE)
                if numbers.dtype == "fp32":
                    check(compiled, program, program, pt2.COMPILED_FILE)
                info["compiled"] = True
        info |= numbers.measured(source, lambda c: program_perplexity(call, program, c, SPLIT))
        source.tokenizer().save(folder)

    return write


def _write_weights(source: Source, folder: Path, info: dict[str, Any], numbers: Numbers) -> None:
    if numbers.dtype != "fp32":
        smaller = round_weights(source, numbers.dtype)
        info["numbers"] = numbers.dtype
        info |= numbers.measured(source, lambda corpus: source_perplexity(smaller, corpus))
        source = smaller
    write_weights(source, folder, info)


def _write_onnx(program: Program, expected: Call, folder: Path, dtype: str) -> Call:
    import onnx as library

    path = folder / onnx.MODEL_FILE
    proto = onnx.to_onnx(program)
    library.save(proto, path)
    check(onnx.session_call(path), expected, program, onnx.MODEL_FILE)
    if dtype == "int8":
        plain = path.replace(folder / "plain.onnx")
        onnx.quantise(plain, path)
        plain.unlink()
    elif dtype != "fp32":
        rounded(dict(program.named_parameters()) | dict(program.named_buffers()), dtype)
        onnx.store_as(proto, dtype)
        library.save(proto, path)
        onnx.round_program(program, dtype)
        check(onnx.session_call(path), program, program, f"{onnx.MODEL_FILE} in {dtype}")
    return onnx.session_call(path)


def _write_pt2(program: Program, expected: Call, folder: Path, dtype: str) -> Call:
    path = folder / pt2.MODEL_FILE
    if dtype == "fp32":
        call = pt2.save(program, path)
        check(call, expected, program, pt2.MODEL_FILE)
        return call
    program.load_state_dict(rounded(program.state_dict(), dtype), assign=True)
    return pt2.save(program, path)


def _copied(source: Source) -> Source:
    """With weights of its own, for a program that changes them."""
    parameters = {name: t.clone() for name, t in source.weights.parameters.items()}
    return dataclasses.replace(
        source, weights=dataclasses.replace(source.weights, parameters=parameters)
    )
