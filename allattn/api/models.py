"""Measures and prunes trained models.

Every `path` is a run (its final model, or else its newest checkpoint), a checkpoint or an export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allattn.api.arguments import at_least, folder, one_of, seed_of
from allattn.config import ArgumentError, PruneConfig

METHODS = ("importance", "magnitude", "random")


def evaluate(
    path: str | Path,
    *,
    split: str = "valid",
    data: str | Path | None = None,
    text: str | Path | None = None,
    per_line: bool = False,
    seq_len: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    batch_size: int = 8,
    device: str = "auto",
) -> dict[str, Any]:
    """Measure the perplexity of a model, with memory, each token scored exactly once.

    Args:
        path: A run, a checkpoint or an export.
        split: The split of the corpus to score: `train`, `valid` or `test`.
        data: A prepared corpus; None takes that of training.
        text: A text file to score instead of a split.
        per_line: Score every line of `text` by itself, without memory.
        seq_len: Tokens in a segment; None takes training's. The same holds for the next three.
        mem_len: Tokens that are remembered.
        clamp_len: Distances above this many tokens count as this one.
        same_length: Let every token see exactly `mem_len` tokens before it.
        batch_size: Streams, or lines, side by side; it changes the speed only.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        `loss` (nats per token), `ppl`, `word_ppl`, `bits_per_byte`, `tokens`, `words`, `seq_len`,
        `mem_len`, `clamp_len`, `same_length`, `heads` (by layer), `params`,
        `params_non_embedding`, `tokens_per_second`, `split` or `text`, and `model`; with
        `per_line` also `lines`. A program (ONNX or PT2) does not tell its parameters.

    Raises:
        ArgumentError: An argument cannot be used.
        ValueError, OSError: The model, the corpus or the text is missing or damaged, or the
            corpus has another tokenizer.
    """
    from allattn.inference.evaluate import evaluate_source
    from allattn.inference.load import open_source, pick_device
    from allattn.inference.stored import evaluate_program, open_program

    if text is not None and data is not None:
        raise ArgumentError(
            "data", "a text needs no corpus; give {text} or {data}, not both", ("text", "data")
        )
    at_least("batch_size", batch_size, 1)
    one_of("device", device, ("auto", "cpu", "cuda"))
    program = open_program(path)
    if program is not None:
        fixed = {
            "text": text, "seq_len": seq_len, "mem_len": mem_len, "clamp_len": clamp_len,
            "same_length": same_length, "per_line": per_line,
        }  # fmt: skip
        for name, value in fixed.items():
            if value not in (None, False):
                raise ArgumentError(
                    name,
                    f"fixed in a program ({path}); evaluate the run, or an export in the format hf",
                )
        if device == "cuda":
            raise ArgumentError("device", "programs are evaluated on the CPU")
        return evaluate_program(program, data, split)
    source = open_source(path)
    return evaluate_source(
        source,
        None if text is not None else source.corpus(data),
        split,
        text=text,
        per_line=per_line,
        seq_len=seq_len,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
        batch_size=batch_size,
        device=pick_device(device),
    )


def prune(
    path: str | Path,
    *,
    method: str,
    keep: float | Sequence[float] | None = None,
    keep_params: float | Sequence[float] | None = None,
    keep_flops: float | Sequence[float] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    scope: str = "global",
    min_heads: int = 0,
    batches: int = 8,
    batch_size: int = 8,
    normalize: bool = True,
    rescore: bool = False,
    seed: int = 1,
    split: str = "valid",
    data: str | Path | None = None,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Cut heads of a trained model, without training it further, and evaluate what is left.

    Give one of `keep`, `keep_params` and `keep_flops`, each as one share or several from 0 to 1,
    of what the run's first model had.

    Args:
        path: A run, a checkpoint or an export.
        method: `importance`, `magnitude` or `random`.
        keep: Shares of the heads that stay.
        keep_params: Shares of the layers' parameters that stay.
        keep_flops: Shares of the layers' FLOPs per token that stay.
        out: The folder of the export to make; with several shares, a folder of exports with a table
            and a plot. None writes nothing.
        overwrite: Replace exports there.
        scope: `global` lets heads go wherever they are, `layer` the same share everywhere.
        min_heads: Heads that stay in every layer.
        batches: For `importance`: segments of every lane to score heads on.
        batch_size: Lanes side by side.
        normalize: For `importance`: divide a layer's scores by their L2 norm.
        rescore: Score what is left again after each share.
        seed: For `random`.
        split: The split to evaluate on.
        data: A prepared corpus; None takes that of training.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        A row for each share, the largest first: `keep`, `heads` (by layer), `ppl`, `loss`,
        `params`, `params_non_embedding`, `flops_per_token`, `tokens_per_second`, `split`.

    Raises:
        ArgumentError, ConfigError: An argument cannot be used, or a share cannot be met.
        ValueError, OSError: The model or the corpus is missing or damaged, or `out` exists.
    """
    from allattn.inference.load import open_source, pick_device
    from allattn.inference.prune import prune as prune_source

    asked = {"keep": keep, "keep_params": keep_params, "keep_flops": keep_flops}
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) != 1:
        raise ArgumentError(
            "keep",
            f"one of {{keep}}, {{keep_params}} and {{keep_flops}} is needed, not {len(given)}",
            tuple(asked),
        )
    ((budget, value),) = given.items()
    shares = [value] if isinstance(value, int | float) else list(value)
    if not shares or not all(isinstance(share, int | float) for share in shares):
        raise ArgumentError(
            budget, f"a share such as 0.5, or a list of them, is needed, not {value!r}"
        )
    at_least("batch_size", batch_size, 1)
    seed_of("seed", seed)
    if method not in METHODS:
        raise ArgumentError(
            "method",
            f"importance, magnitude or random is needed, not {method!r}; gates that are learned "
            "in training belong in a stage of a config (allattn train)",
        )
    settings = PruneConfig(method=method, scope=scope, min_heads=min_heads, batches=batches)
    if method == "importance":
        settings.normalize = normalize
    source = open_source(path)
    return prune_source(
        source,
        source.corpus(data),
        settings,
        budget,
        [float(share) for share in shares],
        split=split,
        batch_size=batch_size,
        rescore=rescore,
        seed=seed,
        device=pick_device(device),
        out=out,
        overwrite=overwrite,
    )


def compare(
    paths: Sequence[str | Path] | Mapping[str, str | Path],
    out: str | Path,
    *,
    data: str | Path | None = None,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Evaluate several models; write a table, and plots of perplexity against size and speed.

    Args:
        paths: Runs, checkpoints or exports; a dict, or texts such as `LABEL=PATH`, name them.
        out: The folder for `compare.json`, `compare.txt` and `compare.png`.
        data: A prepared corpus; None takes that of each model's training.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        A row for each model: `run`, `family`, `keep`, `heads`, `params`, `params_non_embedding`,
        `flops_per_token`, `valid_ppl`, `test_ppl`, `word_ppl`, `tokens_per_second`, `megabytes`.

    Raises:
        ArgumentError: An argument cannot be used.
        ValueError, OSError: A model or a corpus is missing or damaged.
    """
    from allattn.inference.compare import compare as compare_sources
    from allattn.inference.load import pick_device

    if isinstance(paths, Mapping):
        named = [(label, Path(path)) for label, path in paths.items()]
    else:
        named = [_named(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not named:
        raise ArgumentError("paths", "at least one run, checkpoint or export is needed")
    return compare_sources(named, folder("out", out), data, pick_device(device))


def _named(path: str | Path) -> tuple[str, Path]:
    """Split `LABEL=PATH`; a folder that exists under the whole name is its own label."""
    label, _, folder_name = str(path).rpartition("=")
    if not label or Path(path).exists():
        return str(path), Path(path)
    return label, Path(folder_name)
