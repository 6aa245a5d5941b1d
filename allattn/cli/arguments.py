"""The commands and their options."""

from __future__ import annotations

import argparse
from typing import Any

from allattn.cli.commands import (
    analyze_command,
    compare_command,
    completion_command,
    configs_command,
    doctor_command,
    evaluate_command,
    export_command,
    generate_command,
    prepare_command,
    prune_command,
    show_command,
    train_command,
    version_text,
)
from allattn.cli.completion import SHELLS


class _Version(argparse.Action):
    """As argparse's own, but the text is made when it is asked for: it needs torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print it and end."""
        print(version_text())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="allattn",
        description="Train, prune and export language models made of attention only.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="of allattn, torch and DeepSpeed; the device"
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error (also after COMMAND)"
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
    p.set_defaults(run=prepare_command)

    p = commands.add_parser("configs", help="the configs that ship with allattn")
    p.add_argument("name", nargs="?", metavar="NAME", help="print this one, to start from")
    p.set_defaults(run=configs_command)

    p = commands.add_parser("show", help="resolved config, parameters, FLOPs, stages")
    _config_arguments(p)
    _json(p)
    p.set_defaults(run=show_command)

    p = commands.add_parser("train", help="run the stages of a config")
    _config_arguments(p)
    p.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    p.set_defaults(run=train_command)

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
    p.set_defaults(run=evaluate_command)

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
    p.set_defaults(run=prune_command)

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
    p.set_defaults(run=analyze_command)

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
    p.set_defaults(run=export_command)

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
    p.set_defaults(run=generate_command)

    p = commands.add_parser("compare", help="table and plot of perplexity against parameters")
    p.add_argument("paths", nargs="+", metavar="[LABEL=]PATH")
    p.add_argument("--out", required=True, metavar="DIR")
    _data_arguments(p)
    _json(p)
    p.set_defaults(run=compare_command)

    p = commands.add_parser("doctor", help="what training on this machine depends on")
    _json(p)
    p.set_defaults(run=doctor_command)

    p = commands.add_parser("completion", help="a script that completes commands in the shell")
    p.add_argument("shell", choices=SHELLS)
    p.set_defaults(run=completion_command)
    return parser


def _config_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("config", metavar="CONFIG", help="a file, or a name (see allattn configs)")
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
