"""Perplexity of a model on a split, with memory, every token scored exactly once.

Definitions: `loss` is nats a token; `ppl` its exponential; `word_ppl` the exponential of the total
loss over whitespace words plus line ends of the original text, so that models with different
tokenizers compare; `bits_per_byte` the total loss in bits over the text's UTF-8 bytes.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from allattn.config import ConfigError
from allattn.data.lanes import Corpus
from allattn.inference.load import Source, build_model
from allattn.model.scoring import perplexity, score_stream
from allattn.model.transformer import TransformerLM


def evaluate_source(
    source: Source,
    corpus: Corpus,
    split: str,
    *,
    seq_len: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    batch_size: int = 8,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Evaluate with other lengths than those of training, if wanted; see `evaluate`."""
    changes = {
        "seq_len": seq_len, "mem_len": mem_len, "clamp_len": clamp_len, "same_length": same_length,
    }  # fmt: skip
    for key in ("seq_len", "mem_len", "clamp_len"):
        if changes[key] is not None and changes[key] < (0 if key == "mem_len" else 1):
            raise ConfigError(f"--{key.replace('_', '-')}: {changes[key]} is too small")
    if batch_size < 1:
        raise ConfigError(f"--batch-size: {batch_size} is too small")
    model = build_model(
        source.weights, **{key: value for key, value in changes.items() if value is not None}
    )
    result = evaluate(model.to(device or "cpu"), corpus, split, batch_size)
    return {"model": str(source.weights.path)} | result


def evaluate(model: TransformerLM, corpus: Corpus, split: str, batch_size: int) -> dict[str, Any]:
    """Score a split with the model's own seq_len and mem_len.

    Args:
        model: in evaluation mode.
        corpus: with this model's tokenizer.
        split: `valid`, say.
        batch_size: streams side by side; it does not change the result.

    Returns:
        The keys that DESIGN section 8 lists for `evaluate`.
    """
    config = model.config
    tokens = corpus.tokens(split)
    started = time.perf_counter()
    bar = tqdm(total=len(tokens), unit="tok", disable=not sys.stderr.isatty(), desc=split)
    with bar:
        nats, n = score_stream(
            model,
            model,
            tokens,
            corpus.tokenizer.eos_id,
            seq_len=config.seq_len,
            batch_size=batch_size,
            on_segment=bar.update,
        ).tolist()
    elapsed = time.perf_counter() - started
    counts = corpus.splits[split]
    params = {name: p.numel() for name, p in model.named_parameters()}
    return {
        "split": split,
        "loss": nats / n,
        "ppl": perplexity(nats / n),
        "word_ppl": perplexity(nats / counts["words"]),
        "bits_per_byte": nats / math.log(2) / counts["bytes"],
        "tokens": int(n),
        "words": counts["words"],
        "seq_len": config.seq_len,
        "mem_len": config.mem_len,
        "clamp_len": config.clamp_len,
        "same_length": config.same_length,
        "heads": config.heads,
        "params": sum(params.values()),
        "params_non_embedding": sum(
            n for name, n in params.items() if not name.startswith("vocabulary.")
        ),
        "tokens_per_second": n / elapsed,
    }
