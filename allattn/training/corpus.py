"""The corpus of a run, prepared first where the config says how and there is none yet."""

from __future__ import annotations

import sys
from pathlib import Path

from allattn.config import DataConfig
from allattn.data.lanes import Corpus
from allattn.data.prepare import prepare


def open_corpus(data: DataConfig) -> Corpus | None:
    """The prepared corpus, or None where it is to be prepared first.

    Raises:
        ValueError, FileNotFoundError: It is damaged, or absent without a `data.prepare`.
    """
    if data.prepare is not None and not Path(data.dir).exists():
        return None
    return Corpus(data.dir)


def prepare_corpus(data: DataConfig) -> None:
    """Prepare the corpus as `data.prepare` says; one rank alone does so.

    Raises:
        ValueError, OSError: As `prepare`.
    """
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
