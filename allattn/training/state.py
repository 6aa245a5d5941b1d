"""The one format of a training state: named full tensors in safetensors, and a readable meta.json.

A checkpoint folder holds `parameters.safetensors`, `optimizer.safetensors` (Adam moments),
`memory.safetensors` (Transformer-XL memory of all lanes) and `meta.json`. It does not depend on how
many ranks wrote it. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from allattn.config import (
    Config,
    ConfigError,
    ModelConfig,
    PruneConfig,
    model_config_from_dict,
)
from allattn.config.schema import EXPORT_VERSION
from allattn.data.checksum import check_sha256, sha256
from allattn.model.transformer import TransformerLM
from allattn.moments import reached
from allattn.pruning.gates import log_alphas
from allattn.pruning.methods import PruningState, build_method
from allattn.pruning.removal import cut_config, cut_tensors, fold_output_scales, without_gates

FORMAT_VERSION = 3  # of checkpoints
OLDEST_EXPORT = 3  # the oldest export that is still read
HF_PREFIX = "model."  # of tensor names in an export: a model of transformers has this one inside
MOMENTS = ("exp_avg", "exp_avg_sq")
_CHECKPOINT = re.compile(r"step_(\d{8,})")


@dataclass
class Snapshot:
    """Weights and optimiser state by parameter name; full tensors, float32, on the CPU."""

    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(
        default_factory=lambda: {key: {} for key in MOMENTS}
    )
    adam_steps: dict[str, int] = field(default_factory=dict)  # of AdamW's bias correction


def save_checkpoint(
    checkpoints: Path, snapshot: Snapshot, memory: dict[str, Tensor], meta: dict[str, Any]
) -> Path:
    """Write `checkpoints/step_NNNNNNNN`; it appears whole or not at all.

    Args:
        checkpoints: the folder of a run's checkpoints.
        snapshot: weights and moments.
        memory: `layer_NN` to [lanes, M, D].
        meta: JSON values, `step` among them.

    Raises:
        OSError: it could not be written (a full disk); nothing of it is left.
    """
    final = checkpoints / f"step_{meta['step']:08d}"
    partial = checkpoints / f".partial_{final.name}"
    checkpoints.mkdir(parents=True, exist_ok=True)
    clear_left(checkpoints)
    try:
        partial.mkdir()
        _write_checkpoint(partial, snapshot, memory, meta)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk has room again
        raise
    replace_folder(partial, final, checkpoints / f".going_{final.name}")
    _sync(checkpoints)
    return final


def clear_left(checkpoints: Path) -> None:
    """Delete what a process left there that was killed while it wrote or deleted a checkpoint."""
    for left in checkpoints.glob(".*_step_*"):
        shutil.rmtree(left)


def replace_folder(new: Path, place: Path, old: Path) -> None:
    """Rename a finished folder to its place; one that is there goes only after that.

    Killed in the instant between two renames, `old` holds what was there.
    """
    if old.exists():  # of an earlier such kill
        if place.exists():
            shutil.rmtree(old)
        else:
            os.replace(old, place)
    reached("folder:whole")
    if place.exists():
        os.replace(place, old)
        reached("folder:aside")
    os.replace(new, place)
    reached("folder:placed")
    if old.exists():
        shutil.rmtree(old)


def keep_newest(checkpoints: Path, n: int) -> None:
    """Delete all checkpoints but the newest n and the best by valid perplexity."""
    found = checkpoints_of(checkpoints.parent)
    scored = [(read_meta(path).get("valid_ppl"), path) for path in found]
    scored = [(ppl, path) for ppl, path in scored if ppl is not None and math.isfinite(ppl)]
    best = min(scored)[1] if scored else None
    for path in found[:-n]:
        if path != best:
            _discard(path)


def _discard(checkpoint: Path) -> None:
    """Delete a checkpoint; killed halfway, what is left does not look like one."""
    going = checkpoint.with_name(f".going_{checkpoint.name}")
    os.replace(checkpoint, going)
    reached("checkpoint:going")
    shutil.rmtree(going)


def _write_checkpoint(
    partial: Path, snapshot: Snapshot, memory: dict[str, Tensor], meta: dict[str, Any]
) -> None:
    moments = {f"{key}.{n}": t for key, named in snapshot.moments.items() for n, t in named.items()}
    for name, tensors in (
        ("parameters", snapshot.parameters), ("optimizer", moments), ("memory", memory),
    ):  # fmt: skip
        path = partial / f"{name}.safetensors"
        save_tensors(path, tensors)
    meta = {"format_version": FORMAT_VERSION, **meta, "adam_steps": snapshot.adam_steps}
    meta["sha256"] = {path.name: sha256(path) for path in sorted(partial.iterdir())}
    write_json(partial / "meta.json", meta)


def load_checkpoint(folder: Path) -> tuple[Snapshot, dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote.

    Raises:
        ValueError: a missing, damaged or foreign file, named in one line.
    """
    meta = read_meta(folder)
    with blaming(folder / "meta.json"):
        adam_steps = dict(meta["adam_steps"])
        check_sha256(folder, meta["sha256"])
    parameters = read_tensors(folder / "parameters.safetensors")
    moments: dict[str, dict[str, Tensor]] = {key: {} for key in MOMENTS}
    for name, tensor in read_tensors(folder / "optimizer.safetensors").items():
        key, _, parameter = name.partition(".")
        if key not in moments:
            raise ValueError(f"{folder / 'optimizer.safetensors'}: unknown tensor {name}")
        moments[key][parameter] = tensor
    memory = read_tensors(folder / "memory.safetensors")
    return Snapshot(parameters, moments, adam_steps), memory, meta


@contextlib.contextmanager
def blaming(path: Path) -> Iterator[None]:
    """What goes wrong inside while a file's values are taken apart is the file's fault.

    Raises:
        ValueError: naming it.
    """
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, AssertionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: damaged, or written by another version ({what})") from error


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's `meta.json`, checked for its format version."""
    meta = read_json(folder / "meta.json")
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder / 'meta.json'}: not a checkpoint of format version {FORMAT_VERSION}; "
            "it was written by another program or version"
        )
    if _CHECKPOINT.fullmatch(folder.name) and folder.name != f"step_{meta.get('step')!s:0>8}":
        raise ValueError(
            f"{folder / 'meta.json'}: is of step {meta.get('step')}, not of this folder's"
        )
    return meta


def checkpoints_of(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    folder = run_dir / "checkpoints"
    found = (
        [p for p in folder.iterdir() if _CHECKPOINT.fullmatch(p.name)] if folder.is_dir() else []
    )
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


@dataclass
class Weights:
    """A plain model: gates decided, closed heads cut out.

    Attributes:
        config: its shape.
        parameters: by name.
        info: what else the source says of itself (`meta.json` or `config.json`); `head_ids` are
            the original numbers of the heads that are left.
        path: the folder that was read.
    """

    config: ModelConfig
    parameters: dict[str, Tensor]
    info: dict[str, Any]
    path: Path

    def build(self) -> TransformerLM:
        """The model, in evaluation mode, on the CPU.

        Raises:
            ValueError: the tensors do not fit the config.
        """
        with torch.device("meta"):
            model = TransformerLM(self.config)
        check_shapes(self.path, self.parameters, dict(model.named_parameters()))
        model.load_state_dict(self.parameters, assign=True)
        return model.eval()


def load_weights(path: str | Path) -> Weights:
    """Read a run (its final export, else its newest checkpoint), a checkpoint or an export.

    Gates of a checkpoint from within a pruning stage are decided as evaluation decides them.

    Raises:
        ValueError: nothing usable there, said in one line.
    """
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"{folder}: no such run, checkpoint or export")
    if (folder / "config.json").exists():
        return _load_export(folder)
    if (folder / "meta.json").exists():
        return _load_checkpoint_weights(folder)
    if (folder / "final" / "config.json").exists():
        return _load_export(folder / "final")
    if checkpoints := checkpoints_of(folder):
        return _load_checkpoint_weights(checkpoints[-1])
    raise ValueError(f"{folder}: neither a run with checkpoints, nor a checkpoint, nor an export")


def check_export_version(path: Path, info: Any) -> None:
    """Refuse the config.json of another program, or of another version of this one.

    Raises:
        ValueError: saying what to do.
    """
    version = info.get("format_version") if isinstance(info, dict) else None
    if not isinstance(version, int):
        raise ValueError(f"{path}: not an allattn export (it has no format_version)")
    if version > EXPORT_VERSION:
        raise ValueError(
            f"{path}: of format version {version}, this allattn reads up to {EXPORT_VERSION}; "
            "update allattn"
        )
    if version < OLDEST_EXPORT:
        raise ValueError(
            f"{path}: of format version {version}, this allattn reads {OLDEST_EXPORT} and newer; "
            "export it again from its run (allattn export RUN --out DIR)"
        )


def _load_export(folder: Path) -> Weights:
    path = folder / "config.json"
    info = read_json(path)
    check_export_version(path, info)
    if (format := info.get("format", "hf")) != "hf":
        raise ValueError(
            f"{folder}: an export in the format {format}, to be run as its README.md says; name "
            "the run, or an export in the format hf"
        )
    with blaming(path):
        check_sha256(folder, info["sha256"], "model.safetensors")
        config = model_config_from_dict(info["model"], str(path))
    tensors = read_tensors(folder / "model.safetensors")
    # stored as bf16 or fp16 perhaps
    parameters = {name.removeprefix(HF_PREFIX): t.float() for name, t in tensors.items()}
    return Weights(config, parameters, info, folder)


def _load_checkpoint_weights(folder: Path) -> Weights:
    meta = read_meta(folder)
    with blaming(folder / "meta.json"):
        name = "parameters.safetensors"
        check_sha256(folder, {name: meta["sha256"][name]})
    parameters = read_tensors(folder / name)
    with blaming(folder / "meta.json"):
        config = model_config_from_dict(meta["model"], str(folder / "meta.json"))
        kept, scales = meta["masks"], meta["scales"]
        if meta["pruner"] is not None:
            prune = PruneConfig(**meta["config"]["stages"][meta["stage"]]["prune"])
            method = build_method(prune, 0, PruningState(**meta["pruner"]))
            kept = method.open_now(log_alphas(parameters, config.n_layers))
            scales = method.output_scales(kept)
    if kept is not None:
        parameters = fold_output_scales(without_gates(parameters), scales)
        assert config.d_head is not None, "a validated config has it"
        parameters = cut_tensors(parameters, kept, config.d_head)
        config = cut_config(config, kept)
        with blaming(folder / "meta.json"):
            ids = zip(meta["head_ids"], kept, strict=True)
            meta["head_ids"] = [[layer[h] for h in heads] for layer, heads in ids]
    return Weights(config, parameters, meta, folder)


def with_structure(config: Config, checkpoint: Path | None = None) -> ModelConfig:
    """The model of a run's first step: `run.init_structure` gives it the head counts of another.

    Args:
        config: of the run.
        checkpoint: one of the run, which then knows what it began with.

    Raises:
        ConfigError, ValueError: that one does not fit, or is not there.
    """
    if config.run.init_structure is None:
        return config.model
    if config.run.init_from is not None:
        raise ConfigError("run.init_structure: init_from brings its own heads; set one of the two")
    if checkpoint is not None:
        began = read_meta(checkpoint)["config"]["model"]
        return dataclasses.replace(config.model, n_heads=began["n_heads"], d_head=began["d_head"])
    source = load_weights(config.run.init_structure).config
    if source.n_layers != config.model.n_layers:
        raise ConfigError(
            f"run.init_structure: {config.run.init_structure} has {source.n_layers} layers; set "
            f"model.n_layers={source.n_layers}"
        )
    if not sum(source.heads) and (pruning := [s.name for s in config.stages if s.prune]):
        raise ConfigError(
            f"run.init_structure: {config.run.init_structure} has no head left, so the stage "
            f"{pruning[0]} has nothing to prune"
        )
    return dataclasses.replace(config.model, n_heads=source.heads, d_head=source.d_head)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file and see it onto the disk."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path}: could not be written ({error})") from None
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # safetensors makes files that only their owner can read
    reached(f"write:{path.name}")
    _sync(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; ValueError names a missing or damaged one."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from None


def check_shapes(path: Path, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Refuse tensors that do not fit a model.

    Raises:
        ValueError: naming the file and the first tensor that differs.
    """
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise ValueError(f"{path}: no tensor {name}; it belongs to a model of another shape")
        if name not in expected:
            raise ValueError(f"{path}: tensor {name} has no place in a model of this shape")
        if found[name].shape != expected[name].shape:
            raise ValueError(
                f"{path}: {name} is {list(found[name].shape)}, the model needs "
                f"{list(expected[name].shape)}; it belongs to a model of another shape"
            )


def read_json(path: Path) -> Any:
    """JSON of a file; ValueError names a missing or damaged one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable JSON ({error})") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON and see it onto the disk."""
    path.write_text(json.dumps(value, indent=1, allow_nan=True) + "\n", encoding="utf-8")
    reached(f"write:{path.name}")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
