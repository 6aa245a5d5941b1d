"""Every export is evaluated by a fresh process: what is handed over is what was trained."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import allattn
from allattn.data.lanes import Corpus
from allattn.inference.evaluate import evaluate
from allattn.inference.load import Source, pick_device

SPLIT = "valid"
TOLERANCE = 1e-3  # of the perplexity, relative


def corpus_of(source: Source) -> tuple[Corpus | None, str]:
    """The corpus of training, or None and why there is none to evaluate on."""
    try:
        corpus = source.corpus()
    except (ValueError, OSError) as error:
        return None, str(error)
    if SPLIT not in corpus.splits:
        return None, f"{corpus.dir}: has no {SPLIT} split"
    trained_on = source.weights.info.get("corpus")
    if trained_on not in (None, corpus.splits["train"]["sha256"]):
        return None, f"{corpus.dir}: has changed since this model was trained"
    return corpus, ""


def recorded_perplexity(source: Source, corpus: Corpus) -> float:
    """The perplexity of the run itself on the valid split.

    That of the checkpoint where it was computed in float32; else computed here.
    """
    info = source.weights.info
    precision = info["config"]["train"]["precision"] if "config" in info else "fp32"
    found = info.get("valid_ppl")
    if precision == "fp32" and found is not None and math.isfinite(found):
        recorded: float = found
        return recorded
    model = source.weights.build().float().to(pick_device("auto"))
    ppl: float = evaluate(model, corpus, SPLIT, 8)["ppl"]
    return ppl


def evaluate_afresh(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """`allattn evaluate` of an export in a process of its own; the keys of its `--json`.

    Raises:
        ValueError: it fails there, with its own words.
    """
    home = str(Path(allattn.__file__).parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "allattn", "evaluate", str(folder), "--split", SPLIT]
    result = subprocess.run(
        [*command, "--data", str(corpus.dir), "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if result.returncode:
        said = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{folder}: a fresh process cannot evaluate it: {said}")
    scores: dict[str, Any] = json.loads(result.stdout)
    return scores


def check(
    folder: Path, out: Path, source: Source, corpus: Corpus, info: dict[str, Any]
) -> dict[str, Any]:
    """Compare an export with its run.

    Args:
        folder: where the export is now.
        out: where it is going to be, for the message.
        source: what was exported.
        corpus: of training.
        info: the export's config.json; numbers in fewer bits have a perplexity of their own.

    Returns:
        What the fresh process found.

    Raises:
        ValueError: another perplexity than the run's.
    """
    if "perplexity" in info:
        expected = info["perplexity"][info["numbers"]]
    else:
        expected = recorded_perplexity(source, corpus)
    found = evaluate_afresh(folder, corpus)
    # not `>`: a NaN is no proof
    if not abs(found["ppl"] - expected) <= TOLERANCE * expected and found["ppl"] != expected:
        raise ValueError(
            f"{out}: not exported: a fresh process finds a {SPLIT} perplexity of "
            f"{found['ppl']:.4f}, the run had {expected:.4f}; if its corpus {corpus.dir} has "
            "changed since, --no-check exports it all the same"
        )
    return found
