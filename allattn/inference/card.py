"""The model card of an export: what it is, how good, how to load it."""

from __future__ import annotations

import json
from typing import Any

from allattn.config.schema import ModelConfig
from allattn.model.transformer import count_parameters, flops_per_token

OPEN, GONE = "█", "░"


def picture(heads: list[int], head_ids: list[list[int]], first_heads: list[int]) -> str:
    """A row for each layer: its heads in the run's first model, those left filled."""
    rows = []
    for layer, (n, ids, first) in enumerate(zip(heads, head_ids, first_heads, strict=True)):
        bar = "".join(OPEN if i in ids else GONE for i in range(first))
        rows.append(f"layer {layer:>2}  {bar.ljust(max(first_heads))}  {n} of {first}")
    return "\n".join(rows)


def card(
    config: ModelConfig,
    info: dict[str, Any],
    megabytes: float,
    license: str,
    proof: dict[str, Any] | None,
    why_not: str,
) -> str:
    """README.md of an export.

    Args:
        config: of the model.
        info: its `config.json`.
        megabytes: size of the weights, 1e6 bytes.
        license: of the weights, as the hub names it.
        proof: what `allattn evaluate` found in a fresh process, or None.
        why_not: the reason, where there is none.
    """
    run, parts = info["run"], count_parameters(config)
    total, n_first = sum(parts.values()), run["run_heads"]
    stages = "\n".join(
        f"| {row['stage']} | {row['step']} | {sum(row['heads'])} | {_number(row['ppl'])} |"
        for row in run["history"]
    )
    by_part = ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in parts.items() if n)
    return f"""{front_matter(config, info, license, "transformers")}

# {run["name"]}

A language model ({config.family}), trained and pruned with allattn:
{sum(config.heads)} of {n_first} attention heads are left.

```
{picture(config.heads, run["head_ids"], run["first_heads"])}
```

| size | |
| --- | --- |
| parameters | {total:,} |
| without embeddings | {total - parts["vocabulary"]:,} |
| by part | {by_part} |
| FLOPs a token, forward | {flops_per_token(config):,} |
| weights on disk, MB | {megabytes:.2f} |
| layers, width, head width | {config.n_layers}, {config.d_model}, {config.d_head} |
| persistent vectors a head | {config.n_persistent} |
| segment, memory (tokens) | {config.seq_len}, {config.mem_len} |

## Perplexity

{perplexities(proof, why_not, info)}

As the run went on, perplexity a token on the valid split at the end of each stage:

| stage | until step | heads | valid |
| --- | --- | --- | --- |
{stages}

## Data

Trained for {run["step"]} steps on the corpus prepared in `{info["data"]}`; its tokenizer is here.

## Use

With transformers, without allattn (`pip install torch transformers sentencepiece`):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("PATH", trust_remote_code=True)
inputs = tokenizer(["A prompt", "and a longer one"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40)))
```

- A text of any length runs through segments of {config.seq_len} tokens with a memory of
  {config.mem_len}, `labels=` as well; `generate` carries the memory along.
- The end token is the line end, and the padding, on the left. `generate` goes on after a line end
  unless it is told `eos_token_id=tokenizer.eos_token_id`.
- The code here is a copy of allattn's own. Its compiled attention kernel stays at home: without
  allattn, PyTorch's operations do the same work, more slowly on a CPU.

With lm-evaluation-harness (`pip install lm_eval`; a whole document goes through the memory at
once, so give a `--batch_size`, not `auto`; with `max_length=N` in `--model_args` it is cut into
pieces that know nothing of each other):

```
lm_eval --model hf --model_args pretrained=PATH,trust_remote_code=True --tasks TASK --batch_size 1
```

With allattn:

```python
import allattn

model = allattn.load_pretrained("PATH")
tokenizer = allattn.load_tokenizer("PATH")
```

Code: Apache-2.0. Licence of the weights: {license}.
"""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _text(name: str) -> str:
    """A name as YAML reads a text: in quotes where it would be a number, a truth or nothing."""
    other = name.lower() in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return json.dumps(name) if other or not name[0].isalpha() else name


def front_matter(config: ModelConfig, info: dict[str, Any], license: str, library: str) -> str:
    """What a hub reads of a card."""
    pruned = sum(config.heads) < info["run"]["run_heads"]
    tags = [config.family, "allattn", *(["pruned"] if pruned else [])]
    lines = "\n".join(f"- {tag}" for tag in tags)
    return (
        f"---\nlicense: {_text(license)}\nlibrary_name: {library}\n"
        "pipeline_tag: text-generation\n"
        f"tags:\n{lines}\n---"
    )


def perplexities(proof: dict[str, Any] | None, why_not: str, info: dict[str, Any]) -> str:
    """What a fresh process found, with the definitions; and what fewer bits cost.

    Args:
        proof: what `allattn evaluate` found, or None.
        why_not: the reason, where there is none.
        info: the export's `config.json`.
    """
    if proof is None:
        return f"Not evaluated at export: {why_not}."
    fewer, same = "", "the run's own"
    if "perplexity" in info:
        found, numbers = info["perplexity"], info["numbers"]
        same = f"that of the {numbers} model before it was saved"
        fewer = f"\n\nBefore the rounding to {numbers} it was {found['fp32']:.3f} a token."
    return f"""Of the valid split, found by a fresh process from the files in this folder, and equal
to {same} within 0.1%:

| | |
| --- | --- |
| perplexity a token | {proof["ppl"]:.3f} |
| perplexity a word | {proof["word_ppl"]:.3f} |
| bits a byte | {proof["bits_per_byte"]:.4f} |
| loss, nats a token | {proof["loss"]:.5f} |
| tokens, words scored | {proof["tokens"]:,}, {proof["words"]:,} |
| seq_len, mem_len | {proof["seq_len"]}, {proof["mem_len"]} |

Every token is scored exactly once, with memory. `a token`: exp of the mean loss; `a word`: the
total loss over whitespace words plus line ends of the original text, so that tokenizers compare;
`a byte`: over the text's UTF-8 bytes.{fewer}"""
