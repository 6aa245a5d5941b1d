"""Opens the corpus of a run, and prepares it first where the config says how."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from allattn.config import DataConfig
from allattn.data.lanes import Corpus
from allattn.data.prepare import prepare
from allattn.training.ranks import World


def open_corpus(data: DataConfig) -> Corpus | None:
    """Open the prepared corpus; None means that it is to be prepared first.

    Raises:
        ValueError, FileNotFoundError: It is damaged, or absent without a `data.prepare`.
    """
    if data.prepare is not None and not Path(data.dir).exists():
        return None
    return Corpus(data.dir)


def prepare_missing(corpus: Corpus | None, data: DataConfig, world: World) -> Corpus:
    """Return the corpus, which rank 0 prepares where it is missing; all ranks must call this.

    Args:
        corpus: What `open_corpus` found.
        data: The config's section.
        world: The ranks; the others wait for rank 0.

    Raises:
        ValueError, OSError: It cannot be prepared.
    """
    if data.prepare is not None:
        failure: Exception | None = None
        if corpus is None and world.rank == 0:
            try:
                _prepare(data)
            except (ValueError, OSError) as error:
                failure = error
        failed = world.sum(torch.tensor([float(failure is not None)], device=world.device))
        if failure is not None:
            raise failure
        if failed > 0:
            raise ValueError(f"{data.dir}: rank 0 could not prepare it, and says why")
    return corpus or Corpus(data.dir)


def _prepare(data: DataConfig) -> None:
    how = data.prepare
    assert how is not None
    print(
        f"allattn: {data.dir} is not there yet: preparing the dataset {how.dataset} with the "
        f"tokenizer {how.tokenizer}, as data.prepare says",
        file=sys.stderr,
        flush=True,
    )
    prepare(
        out=data.dir,
        dataset=how.dataset,
        source=how.source,
        tokenizer=how.tokenizer,
        vocab_size=how.vocab_size,
    )
