"""Runs each command: one call of the Python API, and printing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import allattn
from allattn.config import ArgumentError


def prepare_command(args: argparse.Namespace) -> None:
    """Turn texts into a corpus of token ids."""
    names = (
        "out", "dataset", "source", "download", "train", "valid", "test", "text_column",
        "tokenizer", "tokenizer_from", "vocab_size", "model_type", "min_count", "max_vocab",
        "count_all", "workers", "overwrite", "accept_counts",
    )  # fmt: skip
    info = allattn.prepare(**_given(args, names))
    counts = ", ".join(f"{name} {split['tokens']:,}" for name, split in info["splits"].items())
    print(f"{args.out}: {info['vocab_size']:,} token types; tokens: {counts}")


def configs_command(args: argparse.Namespace) -> None:
    """List the configs that ship with allattn, or print one."""
    if args.name is not None:
        print(allattn.config_text(args.name), end="")
        return
    found = allattn.configs()
    width = max(map(len, found), default=0)
    for name, about in found.items():
        print(f"{name:<{width}}  {about}")


def show_command(args: argparse.Namespace) -> None:
    """Show what a config comes to, without training."""
    config = allattn.load_config(args.config, args.overrides)
    result = allattn.describe(config)
    if args.json:
        print_json(result)
        return
    print(allattn.to_yaml(config).rstrip())
    print("\nparameters")
    unknown = f"unknown until {config.data.dir} is prepared (or model.vocab_size is set)"
    for part, n in result["params_by_part"].items():
        print(f"  {part:<14} {unknown if n is None else f'{n:,}':>14}")
    for key in ("params_non_embedding", "params_embedding", "params"):
        print(f"  {key:<22} {'-' if result[key] is None else f'{result[key]:,}'}")
    print(f"\nfamily {config.model.family}, heads by layer {result['heads']}")
    if result["flops_per_token"] is not None:
        print(f"forward FLOPs a token: {result['flops_per_token']:,}")
    print("\nstages")
    for s in result["stages"]:
        print(f"  {s['name']:<12} steps {s['first_step']:>7} to {s['last_step']:>7}  {s['what']}")


def train_command(args: argparse.Namespace) -> None:
    """Run the stages of a config."""
    final = allattn.train(allattn.load_config(args.config, args.overrides), args.resume)
    if final is not None:
        info = json.loads((final / "config.json").read_text(encoding="utf-8"))
        left = sum(allattn.ModelConfig(**info["model"]).heads)
        print(f"{final}: {left} of {info['run']['run_heads']} heads")


def evaluate_command(args: argparse.Namespace) -> None:
    """Measure the perplexity of a run, a checkpoint or an export."""
    names = (
        "path", "split", "data", "text", "per_line", "seq_len", "mem_len", "clamp_len",
        "same_length", "batch_size", "device",
    )  # fmt: skip
    result = allattn.evaluate(**_given(args, names))
    if args.json:
        print_json(result)
        return
    for line in result.pop("lines", []):
        numbers = f"{line['nats']:>12.5f} nats {line['tokens']:>7} tokens {line['words']:>7} words"
        print(f"line {line['line']:>7} {numbers}  ppl {line['ppl']:,.5f}")
    for key, value in result.items():
        print(f"{key:<22} {f'{value:,.5f}' if isinstance(value, float) else value}")


def prune_command(args: argparse.Namespace) -> None:
    """Cut heads of a trained model."""
    from allattn.inference.prune import table

    names = (
        "path", "method", "out", "overwrite", "scope", "min_heads", "batches", "batch_size",
        "rescore", "seed", "split", "data", "device",
    )  # fmt: skip
    shares: dict[str, Any] = {
        name: _shares(name, getattr(args, name))
        for name in ("keep", "keep_params", "keep_flops")
        if getattr(args, name) is not None
    }
    rows = allattn.prune(**_given(args, names), **shares, normalize=not args.no_normalize)
    if args.json:
        print_json(rows)
    else:
        print(table(rows))


def _shares(name: str, text: str) -> list[float]:
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        problem = f"shares such as 0.5 or 0.9,0.8 are needed, not {text!r}"
        raise ArgumentError(name, problem) from None


def analyze_command(args: argparse.Namespace) -> None:
    """Report on what the heads do."""
    from allattn.analysis.report import table

    names = (
        "path", "out", "conllu", "split", "tokens", "states", "batch_size", "seed", "overwrite",
        "data", "device",
    )  # fmt: skip
    report = allattn.analyze(**_given(args, names))
    if args.json:
        print_json(report)
        return
    print(table(report))
    print(Path(args.out) / "report.html")


def export_command(args: argparse.Namespace) -> None:
    """Write a model as a folder of its own."""
    names = ("path", "out", "format", "dtype", "aot", "seq_len", "data", "license", "overwrite")
    folder = allattn.export(**_given(args, names), check=not args.no_check)
    print(folder)
    info = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if found := info.get("perplexity"):
        print(
            f"perplexity a token on {found['split']}: {found['fp32']:.5f} in fp32, "
            f"{found[args.dtype]:.5f} in {args.dtype}"
        )


def generate_command(args: argparse.Namespace) -> None:
    """Sample text."""
    names = (
        "path", "prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "device",
    )  # fmt: skip
    result = allattn.generate(**_given(args, names))
    if args.json:
        print_json(result)
    else:
        print(result["text"])


def compare_command(args: argparse.Namespace) -> None:
    """Set the perplexity of several models against their parameters."""
    from allattn.inference.compare import table

    rows = allattn.compare(**_given(args, ("paths", "out", "data", "device")))
    if args.json:
        print_json({"rows": rows})
    else:
        print(table(rows))


def doctor_command(args: argparse.Namespace) -> int:
    """Check what training on this machine depends on; return 1 if it would fail."""
    report = allattn.doctor()
    if args.json:
        print_json(report)
    else:
        width = max(len(check["name"]) for check in report["checks"])
        for check in report["checks"]:
            print(f"{check['status']:<8} {check['name']:<{width}}  {check['text']}")
            if check["todo"]:
                print(f"{'':<8} {'':<{width}}  -> {check['todo']}")
    return 1 if report["status"] == "error" else 0


def completion_command(args: argparse.Namespace) -> None:
    """Print the completion script for a shell."""
    from allattn.cli.arguments import build_parser
    from allattn.cli.completion import completion_script

    print(completion_script(build_parser(), args.shell))


def version_text() -> str:
    """Say, in two lines, the versions that matter in a report of a problem, and the device."""
    import platform

    from allattn.machine.versions import installed

    libraries = [("torch", "torch"), ("DeepSpeed", "deepspeed")]
    versions = ", ".join(f"{name} {installed(dist) or 'missing'}" for name, dist in libraries)
    try:
        from allattn.machine.hardware import device_name

        device = device_name()
    except (ImportError, OSError) as error:
        device = f"unknown: torch cannot be imported ({' '.join(str(error).split())})"
    python = f"Python {platform.python_version()}"
    return f"allattn {allattn.__version__} ({versions}, {python})\ndevice: {device}"


def print_json(value: Any) -> None:
    """Print one JSON value on stdout."""
    print(json.dumps(value))


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Pick the options of a command that are arguments of the function behind it."""
    return {name: getattr(args, name) for name in names}
