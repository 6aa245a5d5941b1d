"""Measure training, evaluation, generation, scaling, saving, data; ratios within one run.

    python tools/benchmark.py train --size small [--precision fp32 bf16] [--json]
    python tools/benchmark.py evaluate --size small
    python tools/benchmark.py generate --size small
    python tools/benchmark.py scaling --size small
    python tools/benchmark.py save --size paper
    python tools/benchmark.py export DENSE PRUNED ...        (see benchmark_export.py)
    python tools/benchmark.py data [TEXT]                    (see benchmark_data.py)

FLOPs are counted from the shapes: two a multiply-add, matrix products only; of content keys those
that the causal mask leaves visible; the memory's keys and values as often as they are computed; a
backward pass as twice its forward. MFU is that over time, against the largest matrix product rate
of this machine, measured in the same run in the same precision. Peak memory is that of a process of
its own. Variants are timed in turn, step by step: a change of the machine's speed meets all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import (
    device,
    device_name,
    in_turn,
    table,
    zipf_tokens,
)

from allattn.config import ModelConfig, OptimizerConfig
from allattn.model.generate import generate
from allattn.model.scoring import score_stream
from allattn.model.transformer import Memory, TransformerLM, count_parameters, flops_per_token
from allattn.training import speed
from allattn.training.optim import build_optimizer
from allattn.training.state import MOMENTS, Snapshot, save_checkpoint

SIZES = {
    "small": (8, {
        "n_layers": 6, "d_model": 256, "n_heads": 8, "d_head": 32, "n_persistent": 1024,
        "seq_len": 128, "mem_len": 128, "vocab_size": 10_000, "cutoffs": [2000, 5000],
    }),
    "paper": (2, {
        "n_layers": 16, "d_model": 512, "n_heads": 8, "d_head": 64, "n_persistent": 2048,
        "seq_len": 192, "mem_len": 192, "vocab_size": 267_735, "cutoffs": [20_000, 40_000, 200_000],
    }),
}  # fmt: skip
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def size_config(size: str, **changes: Any) -> tuple[int, ModelConfig]:
    """Batch size and model of a named size."""
    batch, shape = SIZES[size]
    common = {"dropout": 0.0, "embedding": "adaptive", "div_value": 4}
    return batch, ModelConfig(**{**common, **shape, **changes})


def train_flops_per_token(config: ModelConfig) -> int:
    """Forward and backward of a training step; the memory's keys and values are computed anew."""
    memory = sum(config.heads) * 4 * config.d_model * config.d_head
    again = memory * config.mem_len / config.seq_len
    return round(3 * (flops_per_token(config) + again))


class Step:
    """A training step on random tokens with full memory, as the trainer makes it."""

    def __init__(self, config: ModelConfig, batch: int, precision: str):
        """Model, optimiser and memory."""
        torch.manual_seed(0)
        self.model = TransformerLM(config).to(device()).train()
        self.optimizer = build_optimizer(self.model, OptimizerConfig(lr=1e-4))
        self.precision = precision
        shape = (batch, config.seq_len)
        self.ids, self.targets = (
            zipf_tokens(config.vocab_size, shape).to(device()) for _ in range(2)
        )
        self.memory: Memory | None = None

    def __call__(self) -> None:
        """Forward, backward, clip, update."""
        self.forward().mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def forward(self) -> torch.Tensor:
        """Losses; the memory moves on."""
        with torch.autocast(device().type, torch.bfloat16, enabled=self.precision == "bf16"):
            output = self.model(self.ids, self.targets, self.memory)
        self.memory = output.memory
        return output.nll


def peak_memory_mb(config: ModelConfig, batch: int, precision: str) -> float:
    """Peak memory of a process that trains three steps, in MB: resident, or allocated on a GPU."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_peak_memory, args=(config, batch, precision, sender))
    worker.start()
    result = receiver.recv()
    worker.join()
    return result


def _peak_memory(config: ModelConfig, batch: int, precision: str, sender: Any) -> None:
    step = Step(config, batch, precision)
    for _ in range(3):
        step()
    sender.send(speed.peak_memory_mb(device()))


def benchmark_train(args: argparse.Namespace) -> dict[str, Any]:
    """Reference against fused, in each precision."""
    batch, config = size_config(args.size)
    batch = args.batch or batch
    configs = {a: size_config(args.size, attention=a)[1] for a in ("reference", "fused")}
    steps = {f"{p} {a}": Step(c, batch, p) for p in args.precision for a, c in configs.items()}
    times = in_turn(steps, args.repeats)
    del steps
    peaks = {p: speed.matmul_rate(device(), PRECISIONS[p], 1.0) for p in args.precision}
    flops, tokens = train_flops_per_token(config), batch * config.seq_len
    rows = [
        {
            "precision": p,
            "attention": a,
            "milliseconds": 1000 * times[f"{p} {a}"],
            "tokens_per_second": tokens / times[f"{p} {a}"],
            "mfu": flops * tokens / times[f"{p} {a}"] / peaks[p],
            "peak_memory_mb": peak_memory_mb(c, batch, p),
        }
        for p in args.precision
        for a, c in configs.items()
    ]
    first = args.precision[0]
    result = {
        "size": args.size,
        "batch": batch,
        "precision": first,
        "device": device_name(),
        "params": sum(count_parameters(config).values()),
        "flops_per_token": flops,
        "matmul_peak_gflops": peaks[first] / 1e9,
        "ratio": times[f"{first} reference"] / times[f"{first} fused"],
        "memory_ratio": rows[1]["peak_memory_mb"] / rows[0]["peak_memory_mb"],
        "rows": rows,
    }
    if set(args.precision) == {"fp32", "bf16"}:
        result["bf16_over_fp32"] = times["fp32 fused"] / times["bf16 fused"]
        result["matmul_peak_gflops_bf16"] = peaks["bf16"] / 1e9
    return result


def benchmark_evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Scoring a stream with cached keys and values, and without."""
    batch, config = size_config(args.size)
    batch = args.batch or batch
    model = TransformerLM(config).to(device()).eval()
    n = 12 * batch * config.seq_len
    tokens = zipf_tokens(config.vocab_size, (1, n))[0].numpy()

    def score(cache: bool) -> Callable[[], Any]:
        return lambda: score_stream(
            model, model, tokens, 0, seq_len=config.seq_len, batch_size=batch, cache=cache
        )

    times = in_turn({"cached": score(True), "recomputed": score(False)}, args.repeats)
    rows = [{"memory": k, "seconds": t, "tokens_per_second": n / t} for k, t in times.items()]
    return {
        "size": args.size,
        "device": device_name(),
        "ratio": times["recomputed"] / times["cached"],
        "rows": rows,
    }


def benchmark_generate(args: argparse.Namespace) -> dict[str, Any]:
    """Time a token as the stream grows: at mem_len, and long after."""
    _, config = size_config(args.size)
    model = TransformerLM(config).to(device()).eval()
    marks = []
    last = args.tokens
    for _ in generate(model, [[1]], max_new_tokens=last + 1, temperature=1.0):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    def around(position: int) -> float:
        low = max(position - 128, 1)
        gaps = [marks[i] - marks[i - 1] for i in range(low, min(position + 128, last))]
        return 1000 * statistics.median(gaps)

    positions = [config.mem_len + 128, 1000, 2000, last]
    rows = [{"position": p, "milliseconds_per_token": around(p)} for p in positions if p <= last]
    return {
        "size": args.size,
        "device": device_name(),
        "ratio": rows[-1]["milliseconds_per_token"] / rows[0]["milliseconds_per_token"],
        "rows": rows,
    }


def benchmark_scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Time of the layer stack against heads kept, segment length and persistent vectors."""
    batch, config = size_config(args.size)
    batch = args.batch or batch
    rows: list[dict[str, Any]] = []

    def measure(what: str, variants: dict[float, ModelConfig]) -> None:
        runs: dict[str, Callable[[], Any]] = {}
        for value, c in variants.items():
            runs[f"train {value}"] = stack_step(c, batch, train=True)
            runs[f"evaluate {value}"] = stack_step(c, batch, train=False)
        times = in_turn(runs, args.repeats)
        base = next(iter(variants))
        for value in variants:
            row: dict[str, Any] = {"what": what, "value": value}
            for mode in ("train", "evaluate"):
                row[f"{mode}_milliseconds"] = 1000 * times[f"{mode} {value}"]
                row[f"{mode}_share"] = times[f"{mode} {value}"] / times[f"{mode} {base}"]
            rows.append(row)

    keeps = (1.0, 0.75, 0.5, 0.25)
    measure("keep", {k: size_config(args.size, n_heads=round(8 * k))[1] for k in keeps})
    uneven = [8, 1, 5, 3, 7, 0, 2, 6] * 2  # half of the heads, as pruning leaves them
    uneven = uneven[: config.n_layers]
    while sum(uneven) != 4 * config.n_layers:
        uneven[-1] += 1 if sum(uneven) < 4 * config.n_layers else -1
    half = size_config(args.size, n_heads=uneven)[1]
    measure("keep, uneven", {1.0: config, 0.5: half})
    lengths = (config.seq_len, config.seq_len // 2, config.seq_len * 2)
    measure("seq_len", {t: size_config(args.size, seq_len=t)[1] for t in lengths})
    vectors = (config.n_persistent, config.n_persistent // 2, config.n_persistent * 2)
    measure("n_persistent", {p: size_config(args.size, n_persistent=p)[1] for p in vectors})
    return {"size": args.size, "device": device_name(), "rows": rows}


def stack_step(config: ModelConfig, batch: int, train: bool) -> Callable[[], None]:
    """A pass through the layers alone (no embedding, no softmax) with full memory.

    With backward and recomputed memory as in training, or forward with cached memory.
    """
    model = TransformerLM(config).to(device()).train(train)
    T, M = config.seq_len, config.mem_len
    x = torch.randn(batch, T, config.d_model, device=device())
    memory = torch.randn(batch, M, config.d_model, device=device())
    kept = model.empty_cache().hidden if not train else [memory] * config.n_layers

    def run(M: int = M) -> None:
        positions, visible = model._positions(M + T, x.dtype), model._visible(T, M, None)
        with torch.set_grad_enabled(train):
            h = x.clone().requires_grad_(train)
            for layer, old in zip(model.layers, kept, strict=True):
                h = layer(h, None if layer.attention is None else old, positions, visible)
            if train:
                h.sum().backward()
                model.zero_grad(set_to_none=True)

    if not train:
        for held in range(0, M, T):  # fill the caches
            run(held)
    return run


def benchmark_save(args: argparse.Namespace) -> dict[str, Any]:
    """How many training steps a checkpoint of weights, moments and memory takes as long as."""
    batch, config = size_config(args.size)
    batch = args.batch or batch
    step = Step(config, batch, args.precision[0])
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:

        def save() -> None:
            named = dict(step.model.named_parameters())
            snapshot = Snapshot({name: p.detach().cpu() for name, p in named.items()})
            for name, p in named.items():
                for key in MOMENTS:
                    snapshot.moments[key][name] = step.optimizer.state[p][key].cpu()
            memory = {f"layer_{i:02d}": h.cpu() for i, h in enumerate(step.memory.hidden)}
            save_checkpoint(Path(folder) / "checkpoints", snapshot, memory, {"step": 1})

        times = in_turn({"step": step, "save": save}, args.repeats)
        size = sum(f.stat().st_size for f in Path(folder).rglob("*.safetensors"))
    return {
        "size": args.size,
        "device": device_name(),
        "megabytes": size / 1e6,
        "ratio": times["save"] / times["step"],
        "rows": [{"what": k, "milliseconds": 1000 * t} for k, t in times.items()],
    }


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", choices=["train", "evaluate", "generate", "scaling", "save", "export", "data"]
    )
    parser.add_argument("paths", nargs="*", help="export: exports, the dense first; data: a text")
    parser.add_argument("--engine", nargs="+", default=["pytorch", "onnx", "int8"], help="export")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="export")
    parser.add_argument("--prompt", type=int, default=128, help="export: tokens of the prompt")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--precision", nargs="+", choices=list(PRECISIONS), default=["fp32"])
    parser.add_argument("--batch", type=int, help="default: the size's own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, help="generate: how far (4,000); export: calls to time at once (16)"
    )
    parser.add_argument("--folder", help="save, data: where; default: the temporary one")
    parser.add_argument("--megabytes", type=float, default=50, help="data: if no text is named")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="data")
    parser.add_argument("--corpus-tokens", type=int, default=100_000_000, help="data: to open")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.tokens = args.tokens or (16 if args.what == "export" else 4000)
    if args.what == "export":
        from benchmark_export import benchmark_export

        if not args.paths:
            parser.error("export: name exports, the dense one first")
        result = benchmark_export(args)
    elif args.what == "data":
        from benchmark_data import benchmark_data

        result = benchmark_data(args)
    else:
        result = globals()[f"benchmark_{args.what}"](args)
    if args.json:
        print(json.dumps(result))
        return 0
    for key, value in result.items():
        if key != "rows":
            print(f"{key:<24} {value:,.4g}" if isinstance(value, float) else f"{key:<24} {value}")
    print(table(result["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
