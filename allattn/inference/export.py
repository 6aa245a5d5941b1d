"""Write a plain model as a folder that allattn and transformers load, with proof of what it is."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allattn.config import ArgumentError
from allattn.config.schema import EXPORT_VERSION
from allattn.data.checksum import sha256
from allattn.data.lock import alone
from allattn.data.tokenizers import HF_TOKENIZER_FILE
from allattn.inference import proof
from allattn.inference.card import card
from allattn.inference.load import Source
from allattn.inference.program_card import program_card
from allattn.inference.travel import AUTO_MAP, TOKENIZER_MAP, write_code
from allattn.moments import reached
from allattn.training.state import (
    HF_PREFIX,
    blaming,
    read_json,
    replace_folder,
    save_tensors,
    write_json,
)

Write = Callable[[Source, Path, dict[str, Any]], None]  # fills a folder, adds to its config.json


def write_weights(source: Source, folder: Path, info: dict[str, Any]) -> None:
    """The weights, and what transformers loads them and the tokenizer with: the format `hf`."""
    tensors = {HF_PREFIX + name: t for name, t in source.weights.parameters.items()}
    save_tensors(folder / "model.safetensors", tensors)
    tokenizer = source.tokenizer()
    tokenizer.save_content(folder)
    description = {
        "tokenizer_class": "AllattnTokenizer",
        "auto_map": TOKENIZER_MAP,
        **{key: tokenizer.describe()[key] for key in ("kind", "fingerprint")},
    }
    text = json.dumps(description, indent=1) + "\n"
    (folder / HF_TOKENIZER_FILE).write_text(text, encoding="utf-8")
    # no generation_config.json, and no end token in config.json: a line end does not stop
    # `generate`, and is not taken for padding where no attention mask is given
    write_code(folder)
    info |= {
        "architectures": ["AllattnForCausalLM"],
        "auto_map": AUTO_MAP,
        "dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        "hidden_size": source.config.d_model,
        "num_hidden_layers": source.config.n_layers,
        "num_attention_heads": source.config.heads,
        "vocab_size": source.config.vocab_size,
    }


def export(
    source: Source,
    out: str | Path,
    overwrite: bool = False,
    *,
    write: Write = write_weights,
    check: bool = True,
    license: str = "unknown",
) -> Path:
    """Export a run, a checkpoint or another export. Closed heads are not in it.

    A fresh process evaluates it on the valid split of its corpus; where there is none, the card
    and a warning say so.

    Args:
        source: what to export.
        out: the folder to make; it appears whole or not at all.
        overwrite: replace an earlier export there.
        write: what belongs to a format; see `formats.writer`.
        check: evaluate it.
        license: of the weights, for the card.

    Raises:
        ValueError: something else is there already, or the fresh perplexity is not the run's.
    """
    out = Path(out)
    if out.is_symlink() or not out.name:  # what it names is replaced, not the name
        out = out.resolve()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+_-]*", license):
        raise ArgumentError("license", f"a name such as apache-2.0 is needed, not {license!r}")
    with alone(out):
        _check_place(out, overwrite, source)
        return _export(source, out, write, check, license)


def _export(source: Source, out: Path, write: Write, check: bool, license: str) -> Path:
    source.tokenizer()  # refuses another one than the model's
    source.weights.build()  # refuses weights that do not fit their config
    corpus, why_not = proof.corpus_of(source) if check else (None, "it was not asked for")
    if check and corpus is None:
        print(f"allattn: warning: {out}: exported without evaluation: {why_not}", file=sys.stderr)
    partial = out.with_name(f".partial_{out.name}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        with blaming(source.weights.path / "config.json"):
            info = export_info(source)
        write(source, partial, info)
        models = sorted(partial.glob("model.*"))
        info["sha256"] = {path.name: sha256(path) for path in models}
        write_json(partial / "config.json", info)
        reached("export:unproved")
        found = None
        if corpus is not None:
            found = proof.check(partial, out, source, corpus, info)
            info["valid_ppl"] = found["ppl"]
            write_json(partial / "config.json", info)
        megabytes = sum(path.stat().st_size for path in models) / 1e6
        if info["format"] == "hf":
            text = card(source.config, info, megabytes, license, found, why_not)
        else:
            about = source.tokenizer().describe()
            text = program_card(source.config, info, about, license, found, why_not)
        (partial / "README.md").write_text(text, encoding="utf-8")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk has room again
        raise
    replace_folder(partial, out, out.with_name(f".old_{out.name}"))
    return out


def _check_place(out: Path, overwrite: bool, source: Source) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"{out}: exists; give another --out, or --overwrite to replace it")
    if not _is_export(out):
        raise ValueError(f"{out}: exists and is no export; give another --out")
    place = source.weights.path.resolve()
    if out.resolve() in (place, *place.parents):
        raise ValueError(f"{out}: is the source, or has it inside; give another --out")
    if folders := [path.name for path in out.iterdir() if path.is_dir()]:
        raise ValueError(f"{out}: has {folders[0]}/ in it, which is no part of an export")


def _is_export(folder: Path) -> bool:
    """Whether we made this folder (a model of another program is not ours to replace)."""
    try:
        return bool(read_json(folder / "config.json").get("model_type") == "allattn")
    except (ValueError, AttributeError):
        return False


def disk_megabytes(folder: Path) -> float:
    """Size of an export, or of the weights in a checkpoint, in MB (1e6 bytes)."""
    weights = folder / "parameters.safetensors"
    files = [weights] if weights.exists() else list(folder.iterdir())
    return sum(f.stat().st_size for f in files) / 1e6


def export_info(source: Source) -> dict[str, Any]:
    """An export's `config.json`, without what depends on its files."""
    config, run = source.config, source.run
    if [len(ids) for ids in run["head_ids"]] != config.heads:
        raise ValueError("its head_ids are not of its heads")
    # without a valid split there is no perplexity, and JSON has no NaN
    history = [
        {"stage": row["stage"], "step": row["step"], "heads": list(row["heads"])}
        | {"ppl": row["ppl"] if math.isfinite(row["ppl"] or math.nan) else None}
        for row in run["history"]
    ]
    run = run | {"history": history}
    return {
        "format_version": EXPORT_VERSION,
        "model_type": "allattn",
        "format": "hf",
        "numbers": "fp32",
        "model": dataclasses.asdict(config),
        "tokenizer": source.tokenizer_fingerprint,
        "data": str(source.data_dir),
        "run": run,
    }
