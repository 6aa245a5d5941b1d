"""Uses a trained model: writes it as a folder of its own, samples from it, loads its tokenizer.

Every `path` is a run (its final model, or else its newest checkpoint), a checkpoint or an export.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from allattn.api.arguments import at_least, folder, one_of, seed_of
from allattn.config import ArgumentError

if TYPE_CHECKING:
    from allattn.data.base import Tokenizer

DTYPES = ("fp32", "bf16", "fp16", "int8")
FORMATS = ("hf", "onnx", "pt2")


def export(
    path: str | Path,
    out: str | Path,
    *,
    format: str = "hf",
    dtype: str = "fp32",
    aot: bool = False,
    seq_len: int | None = None,
    data: str | Path | None = None,
    license: str = "unknown",
    check: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write a model as a folder of its own, with its tokenizer and a model card.

    Args:
        path: A run, a checkpoint or an export.
        out: The folder to make; it appears whole or not at all.
        format: `hf` (weights for allattn and transformers), `onnx` or `pt2` (programs).
        dtype: How numbers are stored: `fp32`, `bf16`, `fp16`, or `int8` (ONNX only).
        aot: For `pt2`: compile for this machine as well.
        seq_len: For `onnx` and `pt2`: tokens of the longest call; None takes training's segments.
        data: A prepared corpus, to measure `dtype` on and to check the export with; None takes
            that of training.
        license: Of the weights, for the model card, such as `mit`.
        check: Have a fresh process evaluate the export on the valid split.
        overwrite: Replace an export there.

    Returns:
        The folder.

    Raises:
        ArgumentError: An argument cannot be used, or asks for what is not installed.
        ValueError, OSError: The model or the corpus is missing or damaged, `out` is something
            else, or the export does not have the perplexity of the run.
    """
    from allattn.inference.export import export as export_source
    from allattn.inference.formats import Numbers, writer
    from allattn.inference.load import open_source

    target = folder("out", out)
    one_of("format", format, FORMATS)
    one_of("dtype", dtype, DTYPES)
    source = open_source(path)
    if data is not None:
        source = source.moved(data)
    corpus = source.corpus() if data is not None or dtype != "fp32" else None
    write = writer(format, Numbers(dtype, corpus), aot=aot, seq_len=seq_len)
    return export_source(source, target, overwrite, write=write, check=check, license=license)


def generate(
    path: str | Path,
    prompt: str = "",
    *,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Sample text from a model.

    Args:
        path: A run, a checkpoint or an export.
        prompt: The text to go on from.
        max_new_tokens: How many tokens to sample.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Sample among this many likeliest tokens; None among all.
        top_p: Sample among the likeliest tokens that together have this probability.
        seed: Of the random draws.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        `prompt`, `text` (the prompt and what follows it) and `tokens` (the new ids).

    Raises:
        ArgumentError: An argument cannot be used.
        ValueError, OSError: The model or its tokenizer is missing or damaged.
    """
    from tqdm import tqdm

    from allattn.inference.load import build_model, open_source, pick_device
    from allattn.model.generate import generate as sample

    at_least("max_new_tokens", max_new_tokens, 0)
    at_least("temperature", temperature, 0)
    at_least("top_k", top_k, 1)
    seed_of("seed", seed)
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError("top_p", f"a share above 0, at most 1, is needed, not {top_p}")
    source = open_source(path)
    tokenizer = source.tokenizer()
    model = build_model(source.weights).to(pick_device(device))
    start = tokenizer.encode(prompt) or [tokenizer.eos_id]
    steps = sample(
        model,
        [start],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    new = [ids[0] for ids in tqdm(steps, total=max_new_tokens, disable=None, unit="tok")]
    text = tokenizer.decode(start + new) if prompt else tokenizer.decode(new)
    return {"prompt": prompt, "text": text, "tokens": new}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model or of a prepared corpus.

    Args:
        path: A run, a checkpoint, an export, or a corpus that `prepare` wrote.

    Returns:
        The tokenizer, with `encode`, `decode`, `vocab_size` and `eos_id`.

    Raises:
        ValueError, OSError: Nothing usable is there, or the tokenizer is not the model's.
    """
    from allattn.data.tokenizers import HF_TOKENIZER_FILE, TOKENIZER_FILE
    from allattn.data.tokenizers import load_tokenizer as load_from
    from allattn.inference.load import open_source

    if any((Path(path) / name).exists() for name in (TOKENIZER_FILE, HF_TOKENIZER_FILE)):
        return load_from(path)
    return open_source(path).tokenizer()
