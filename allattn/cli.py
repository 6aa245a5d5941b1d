"""The `allattn` command. Heavy imports wait until a command needs them.

Exit status: 0 done, 1 the run failed, 2 wrong usage or config, 75 stopped by SIGTERM and saved.
Results go to stdout (with --json one object and nothing else), everything else to stderr. A user's
error is one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allattn.config import (
    Config,
    ConfigError,
    ModelConfig,
    load_config,
    to_yaml,
    with_vocabulary,
)

if TYPE_CHECKING:
    from allattn.model.transformer import TransformerLM


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    # the DeepSpeed launcher puts --local_rank=N first; the rank is in the environment too
    args, extra = parser.parse_known_args([a for a in argv if not a.startswith("--local_rank")])
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        _take_overrides(args, extra)
        args.run(args)
    except ConfigError as error:
        return _fail(error, 2)
    except (ValueError, OSError, RuntimeError) as error:
        if type(error).__name__ == "Stopped":
            return _fail(error, 75)  # EX_TEMPFAIL: try again, with --resume
        if not _is_ours(error):
            raise
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("allattn: interrupted", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="allattn",
        description="Train, prune and export language models made of attention only.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    p = commands.add_parser("prepare", help="texts to a corpus of token ids")
    p.add_argument("--dataset", choices=["tiny", "wikitext-2", "wikitext-103"])
    p.add_argument("--source", metavar="PATH", help="where the WikiText files are: folder or .zip")
    p.add_argument("--download", action="store_true", help="fetch WikiText (allattn[download])")
    for split in ("train", "valid", "test"):
        p.add_argument(
            f"--{split}", nargs="+", default=[], metavar="PATH", help="files, folders or globs"
        )
    p.add_argument("--text-column", default="text", metavar="NAME", help="of .jsonl and .parquet")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--tokenizer", choices=["word", "sentencepiece", "byte"], help="default: word")
    p.add_argument(
        "--tokenizer-from", metavar="PATH", help="a prepared corpus, .model or vocabulary file"
    )
    p.add_argument("--vocab-size", type=int, metavar="N", help="sentencepiece: number of pieces")
    p.add_argument("--model-type", choices=["unigram", "bpe"], default="unigram")
    p.add_argument("--min-count", type=int, default=1, metavar="N", help="word: rarer is <unk>")
    p.add_argument("--max-vocab", type=int, metavar="N", help="word: at most so many types")
    p.add_argument("--count-all", action="store_true", help="word: count valid and test too")
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: by text size)")
    p.add_argument("--overwrite", action="store_true", help="replace a corpus prepared there")
    p.add_argument(
        "--accept-counts", action="store_true", help="take a WikiText with other than known counts"
    )
    p.set_defaults(run=_prepare)

    p = commands.add_parser("show", help="resolved config, parameters, FLOPs, stages")
    _config_arguments(p)
    _json(p)
    p.set_defaults(run=_show)

    p = commands.add_parser("train", help="run the stages of a config")
    _config_arguments(p)
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    p.set_defaults(run=_train)

    p = commands.add_parser("evaluate", help="perplexity of a run, checkpoint or export")
    p.add_argument("path", metavar="PATH")
    _data_arguments(p)
    p.add_argument("--split", default="valid")
    p.add_argument("--text", metavar="FILE", help="score this text instead of a split")
    p.add_argument("--per-line", action="store_true", help="a score for each line, mem_len 0")
    p.add_argument(
        "--seq-len", type=int, metavar="N", help="tokens a segment (default: training's)"
    )
    p.add_argument("--mem-len", type=int, metavar="N", help="remembered tokens")
    p.add_argument("--clamp-len", type=int, metavar="N", help="distances above count as this one")
    p.add_argument(
        "--same-length",
        action="store_true",
        default=None,
        help="every token sees mem_len before it",
    )
    p.add_argument("--batch-size", type=int, default=8, metavar="N", help="changes speed only")
    _json(p)
    p.set_defaults(run=_evaluate)

    p = commands.add_parser("prune", help="cut heads of a trained model, no optimiser")
    p.add_argument("path", metavar="PATH")
    p.add_argument("--method", required=True, metavar="M", help="importance, magnitude or random")
    budget = p.add_mutually_exclusive_group(required=True)
    budget.add_argument("--keep", metavar="F[,F..]", help="shares of the run's heads that stay")
    budget.add_argument("--keep-params", metavar="F[,F..]", help="of the layers' parameters")
    budget.add_argument("--keep-flops", metavar="F[,F..]", help="of the layers' FLOPs")
    p.add_argument("--out", metavar="DIR", help="the export; with several shares, a folder of them")
    p.add_argument("--overwrite", action="store_true", help="replace exports there")
    p.add_argument("--scope", choices=["global", "layer"], default="global")
    p.add_argument("--min-heads", type=int, default=0, metavar="N", help="in every layer")
    p.add_argument("--batches", type=int, default=8, metavar="N", help="importance: segments")
    p.add_argument("--batch-size", type=int, default=8, metavar="N", help="lanes side by side")
    p.add_argument(
        "--no-normalize", action="store_true", help="importance: no L2 norm within a layer"
    )
    p.add_argument("--rescore", action="store_true", help="score again after each share")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of random")
    p.add_argument("--split", default="valid", help="to evaluate on")
    _data_arguments(p)
    _json(p)
    p.set_defaults(run=_prune)

    p = commands.add_parser("analyze", help="what the heads do: report.html, report.json, pictures")
    p.add_argument("path", metavar="PATH")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--conllu", metavar="FILE", help="a treebank: also look for syntactic heads")
    p.add_argument("--split", default="valid", help="to look at")
    p.add_argument("--tokens", type=int, default=8192, metavar="N", help="of it, about")
    p.add_argument(
        "--states", type=int, default=3, metavar="N", help="earlier checkpoints to look at as well"
    )
    p.add_argument("--batch-size", type=int, default=8, metavar="N", help="changes speed only")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of random orders and tests")
    p.add_argument("--overwrite", action="store_true", help="replace a report there")
    _data_arguments(p)
    _json(p)
    p.set_defaults(run=_analyze)

    p = commands.add_parser("export", help="write a model as a folder of its own")
    p.add_argument("path", metavar="PATH")
    p.add_argument("--out", required=True, metavar="DIR")
    p.add_argument("--overwrite", action="store_true", help="replace an export there")
    p.add_argument("--format", choices=["hf", "onnx", "pt2"], default="hf", help="default: hf")
    p.add_argument("--dtype", choices=["fp32", "bf16", "fp16", "int8"], default="fp32")
    p.add_argument("--aot", action="store_true", help="pt2: compile for this machine as well")
    p.add_argument("--seq-len", type=int, metavar="N", help="onnx, pt2: tokens a call at most")
    p.add_argument("--data", metavar="DIR", help="corpus to measure --dtype on")
    p.add_argument("--license", default="unknown", metavar="NAME", help="of the weights, e.g. mit")
    p.add_argument("--no-check", action="store_true", help="do not evaluate it on the valid split")
    p.set_defaults(run=_export)

    p = commands.add_parser("generate", help="sample text")
    p.add_argument("path", metavar="PATH")
    p.add_argument("--prompt", default="", metavar="TEXT")
    p.add_argument("--max-new-tokens", type=int, default=100, metavar="N")
    p.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0: likeliest token")
    p.add_argument("--top-k", type=int, metavar="N")
    p.add_argument("--top-p", type=float, metavar="X")
    p.add_argument("--seed", type=int, default=0, metavar="N")
    _device(p)
    _json(p)
    p.set_defaults(run=_generate)

    p = commands.add_parser("compare", help="table and plot of perplexity against parameters")
    p.add_argument("paths", nargs="+", metavar="[LABEL=]PATH")
    p.add_argument("--out", required=True, metavar="DIR")
    _data_arguments(p)
    _json(p)
    p.set_defaults(run=_compare)
    return parser


def _config_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("config", metavar="CONFIG")
    p.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. stages[1].prune.keep=0.3"
    )


def _data_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--data", metavar="DIR", help="prepared corpus (default: that of training)")
    _device(p)


def _device(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def _json(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _take_overrides(args: argparse.Namespace, extra: list[str]) -> None:
    """argparse leaves overrides after an option (`train C --resume a=1`) over: take those too."""
    wrong = [
        e for e in extra if not hasattr(args, "overrides") or e.startswith("-") or "=" not in e
    ]
    if wrong:
        raise ConfigError(
            f"{args.command}: unknown argument {wrong[0]} (see allattn {args.command} -h)"
        )
    if extra:
        args.overrides = [*args.overrides, *extra]


def _fail(error: Exception, status: int) -> int:
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    text = " ".join(text.split()) or type(error).__name__
    print(f"allattn: error: {text}", file=sys.stderr)
    return status


def _is_ours(error: Exception) -> bool:
    """Whether an error was meant for the user: raised by this package, or about a file."""
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("allattn")


# ---- commands -----------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> None:
    from allattn.data.prepare import prepare

    names = (
        "out", "dataset", "source", "download", "train", "valid", "test", "text_column",
        "tokenizer", "tokenizer_from", "vocab_size", "model_type", "min_count", "max_vocab",
        "count_all", "workers", "overwrite", "accept_counts",
    )  # fmt: skip
    info = prepare(**{name: getattr(args, name) for name in names})
    counts = ", ".join(f"{name} {split['tokens']:,}" for name, split in info["splits"].items())
    print(f"{args.out}: {info['vocab_size']:,} token types; tokens: {counts}")


def _show(args: argparse.Namespace) -> None:
    config = load_config(args.config, args.overrides)
    result = describe(config)
    if args.json:
        _print_json(result)
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


def _train(args: argparse.Namespace) -> None:
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


def _evaluate(args: argparse.Namespace) -> None:
    from allattn.inference.evaluate import evaluate_source
    from allattn.inference.load import open_source, pick_device
    from allattn.inference.stored import evaluate_program, open_program

    if args.text is not None and args.data is not None:
        raise ConfigError("--data: a text needs no corpus; give --text or --data, not both")
    program = open_program(args.path)
    if program is not None:
        for name in ("text", "seq_len", "mem_len", "clamp_len", "same_length"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: fixed in a program ({args.path}); evaluate the "
                    "run, or an export in the format hf"
                )
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
        _print_json(result)
        return
    lines = result.pop("lines", [])
    for line in lines:
        numbers = f"{line['nats']:>12.5f} nats {line['tokens']:>7} tokens {line['words']:>7} words"
        print(f"line {line['line']:>7} {numbers}  ppl {line['ppl']:,.5f}")
    for key, value in result.items():
        print(f"{key:<22} {f'{value:,.5f}' if isinstance(value, float) else value}")


def _prune(args: argparse.Namespace) -> None:
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
        _print_json(rows)
        return
    print(table(rows))


def _analyze(args: argparse.Namespace) -> None:
    from allattn.analysis.analyze import Analyzer, History, Settings, State
    from allattn.analysis.conllu import read_conllu
    from allattn.analysis.report import start_report, table, write_report
    from allattn.analysis.survival import read_metrics
    from allattn.inference.evaluate import evaluate
    from allattn.inference.history import head_ids_of, history_of, step_of
    from allattn.inference.load import Source, build_model, open_source, pick_device

    for name, low in (("tokens", 1), ("states", 0), ("batch_size", 1), ("seed", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(args, name)} is too small")
    device = pick_device(args.device)
    source = open_source(args.path)
    corpus = source.corpus(args.data)
    sentences = None if args.conllu is None else read_conllu(args.conllu)
    start_report(args.out, args.overwrite)
    found = history_of(source, args.states)

    def state(name: str, of: Source) -> State:
        def load() -> TransformerLM:
            return build_model(of.weights).to(device)

        return State(name, step_of(of), of.config.heads, head_ids_of(of), load)

    subject = state("the model", source)
    history = History(found.first_heads, [], None, [])
    for folder in found.checkpoints:
        earlier = open_source(folder)
        history.states.append(state(f"step {step_of(earlier)}", earlier))
        if folder == found.dense:
            history.dense = history.states[-1]
    if found.folder is not None:
        lines = read_metrics(found.folder / "metrics.jsonl")
        history.lines = [line for line in lines if line["step"] <= subject.step]
    settings = Settings(args.split, args.tokens, args.batch_size, args.seed)
    result = evaluate(subject.load(), corpus, args.split, args.batch_size)
    report = {
        "model": {
            "path": str(source.weights.path),
            "family": source.config.family,
            "step": subject.step,
            "head_ids": subject.head_ids,
            "first_heads": history.first_heads,
            **{k: result[k] for k in ("heads", "params", "params_non_embedding", "loss", "ppl")},
        }
    }
    report |= Analyzer(corpus, sentences, settings, _progress).analyze(subject, history)
    write_report(report, history.lines, args.out)
    if args.json:
        _print_json(report)
        return
    print(table(report))
    print(Path(args.out) / "report.html")


def _progress(what: str, n: int) -> Any:
    """A bar on a terminal, elsewhere a line."""
    from tqdm import tqdm

    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
    return tqdm(total=n, desc=what, disable=not sys.stderr.isatty(), unit_scale=True, leave=False)


def _export(args: argparse.Namespace) -> None:
    from allattn.inference.export import export
    from allattn.inference.formats import Numbers, writer
    from allattn.inference.load import open_source
    from allattn.training.state import read_json

    source = open_source(args.path)
    corpus = source.corpus(args.data) if args.dtype != "fp32" else None
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


def _generate(args: argparse.Namespace) -> None:
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
        _print_json({"prompt": args.prompt, "text": text, "tokens": new})
    else:
        print(text)


def _compare(args: argparse.Namespace) -> None:
    from allattn.inference.compare import compare, table
    from allattn.inference.load import pick_device

    rows = compare(args.paths, args.out, args.data, pick_device(args.device))
    if args.json:
        _print_json({"rows": rows})
    else:
        print(table(rows))


def _print_json(value: Any) -> None:
    print(json.dumps(value))
