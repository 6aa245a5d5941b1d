"""Open a run, a checkpoint or an export for use: the model, its tokenizer, its corpus."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from allattn.config import ArgumentError, ModelConfig, UnavailableError
from allattn.data.lanes import Corpus
from allattn.data.tokenizers import Tokenizer, load_tokenizer
from allattn.model.transformer import TransformerLM
from allattn.training.state import Weights, blaming, load_weights


@dataclass
class Source:
    """A run, checkpoint or export, read.

    Attributes:
        weights: plain model: gates decided, closed heads cut out.
        data_dir: the prepared corpus that it was trained on.
        tokenizer_dir: where its tokenizer is: beside the weights of an export, else with the data.
        tokenizer_fingerprint: of the tokenizer that it was trained with.
    """

    weights: Weights
    data_dir: Path
    tokenizer_dir: Path
    tokenizer_fingerprint: str

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.weights.config

    @property
    def run(self) -> dict[str, Any]:
        """The run that it comes from: `step, run_heads, head_ids, first_heads, history, name`.

        `head_ids` are by layer the numbers that its heads had in the run's first model, whose head
        counts are `first_heads`, and their sum `run_heads`.

        Raises:
            ValueError: the file that tells of it is damaged.
        """
        with blaming(self.weights.path / self._about):
            return self._run()

    @property
    def _about(self) -> str:
        """The file that tells of the run."""
        return "meta.json" if "config" in self.weights.info else "config.json"

    def _run(self) -> dict[str, Any]:
        info, heads = self.weights.info, self.config.heads
        if "config" in info:  # a checkpoint
            run = {key: info[key] for key in ("step", "run_heads", "head_ids", "history")}
            run["name"] = info["config"]["run"]["name"]
            run["first_heads"] = ModelConfig(**info["config"]["model"]).heads
            return run
        run = dict(info["run"])
        run.setdefault("run_heads", sum(heads))
        run["head_ids"] = run.get("head_ids") or [list(range(n)) for n in heads]
        if "first_heads" not in run:  # of format version 3, which knows their sum
            even = run["run_heads"] // max(len(heads), 1)
            run["first_heads"] = [max([even, *(i + 1 for i in ids)]) for ids in run["head_ids"]]
        return run

    def corpus(self, data_dir: str | Path | None = None) -> Corpus:
        """The corpus to evaluate on; it must have this model's tokenizer.

        Raises:
            ValueError, FileNotFoundError: absent, or prepared with another tokenizer.
        """
        path = self.weights.path
        return open_corpus(data_dir, self.data_dir, self.tokenizer_fingerprint, path)

    def moved(self, data_dir: str | Path) -> Source:
        """The same, its corpus somewhere else than at training."""
        beside = self.tokenizer_dir == self.data_dir
        folder = Path(data_dir)
        return replace(
            self, data_dir=folder, tokenizer_dir=folder if beside else self.tokenizer_dir
        )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that it was trained with.

        Raises:
            ValueError: another one is there.
        """
        folder = self.tokenizer_dir
        try:
            tokenizer = load_tokenizer(folder)
        except FileNotFoundError as error:
            hint = "; or name the prepared corpus with --data" if folder == self.data_dir else ""
            raise ValueError(f"{error}{hint}") from None
        if tokenizer.fingerprint() != self.tokenizer_fingerprint:
            raise ValueError(
                f"{folder}: not the tokenizer that {self.weights.path} was trained with"
            )
        return tokenizer


def open_corpus(
    data_dir: str | Path | None, trained_on: str | Path, fingerprint: str, model: Path
) -> Corpus:
    """The corpus to evaluate a model on.

    Args:
        data_dir: where it is; None: where it was at training.
        trained_on: there.
        fingerprint: of the model's tokenizer.
        model: its folder, for the message.

    Raises:
        ValueError: absent, or prepared with another tokenizer.
    """
    try:
        corpus = Corpus(data_dir or trained_on)
    except FileNotFoundError as error:
        hint = "" if data_dir else "; or name the prepared corpus with --data"
        raise ValueError(f"{error}{hint}") from None
    if corpus.tokenizer.fingerprint() != fingerprint:
        raise ValueError(
            f"{corpus.dir}: its tokenizer is not the one that {model} was trained with; prepare "
            "the text with that one"
        )
    return corpus


def open_source(path: str | Path) -> Source:
    """Read a run (its final export, else its newest checkpoint), a checkpoint or an export.

    Raises:
        ValueError: nothing usable there, said in one line.
    """
    weights = load_weights(path)
    info = weights.info
    if "model_type" in info:  # an export
        with blaming(weights.path / "config.json"):
            return Source(weights, Path(info["data"]), weights.path, info["tokenizer"])
    with blaming(weights.path / "meta.json"):
        data = Path(info["config"]["data"]["dir"])
        return Source(weights, data, data, info["tokenizer"])


def load_pretrained(path: str | Path, **changes: Any) -> TransformerLM:
    """Load a model in evaluation mode, on the CPU, in float32.

    Args:
        path: A run (its final model, or else its newest checkpoint), a checkpoint or an export.
        **changes: Fields of `ModelConfig` that weights do not depend on, such as `mem_len`.

    Returns:
        The model, a `torch.nn.Module`; heads that were pruned are not in it.

    Raises:
        ValueError: Nothing usable is there, or the weights forbid a change.
    """
    return build_model(load_weights(path), **changes)


def build_model(weights: Weights, **changes: Any) -> TransformerLM:
    """As `load_pretrained`, for weights already read."""
    free = {"seq_len", "mem_len", "clamp_len", "same_length", "attention"}
    if unknown := changes.keys() - free:
        raise ValueError(f"{', '.join(sorted(unknown))}: fixed by the weights")
    config = weights.config
    if config.position == "learned" and changes.get("clamp_len") is not None:
        if changes["clamp_len"] != config.clamp_len:
            raise ValueError(
                f"clamp_len: the learned table of distances ends at {config.clamp_len}; leave it"
            )
    return replace(weights, config=replace(config, **changes)).build()


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` to a device.

    Raises:
        ArgumentError: It is none of these, or there is no such device here.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ArgumentError("device", f"auto, cpu or cuda is needed, not {name!r}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnavailableError("device", "cuda is not available here; use auto or cpu")
    return torch.device(name)
