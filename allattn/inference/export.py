"""Write a plain model as a folder: config.json, model.safetensors, tokenizer, a model card."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allattn.data.sources import sha256
from allattn.inference.load import Source
from allattn.model.transformer import count_parameters
from allattn.training.state import (
    FORMAT_VERSION,
    read_json,
    replace_folder,
    save_tensors,
    write_json,
)

Write = Callable[[Source, Path, dict[str, Any]], None]  # fills a folder, adds to its config.json


def write_weights(source: Source, folder: Path, info: dict[str, Any]) -> None:
    """The weights and a card, as `export` writes them by default."""
    save_tensors(folder / "model.safetensors", source.weights.parameters)
    (folder / "README.md").write_text(_card(source, info), encoding="utf-8")


def export(
    source: Source, out: str | Path, overwrite: bool = False, write: Write = write_weights
) -> Path:
    """Export a run, a checkpoint or another export. Closed heads are not in it.

    Args:
        source: what to export.
        out: the folder to make; it appears whole or not at all.
        overwrite: replace an earlier export there.
        write: what belongs to a format; see `formats.writer`.

    Raises:
        ValueError: something else is there already.
    """
    out = Path(out)
    if out.exists():
        if not overwrite:
            raise ValueError(f"{out}: exists; give another --out, or --overwrite to replace it")
        if not _is_export(out):
            raise ValueError(f"{out}: exists and is no export; give another --out")
        if out.resolve() == source.weights.path.resolve():
            raise ValueError(f"{out}: is the source itself; give another --out")
    tokenizer = source.tokenizer()
    source.weights.build()  # refuses weights that do not fit their config
    partial = out.with_name(f".partial_{out.name}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        info = export_info(source)
        write(source, partial, info)
        models = sorted(path for path in partial.iterdir() if path.name != "README.md")
        info["sha256"] = {path.name: sha256(path) for path in models}
        tokenizer.save(partial)
        write_json(partial / "config.json", info)
    except (OSError, ValueError):
        shutil.rmtree(partial, ignore_errors=True)  # a full disk has room again
        raise
    replace_folder(partial, out, out.with_name(f".old_{out.name}"))
    return out


def _is_export(folder: Path) -> bool:
    """Whether we made this folder (a model of another program is not ours to replace)."""
    try:
        return read_json(folder / "config.json").get("model_type") == "allattn"
    except (ValueError, AttributeError):
        return False


def disk_megabytes(folder: Path) -> float:
    """Size of an export, or of the weights in a checkpoint, in MB (1e6 bytes)."""
    weights = folder / "parameters.safetensors"
    files = [weights] if weights.exists() else list(folder.iterdir())
    return sum(f.stat().st_size for f in files) / 1e6


def initial_heads(source: Source) -> int:
    """Heads of the run's first model: what sparsity is a share of."""
    run = source.weights.info.get("run", source.weights.info)
    return run.get("run_heads", sum(source.config.heads))


def export_info(source: Source) -> dict[str, Any]:
    """An export's `config.json`."""
    info = source.weights.info
    run = info.get("run") or {
        "name": info["config"]["run"]["name"],
        **{key: info[key] for key in ("step", "run_heads", "head_ids", "history")},
    }
    return {
        "format_version": FORMAT_VERSION,
        "model_type": "allattn",
        "model": dataclasses.asdict(source.config),
        "tokenizer": source.tokenizer_fingerprint,
        "data": str(source.data_dir),
        "run": run,
    }


def _card(source: Source, info: dict[str, Any]) -> str:
    config = source.config
    parts = count_parameters(config)
    total, run = sum(parts.values()), info["run"]
    heads = "\n".join(f"| {i} | {n} | {'#' * n} |" for i, n in enumerate(config.heads))
    stages = "\n".join(
        f"| {row['stage']} | {row['step']} | {sum(row['heads'])} | {row['ppl']:.3f} |"
        for row in run["history"]
    )
    return f"""# {run["name"]}

A {config.family} language model, trained and pruned with allattn.

- {sum(config.heads)} of {initial_heads(source)} attention heads are left.
- {total:,} parameters, {total - parts["vocabulary"]:,} of them outside the embeddings.
- Trained for {run["step"]} steps on the corpus prepared in `{source.data_dir}`.

| layer | heads | |
| --- | --- | --- |
{heads}

| stage | until step | heads | valid perplexity a token |
| --- | --- | --- | --- |
{stages}

```python
import allattn

model = allattn.load_pretrained("PATH/TO/THIS/FOLDER")
tokenizer = allattn.load_tokenizer("PATH/TO/THIS/FOLDER")
```
"""
