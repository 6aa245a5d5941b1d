"""What each command does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from allattn.config import (
    Config,
    ConfigError,
    ModelConfig,
    load_config,
    to_yaml,
    with_vocabulary,
)


def prepare_command(args: argparse.Namespace) -> None:
    """Texts to a corpus of token ids."""
    from allattn.data.prepare import prepare

    names = (
        "out", "dataset", "source", "download", "train", "valid", "test", "text_column",
        "tokenizer", "tokenizer_from", "vocab_size", "model_type", "min_count", "max_vocab",
        "count_all", "workers", "overwrite", "accept_counts",
    )  # fmt: skip
    info = prepare(**{name: getattr(args, name) for name in names})
    counts = ", ".join(f"{name} {split['tokens']:,}" for name, split in info["splits"].items())
    print(f"{args.out}: {info['vocab_size']:,} token types; tokens: {counts}")


def show_command(args: argparse.Namespace) -> None:
    """What a config comes to; trains nothing."""
    config = load_config(args.config, args.overrides)
    result = describe(config)
    if args.json:
        print_json(result)
        return
    print(to_yaml(config).rstrip())
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


def describe(config: Config) -> dict[str, Any]:
    """What `show` shows: see DESIGN section 8."""
    from allattn.model.transformer import count_parameters, flops_per_token
    from allattn.pruning.budget import stage_table
    from allattn.training.state import with_structure

    model = with_structure(config)
    if model.vocab_size is None and (Path(config.data.dir) / "data.json").exists():
        from allattn.data.lanes import Corpus

        model = with_vocabulary(model, Corpus(config.data.dir).vocab_size, config.data.dir)
    known = model.vocab_size is not None
    stand_in = model if known else ModelConfig(**{**vars(model), "vocab_size": 2, "cutoffs": []})
    parts: dict[str, int | None] = dict(count_parameters(stand_in))
    rest = sum(n for part, n in parts.items() if part != "vocabulary")
    if not known:
        parts["vocabulary"] = None
    return {
        "params": rest + parts["vocabulary"] if known else None,
        "params_embedding": parts["vocabulary"],
        "params_non_embedding": rest,
        "params_by_part": parts,
        "flops_per_token": flops_per_token(model) if known else None,
        "heads": model.heads,
        "stages": stage_table(config, model),
    }


def train_command(args: argparse.Namespace) -> None:
    """Run the stages of a config."""
    from allattn.inference.export import export
    from allattn.inference.load import open_source
    from allattn.training.trainer import Trainer

    trainer = Trainer(load_config(args.config, args.overrides), resume=args.resume)
    trainer.train()
    heads = f"{sum(trainer.live.open_by_layer())} of {trainer.live.run_heads} heads"
    trainer.close()  # the other ranks need not wait for the evaluation of the export
    if trainer.world.rank == 0:
        newest = trainer.run_dir / "checkpoints" / f"step_{trainer.step:08d}"
        if not newest.exists():
            raise RuntimeError(
                f"{trainer.run_dir}: trained to the end, but step {trainer.step} could not be "
                "saved, so there is no final model; make room and continue with --resume"
            )
        final = export(open_source(newest), trainer.run_dir / "final", overwrite=True)
        print(f"{final}: {heads}")


def evaluate_command(args: argparse.Namespace) -> None:
    """Perplexity of a run, checkpoint or export."""
    from allattn.inference.evaluate import evaluate_source
    from allattn.inference.load import open_source, pick_device
    from allattn.inference.stored import evaluate_program, open_program

    if args.text is not None and args.data is not None:
        raise ConfigError("--data: a text needs no corpus; give --text or --data, not both")
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size: {args.batch_size} is too small")
    program = open_program(args.path)
    if program is not None:
        for name in ("text", "seq_len", "mem_len", "clamp_len", "same_length", "per_line"):
            if getattr(args, name) not in (None, False):
                raise ConfigError(
                    f"--{name.replace('_', '-')}: fixed in a program ({args.path}); evaluate the "
                    "run, or an export in the format hf"
                )
        if args.device == "cuda":
            raise ConfigError("--device: programs are evaluated on the CPU")
        result = evaluate_program(program, args.data, args.split)
        _print_result(result, args.json)
        return
    source = open_source(args.path)
    result = evaluate_source(
        source,
        None if args.text is not None else source.corpus(args.data),
        args.split,
        text=args.text,
        per_line=args.per_line,
        seq_len=args.seq_len,
        mem_len=args.mem_len,
        clamp_len=args.clamp_len,
        same_length=args.same_length,
        batch_size=args.batch_size,
        device=pick_device(args.device),
    )
    _print_result(result, args.json)


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    lines = result.pop("lines", [])
    for line in lines:
        numbers = f"{line['nats']:>12.5f} nats {line['tokens']:>7} tokens {line['words']:>7} words"
        print(f"line {line['line']:>7} {numbers}  ppl {line['ppl']:,.5f}")
    for key, value in result.items():
        print(f"{key:<22} {f'{value:,.5f}' if isinstance(value, float) else value}")


def prune_command(args: argparse.Namespace) -> None:
    """Cut heads of a trained model."""
    from allattn.config import PruneConfig
    from allattn.inference.load import open_source, pick_device
    from allattn.inference.prune import prune, table

    keys = ("keep", "keep_params", "keep_flops")
    budget = next(key for key in keys if getattr(args, key) is not None)
    try:
        shares = [float(share) for share in getattr(args, budget).split(",")]
    except ValueError:
        raise ConfigError(
            f"--{budget.replace('_', '-')}: shares such as 0.5 or 0.9,0.8 are needed, not "
            f"{getattr(args, budget)!r}"
        ) from None
    if args.batch_size < 1:
        raise ConfigError(f"--batch-size: {args.batch_size} is too small")
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed: a number from 0 to 2**63 - 1 is needed, not {args.seed}")
    if args.method not in ("importance", "magnitude", "random"):
        raise ConfigError(
            f"--method: importance, magnitude or random is needed, not {args.method!r}; gates that "
            "are learned in training belong in a stage of a config (allattn train)"
        )
    settings = PruneConfig(
        method=args.method, scope=args.scope, min_heads=args.min_heads, batches=args.batches
    )
    if args.method == "importance":
        settings.normalize = not args.no_normalize
    source = open_source(args.path)
    rows = prune(
        source,
        source.corpus(args.data),
        settings,
        budget,
        shares,
        split=args.split,
        batch_size=args.batch_size,
        rescore=args.rescore,
        seed=args.seed,
        device=pick_device(args.device),
        out=args.out,
        overwrite=args.overwrite,
    )
    if args.json:
        print_json(rows)
        return
    print(table(rows))


def export_command(args: argparse.Namespace) -> None:
    """Write a model as a folder of its own."""
    from allattn.inference.export import export
    from allattn.inference.formats import Numbers, writer
    from allattn.inference.load import open_source
    from allattn.training.state import read_json

    if not args.out:
        raise ConfigError("--out: a folder is needed")
    source = open_source(args.path)
    if args.data is not None:
        source = source.moved(args.data)
    needed = args.data is not None or args.dtype != "fp32"
    corpus = source.corpus() if needed else None
    write = writer(args.format, Numbers(args.dtype, corpus), aot=args.aot, seq_len=args.seq_len)
    folder = export(
        source,
        args.out,
        args.overwrite,
        write=write,
        check=not args.no_check,
        license=args.license,
    )
    print(folder)
    if found := read_json(folder / "config.json").get("perplexity"):
        print(
            f"perplexity a token on {found['split']}: {found['fp32']:.5f} in fp32, "
            f"{found[args.dtype]:.5f} in {args.dtype}"
        )


def generate_command(args: argparse.Namespace) -> None:
    """Sample text."""
    from tqdm import tqdm

    from allattn.inference.load import build_model, open_source, pick_device
    from allattn.model.generate import generate

    for name, low in (("max_new_tokens", 0), ("temperature", 0), ("top_k", 1)):
        value = getattr(args, name)
        if value is not None and not value >= low:
            raise ConfigError(f"--{name.replace('_', '-')}: {low} or more is needed, not {value}")
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed: a number from 0 to 2**63 - 1 is needed, not {args.seed}")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p: a share above 0, at most 1, is needed, not {args.top_p}")
    source = open_source(args.path)
    tokenizer = source.tokenizer()
    model = build_model(source.weights).to(pick_device(args.device))
    prompt = tokenizer.encode(args.prompt) or [tokenizer.eos_id]
    steps = generate(
        model,
        [prompt],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    new = [ids[0] for ids in tqdm(steps, total=args.max_new_tokens, disable=None, unit="tok")]
    text = tokenizer.decode(prompt + new) if args.prompt else tokenizer.decode(new)
    if args.json:
        print_json({"prompt": args.prompt, "text": text, "tokens": new})
    else:
        print(text)


def compare_command(args: argparse.Namespace) -> None:
    """Perplexity against parameters."""
    from allattn.inference.compare import compare, table
    from allattn.inference.load import pick_device

    rows = compare(args.paths, args.out, args.data, pick_device(args.device))
    if args.json:
        print_json({"rows": rows})
    else:
        print(table(rows))


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value))
