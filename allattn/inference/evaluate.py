"""Perplexity of a model on a split or a text, with memory, every token scored exactly once.

Definitions: `loss` is nats a token; `ppl` its exponential; `word_ppl` the exponential of the total
loss over whitespace words plus line ends of the original text, so that models with different
tokenizers compare; `bits_per_byte` the total loss in bits over the text's UTF-8 bytes.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from allattn.config import ArgumentError, ModelConfig
from allattn.data.lanes import Corpus
from allattn.data.sources import Text, find_texts, read_blocks
from allattn.data.tokenizers import Tokenizer
from allattn.data.workers import encode, id_type
from allattn.inference.lines import score_lines
from allattn.inference.load import Source, build_model
from allattn.model.scoring import perplexity, score_stream
from allattn.model.transformer import TransformerLM


def evaluate_source(
    source: Source,
    corpus: Corpus | None,
    split: str,
    *,
    text: str | Path | None = None,
    per_line: bool = False,
    seq_len: int | None = None,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    batch_size: int = 8,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Evaluate with other lengths than those of training, if wanted; see `evaluate`.

    Args:
        source: the model and its tokenizer.
        corpus: where the split is; not needed for a text.
        split: `valid`, say.
        text: score this file instead of a split; see `evaluate_text`.
        per_line: of a text: every line by itself, without memory.
        seq_len: tokens a segment.
        mem_len: remembered tokens.
        clamp_len: distances above count as this one.
        same_length: every token sees mem_len tokens before it.
        batch_size: streams, or lines, side by side.
        device: where to compute.
    """
    if per_line and text is None:
        raise ArgumentError("per_line", "lines belong to a text; name it with {text}", ("text",))
    if per_line and mem_len:
        raise ArgumentError("mem_len", f"a line by itself has no memory, so not {mem_len} but 0")
    if per_line and same_length:
        raise ArgumentError(
            "same_length", "a line by itself has no mem_len tokens before each token"
        )
    changes = {
        "seq_len": seq_len, "mem_len": 0 if per_line else mem_len, "clamp_len": clamp_len,
        "same_length": False if per_line else same_length,
    }  # fmt: skip
    for key in ("seq_len", "mem_len", "clamp_len"):
        value, low = changes[key], 0 if key == "mem_len" else 1
        if value is not None and value < low:
            raise ArgumentError(key, f"{low} or more is needed, not {value}")
    if batch_size < 1:
        raise ArgumentError("batch_size", f"1 or more is needed, not {batch_size}")
    model = build_model(
        source.weights, **{key: value for key, value in changes.items() if value is not None}
    ).to(device or "cpu")
    if text is not None:
        result = evaluate_text(model, source.tokenizer(), text, batch_size, per_line)
    else:
        assert corpus is not None
        result = evaluate(model, corpus, split, batch_size)
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
    tokens = corpus.tokens(split)
    return _stream(model, tokens, corpus.tokenizer.eos_id, corpus.splits[split], split, batch_size)


def evaluate_text(
    model: TransformerLM,
    tokenizer: Tokenizer,
    path: str | Path,
    batch_size: int,
    per_line: bool = False,
) -> dict[str, Any]:
    """Score a text file, or what `prepare` takes for one; a last line without a newline gets one.

    Args:
        model: in evaluation mode.
        tokenizer: the model's.
        path: the text.
        batch_size: streams, or lines, side by side; it does not change the result.
        per_line: every line by itself, after a line end: the model's mem_len has to be 0, without
            same_length, which would hide the line's own tokens too. A line of more than seq_len
            tokens is scored in segments that do not see each other.

    Returns:
        As `evaluate`, with the path as `text` and no `split`; per line also `lines`, a list of
        `line, nats, tokens, words, loss, ppl, word_ppl`.

    Raises:
        FileNotFoundError, ValueError: no such text, or one that cannot be read.
    """
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.config.vocab_size}"
        )
    texts = find_texts([path], "--text")
    if not per_line:
        tokens, counts = _tokens(tokenizer, texts)
        result = _stream(model, tokens, tokenizer.eos_id, counts, str(path), batch_size)
        return {"text": str(path), **result, "split": None}
    assert model.config.mem_len == 0 and not model.config.same_length
    started = time.perf_counter()
    lines, n_bytes = score_lines(model, tokenizer, texts, batch_size)
    if not lines:
        raise ValueError(f"{path}: no line in it; a score needs text")
    counts = {key: sum(line[key] for line in lines) for key in ("tokens", "words")}
    nats = sum(line["nats"] for line in lines)
    report = _report(model, nats, counts["tokens"], counts | {"bytes": n_bytes}, started)
    return {"text": str(path), "split": None, **report, "lines": lines}


def _tokens(tokenizer: Tokenizer, texts: list[Text]) -> tuple[np.ndarray, dict[str, int]]:
    """Ids and counts of a text, as `prepare` has them."""
    counts = dict.fromkeys(("tokens", "words", "lines", "bytes"), 0)
    parts: list[bytes] = []
    for text in texts:
        for block in read_blocks(text):
            ids, found = encode(tokenizer, block)
            parts.append(ids)
            counts = {key: n + found[key] for key, n in counts.items()}
    return np.frombuffer(b"".join(parts), dtype=id_type(tokenizer.vocab_size)), counts


def _stream(
    model: TransformerLM,
    tokens: np.ndarray,
    eos_id: int,
    counts: Mapping[str, int],
    name: str,
    batch_size: int,
) -> dict[str, Any]:
    started = time.perf_counter()
    bar = tqdm(total=len(tokens), unit="tok", disable=not sys.stderr.isatty(), desc=name)
    with bar:
        nats, n = score_stream(
            model,
            model,
            tokens,
            eos_id,
            seq_len=model.config.seq_len,
            batch_size=batch_size,
            on_segment=bar.update,
        ).tolist()
    return {"split": name, **_report(model, nats, int(n), counts, started)}


def _report(
    model: TransformerLM, nats: float, n: int, counts: Mapping[str, int], started: float
) -> dict[str, Any]:
    """What was scored since `started`, by the definitions above."""
    params = {name: p.numel() for name, p in model.named_parameters()}
    return scores(model.config, nats, n, counts, started) | {
        "params": sum(params.values()),
        "params_non_embedding": sum(
            n for name, n in params.items() if not name.startswith("vocabulary.")
        ),
    }


def scores(
    config: ModelConfig, nats: float, n: int, counts: Mapping[str, int], started: float
) -> dict[str, Any]:
    """The figures of a text, by the definitions above.

    Args:
        config: of the model.
        nats: total loss.
        n: tokens scored.
        counts: `words` and `bytes` of the text.
        started: when, by time.perf_counter.
    """
    return {
        "loss": nats / n,
        "ppl": perplexity(nats / n),
        "word_ppl": perplexity(nats / counts["words"]),
        "bits_per_byte": nats / math.log(2) / counts["bytes"],
        "tokens": n,
        "words": counts["words"],
        "seq_len": config.seq_len,
        "mem_len": config.mem_len,
        "clamp_len": config.clamp_len,
        "same_length": config.same_length,
        "heads": config.heads,
        "tokens_per_second": n / (time.perf_counter() - started),
    }
