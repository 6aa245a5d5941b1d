"""Writes tests/model/transformer_xl.safetensors: what another Transformer-XL computes.

It is that of Hugging Face transformers 4.33.3 (Apache-2.0; dropped from later versions), forward
and backward, from random weights.

It runs in an environment of its own, since that version wants older packages than allattn does:

    python3.11 -m venv /tmp/txlenv
    /tmp/txlenv/bin/pip install torch==2.13.0 'numpy<2' transformers==4.33.3
    /tmp/txlenv/bin/python tools/make_transformer_xl_fixture.py

The file holds one group of tensors for each case (`CASES`), every name behind `<case>/`:

    ids, targets [B, T]; memory [L, B, M, D]      inputs
    weight/<allattn's parameter name>             float32; the run itself was in float64
    hidden [B, T, D]                              last layer's output; it has no final norm
    memory_after [L, B, M', D]                    what the next segment would get
    log_probs [B, T, V]                           of the adaptive softmax on `hidden`
    pull_hidden [B, T, D], pull_nll [B, T]        loss = sum(hidden * pull_hidden + nll * pull_nll)
    gradient/<allattn's parameter name>           of the loss; float64

The other tensors are float64 (ids and targets int64). `metadata["cases"]` is JSON: the
shape of each case in the words of allattn's ModelConfig. The memory is never empty: where it is,
Hugging Face attends to zeros, and allattn to nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel

TARGET = Path(__file__).resolve().parents[1] / "tests" / "model" / "transformer_xl.safetensors"
B, T, M = 2, 4, 5
SHAPE = {
    "vocab_size": 12,
    "cutoffs": [5, 8],
    "d_model": 8,
    "n_heads": 2,
    "d_head": 3,
    "d_ff": 5,
    "n_layers": 2,
    "mem_len": 6,
    "div_value": 2,
    "clamp_len": None,
    "same_length": False,
}
CASES = {
    "narrowing": SHAPE,
    "clamped": {**SHAPE, "n_layers": 1, "div_value": 1, "clamp_len": 3},
    # its mem_len of 5 lets a query see 5 keys, itself included, so it is 4 in allattn's words
    "same_length": {**SHAPE, "n_layers": 1, "mem_len": 4, "same_length": True},
}


def names(case: dict) -> dict[str, str | tuple[str, slice]]:
    """From allattn's parameter names to Hugging Face's, with rows where only some correspond."""
    result: dict[str, str | tuple[str, slice]] = {}
    width = case["n_heads"] * case["d_head"]
    for i in range(case["n_layers"]):
        ours, theirs = f"layers.{i}.", f"transformer.layers.{i}."
        for part, name in enumerate(("query", "key", "value")):
            rows = slice(part * width, (part + 1) * width)
            result[f"{ours}attention.{name}.weight"] = (f"{theirs}dec_attn.qkv_net.weight", rows)
        result[f"{ours}attention.position.weight"] = f"{theirs}dec_attn.r_net.weight"
        result[f"{ours}attention.output.weight"] = f"{theirs}dec_attn.o_net.weight"
        result[f"{ours}attention.content_bias"] = f"{theirs}dec_attn.r_w_bias"
        result[f"{ours}attention.position_bias"] = f"{theirs}dec_attn.r_r_bias"
        for kind in ("weight", "bias"):
            result[f"{ours}attention_norm.{kind}"] = f"{theirs}dec_attn.layer_norm.{kind}"
            result[f"{ours}feed_forward_norm.{kind}"] = f"{theirs}pos_ff.layer_norm.{kind}"
            result[f"{ours}feed_forward.inner.{kind}"] = f"{theirs}pos_ff.CoreNet.0.{kind}"
            result[f"{ours}feed_forward.outer.{kind}"] = f"{theirs}pos_ff.CoreNet.3.{kind}"
    edges = [0, *case["cutoffs"], case["vocab_size"]]
    for c in range(len(edges) - 1):
        ours = f"vocabulary.embeddings.{c}", f"vocabulary.biases.{c}"
        if case["div_value"] == 1:  # one matrix for all clusters
            rows = slice(edges[c], edges[c + 1])
            result[ours[0]] = ("transformer.word_emb.emb_layers.0.weight", rows)
            result[ours[1]] = ("crit.out_layers.0.bias", rows)
        else:
            result[ours[0]] = f"transformer.word_emb.emb_layers.{c}.weight"
            result[ours[1]] = f"crit.out_layers.{c}.bias"
            result[f"vocabulary.projections.{c}"] = f"transformer.word_emb.emb_projs.{c}"
    if case["div_value"] > 1:
        result["vocabulary.output_projection"] = "crit.out_projs.0"
    result["vocabulary.cluster_weight"] = "crit.cluster_weight"
    result["vocabulary.cluster_bias"] = "crit.cluster_bias"
    return result


def build(case: dict) -> TransfoXLLMHeadModel:
    """A float64 model with every parameter random, and exactly a float32 number."""
    model = TransfoXLLMHeadModel(
        TransfoXLConfig(
            vocab_size=case["vocab_size"],
            cutoffs=case["cutoffs"],
            d_model=case["d_model"],
            d_embed=case["d_model"],
            n_head=case["n_heads"],
            d_head=case["d_head"],
            d_inner=case["d_ff"],
            n_layer=case["n_layers"],
            div_val=case["div_value"],
            mem_len=case["mem_len"] + case["same_length"],
            clamp_len=case["clamp_len"] or -1,
            same_length=case["same_length"],
            attn_type=0,
            pre_lnorm=True,
            untie_r=True,
            dropout=0.0,
            dropatt=0.0,
        )
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(mean=float(name.endswith("layer_norm.weight")), std=0.4)
    model = model.double().eval()
    even = torch.arange(0, case["d_model"], 2, dtype=torch.float64)
    model.transformer.pos_emb.inv_freq = 10000 ** (-even / case["d_model"])  # was float32
    return model


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Its attention casts scores to float32 before masking them; here it does not."""
    with mock.patch.object(Tensor, "float", lambda self: self):
        yield


def run(case: dict) -> dict[str, Tensor]:
    """One segment, forward and backward."""
    model = build(case)
    parameters = dict(model.named_parameters())
    V, D, L = case["vocab_size"], case["d_model"], case["n_layers"]
    spread = torch.arange(B * T) * V // (B * T)  # some of every cluster
    ids, targets = (spread[torch.randperm(B * T)].view(B, T) for _ in range(2))
    memory = torch.randn(L, B, M, D, dtype=torch.float64)
    pull_hidden = torch.randn(B, T, D, dtype=torch.float64)
    pull_nll = torch.randn(B, T, dtype=torch.float64)
    with in_float64():
        out = model.transformer(ids, mems=[m.transpose(0, 1).contiguous() for m in memory])
        hidden = out.last_hidden_state
        log_probs = model.crit(hidden).view(B, T, V)
    nll = -log_probs.gather(2, targets[..., None]).squeeze(2)
    ((hidden * pull_hidden).sum() + (nll * pull_nll).sum()).backward()

    result = {
        "ids": ids,
        "targets": targets,
        "memory": memory,
        "hidden": hidden.detach(),
        "memory_after": torch.stack(out.mems).transpose(1, 2).contiguous(),
        "log_probs": log_probs.detach(),
        "pull_hidden": pull_hidden,
        "pull_nll": pull_nll,
    }
    used = set()
    for ours, theirs in names(case).items():
        name, rows = theirs if isinstance(theirs, tuple) else (theirs, slice(None))
        used.add(name)
        result[f"weight/{ours}"] = parameters[name].detach()[rows].float().contiguous()
        result[f"gradient/{ours}"] = parameters[name].grad[rows].clone()
        assert torch.equal(result[f"weight/{ours}"].double(), parameters[name].detach()[rows])
    assert used == set(parameters), used ^ set(parameters)
    return result


def main() -> None:
    """Write the file."""
    torch.manual_seed(0)
    tensors = {}
    for label, case in CASES.items():
        tensors |= {f"{label}/{name}": tensor for name, tensor in run(case).items()}
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}"
    save_file(tensors, TARGET, metadata={"cases": json.dumps(CASES), "made_by": made_by})
    print(f"{TARGET}: {TARGET.stat().st_size} bytes, {made_by}")


if __name__ == "__main__":
    main()
