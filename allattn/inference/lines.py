"""Score every line of a text by itself: what comes before a line changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from allattn.data.sources import Text, read_blocks
from allattn.data.tokenizers import Tokenizer
from allattn.model.scoring import perplexity
from allattn.model.transformer import TransformerLM

_AHEAD = 512  # segments taken together to be sorted by length, so that little is padding


def score_lines(
    model: TransformerLM, tokenizer: Tokenizer, texts: list[Text], batch_size: int
) -> tuple[list[dict[str, Any]], int]:
    """One score a line, its line end included, and the bytes of the texts.

    Args:
        model: in evaluation mode, with mem_len 0.
        tokenizer: the model's.
        texts: the lines.
        batch_size: segments side by side.

    Returns:
        By line: `line` (from 1), `nats`, `tokens`, `words` (its line end counts as one), `loss`
        (nats a token), `ppl` and `word_ppl`; and the texts' size in UTF-8 bytes, newlines included.
    """
    lines: list[dict[str, Any]] = []
    waiting: list[tuple[int, list[int]]] = []  # line, the token before the segment, its tokens
    n_bytes = 0
    bar = tqdm(unit="line", disable=not sys.stderr.isatty(), desc="lines")
    with bar:
        for line in _lines(texts):
            n_bytes += len(line.encode("utf-8")) + 1
            ids = [tokenizer.eos_id, *tokenizer.encode_line(line)]
            lines.append({"line": len(lines) + 1, "nats": 0.0, "tokens": len(ids) - 1})
            lines[-1]["words"] = len(line.split()) + 1
            for start in range(0, len(ids) - 1, model.config.seq_len):
                waiting.append((len(lines) - 1, ids[start : start + model.config.seq_len + 1]))
                if len(waiting) == max(_AHEAD, batch_size):
                    _score(model, waiting, lines, batch_size)
                    waiting = []
            bar.update()
        _score(model, waiting, lines, batch_size)
    for entry in lines:
        entry["loss"] = entry["nats"] / entry["tokens"]
        entry["ppl"] = perplexity(entry["loss"])
        entry["word_ppl"] = perplexity(entry["nats"] / entry["words"])
    return lines, n_bytes


def _lines(texts: list[Text]) -> Iterator[str]:
    rest = ""  # of a line so long that it comes in parts
    for text in texts:
        for block in read_blocks(text):
            *whole, last = (rest + block.text()).split("\n")
            rest = last
            yield from whole


@torch.no_grad()
def _score(
    model: TransformerLM,
    waiting: list[tuple[int, list[int]]],
    lines: list[dict[str, Any]],
    batch_size: int,
) -> None:
    """Add the losses of segments to their lines."""
    device = next(model.parameters()).device
    waiting = sorted(waiting, key=lambda pair: len(pair[1]))
    for first in range(0, len(waiting), batch_size):
        rows = waiting[first : first + batch_size]
        T = max(len(ids) for _, ids in rows) - 1
        inputs = np.zeros((len(rows), T), dtype=np.int64)
        targets = np.full((len(rows), T), -1, dtype=np.int64)
        for row, (_, ids) in enumerate(rows):  # padding comes after, where no token sees it
            inputs[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
        targets_BT = torch.from_numpy(targets).to(device)
        nll = model(torch.from_numpy(inputs).to(device), targets_BT, None).nll.double()
        sums = nll.masked_fill(targets_BT == -1, 0).sum(1).tolist()
        for (line, _), nats in zip(rows, sums, strict=True):
            lines[line]["nats"] += nats
