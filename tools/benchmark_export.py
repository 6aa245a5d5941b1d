"""Compare exports: what share of the removed heads comes back as time. Called by benchmark.py.

    python tools/benchmark.py export DENSE A B ... [--engine pytorch onnx int8] [--batches 1 8 32]

The first export is what the others are compared with. `first_ms`: a prompt of `--prompt` tokens,
from an empty memory to the log-probabilities of what follows it. `tokens_per_second`: of
generation, one token a call for every sequence of the batch, after that prompt. `first_back` and
`token_back` are (1 - time / dense time) / (1 - heads / dense heads): 1 where time falls as heads
do. `first_fixed` and `token_fixed` are the shares of the dense time that a model without any head
takes (embedding, vocabulary, calls): nothing of that can come back. `vs_even`: time a token over
that of an export in the list with as many heads spread evenly; above 1, uneven heads cost time.
Peak memory is of a fresh process that loads the export and does both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from measure import device_name, in_turn, peak_resident_mb, zipf_tokens

from allattn.inference.export import export
from allattn.inference.load import Source, load_pretrained, open_source
from allattn.inference.onnx import quantise, session_call, to_onnx
from allattn.inference.programs import Call, Program
from allattn.inference.prune import cut_source
from allattn.model.transformer import count_parameters

ENGINES = ("pytorch", "onnx", "int8")
NO_HEADS = "(no heads)"


class Stream:
    """A batch of prompts, and then a token after the other."""

    def __init__(self, engine: str, path: Path, batch: int, prompt: int):
        """Load an export folder (pytorch) or a .onnx file."""
        info = json.loads(path.with_name("config.json").read_text())
        vocab_size, self.longest = info["model"]["vocab_size"], info["model"]["seq_len"]
        self.ids = zipf_tokens(vocab_size, (batch, prompt))
        self.call: Call | None = None if engine == "pytorch" else session_call(path)
        if self.call is None:
            self.model = load_pretrained(path.parent)
        self.start = [] if self.call is None else _start(path, batch)

    @torch.no_grad()
    def first(self) -> None:
        """The prompt, in segments; log-probabilities of its last position."""
        self.memory = self.model.empty_cache() if self.call is None else list(self.start)
        for part in self.ids.split(self.longest, dim=1):
            self._advance(part)

    def token(self) -> None:
        """One more token of every sequence."""
        self._advance(self.ids[:, :1])

    @torch.no_grad()
    def _advance(self, ids: torch.Tensor) -> None:
        if self.call is None:
            self.memory = self.model(ids, memory=self.memory, last_only=True).memory
        else:
            _, *self.memory = self.call(ids, torch.tensor([ids.shape[1] - 1]), self.memory)


def _start(path: Path, batch: int) -> list[torch.Tensor]:
    """A state at the start of a stream, from the shapes in the file."""
    shapes = [
        [d.dim_value for d in value.type.tensor_type.shape.dim[1:]]
        for value in onnx.load(path, load_external_data=False).graph.input[3:]
    ]
    mem_len = json.loads(path.with_name("config.json").read_text())["model"]["mem_len"]
    return [torch.full((batch,), mem_len), *(torch.zeros(batch, *shape) for shape in shapes)]


def prepare(source: Source, folder: Path, engines: list[str]) -> dict[str, Path]:
    """The file that each engine loads."""
    export(source, folder, check=False)
    paths = {"pytorch": folder / "model.safetensors"}
    if set(engines) - {"pytorch"}:
        config = dataclasses.replace(source.config, attention="reference")
        weights = dataclasses.replace(source.weights, config=config)
        paths["onnx"], paths["int8"] = folder / "model.onnx", folder / "int8.onnx"
        onnx.save(to_onnx(Program(weights.build())), paths["onnx"])
        if "int8" in engines:
            quantise(paths["onnx"], paths["int8"])
    return paths


def without_heads(source: Source) -> Source:
    """What the rest of a model costs: the same one without any head."""
    return cut_source(source, [[] for _ in source.config.heads])


def peak_memory_mb(engine: str, path: Path, batch: int, prompt: int) -> float:
    """Peak of a fresh process, in MB."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (engine, path, batch, prompt, torch.get_num_threads(), sender)
    worker = context.Process(target=_peak_memory, args=arguments)
    worker.start()
    sender.close()  # so that a worker that died ends the wait
    result = receiver.recv()
    worker.join()
    return result


def _peak_memory(
    engine: str, path: Path, batch: int, prompt: int, threads: int, sender: Any
) -> None:
    torch.set_num_threads(threads)
    stream = Stream(engine, path, batch, prompt)
    stream.first()
    for _ in range(4):
        stream.token()
    sender.send(peak_resident_mb())


def benchmark_export(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each engine, batch and export."""
    sources = {str(path): open_source(path) for path in args.paths}
    dense = next(iter(sources))
    sources[NO_HEADS] = without_heads(sources[dense])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        paths = {
            name: prepare(source, Path(folder) / f"export_{i}", args.engine)
            for i, (name, source) in enumerate(sources.items())
        }
        for engine in args.engine:
            for batch in args.batches:
                streams = {
                    name: Stream(engine, paths[name][engine], batch, args.prompt)
                    for name in sources
                }
                first = in_turn({name: s.first for name, s in streams.items()}, args.repeats)
                steps = {name: _several(s.token, args.tokens) for name, s in streams.items()}
                token = {k: t / args.tokens for k, t in in_turn(steps, args.repeats).items()}
                del streams, steps
                for name in args.paths:
                    path = paths[str(name)][engine]
                    heads = sources[str(name)].config.heads
                    rows.append(
                        {
                            "engine": engine,
                            "batch": batch,
                            "export": Path(name).name,
                            "heads": " ".join(map(str, heads)),
                            "first_ms": 1000 * first[str(name)],
                            "first_back": back(first, str(name), dense, sources),
                            "first_fixed": first[NO_HEADS] / first[dense],
                            "tokens_per_second": batch / token[str(name)],
                            "token_back": back(token, str(name), dense, sources),
                            "token_fixed": token[NO_HEADS] / token[dense],
                            "vs_even": versus_even(token, str(name), sources),
                            "peak_mb": peak_memory_mb(engine, path, batch, args.prompt),
                            "file_mb": path.stat().st_size / 1e6,
                        }
                    )
    return {
        "device": device_name(),
        "prompt": args.prompt,
        "params": {n: sum(count_parameters(s.config).values()) for n, s in sources.items()},
        "slower_than_even": slower(rows),
        "rows": rows,
    }


def _several(run: Callable[[], None], n: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(n):
            run()

    return repeat


def back(
    times: dict[str, float], name: str, dense: str, sources: dict[str, Source]
) -> float | None:
    """Share of the removed heads that comes back as time; None where none were removed."""
    removed = 1 - sum(sources[name].config.heads) / sum(sources[dense].config.heads)
    return (1 - times[name] / times[dense]) / removed if removed else None


def versus_even(times: dict[str, float], name: str, sources: dict[str, Source]) -> float | None:
    """Time over that of an export with as many heads, evenly spread; None: no such pair."""
    heads = sources[name].config.heads
    even = [
        other
        for other, source in sources.items()
        if source.config.heads != heads
        and sum(source.config.heads) == sum(heads)
        and max(source.config.heads) - min(source.config.heads) <= 1
    ]
    return times[name] / times[even[0]] if even else None


def slower(rows: list[dict[str, Any]]) -> list[str]:
    """In words: where uneven heads cost more than a twentieth of the time a token."""
    return [
        f"{row['export']} ({row['heads']}) takes {row['vs_even']:.2f} times as long a token as "
        f"its heads spread evenly: {row['engine']}, batch {row['batch']}"
        for row in rows
        if (row["vs_even"] or 0) > 1.05
    ]
