"""README.md of an export in the formats `onnx` and `pt2`: how to run it without this package."""

from __future__ import annotations

from typing import Any

from allattn.config import ModelConfig
from allattn.inference.card import front_matter, perplexities, picture

_ONNX = """
import onnxruntime

session = onnxruntime.InferenceSession(f"{{folder}}/model.onnx", providers=["CPUExecutionProvider"])


def start(batch):
    state = [np.full(batch, {mem_len}, np.int64)]  # padding: nothing is remembered yet
    for value in session.get_inputs()[3:]:
        state.append(np.zeros((batch, *value.shape[1:]), np.float32))
    return state


def step(ids, wanted, state):
    names = [value.name for value in session.get_inputs()]
    arrays = [np.array(ids, np.int64), np.array(wanted, np.int64), *state]
    log_probs, *state = session.run(None, dict(zip(names, arrays)))
    return log_probs, state
"""

_PT2 = """
import torch

program = torch.export.load(f"{{folder}}/model.pt2").module()
shapes = {shapes}


def start(batch):
    state = [torch.full((batch,), {mem_len})]  # padding: nothing is remembered yet
    return state + [torch.zeros(batch, *shape, dtype=torch.{dtype}) for shape in shapes]


def step(ids, wanted, state):
    with torch.no_grad():
        log_probs, *state = program(torch.tensor(ids), torch.tensor(wanted), list(state))
    return log_probs.float().numpy(), state
"""

_TOKENIZERS = {
    "sentencepiece": """
import sentencepiece

pieces = sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")


def encode(line):
    return pieces.encode(line)


def decode(ids):
    return "\\n".join(pieces.decode(line) for line in split(ids))
""",
    "word": """
words = open(f"{folder}/vocab.txt", encoding="utf-8").read().split("\\n")[:-1]
numbers = {word: i for i, word in enumerate(words)}
unknown = numbers["<unk>"] if "<unk>" in numbers else numbers["<UNK>"]


def encode(line):
    return [numbers.get(word, unknown) for word in line.split()]


def decode(ids):
    return "\\n".join(" ".join(words[i] for i in line) for line in split(ids))
""",
    "byte": """

def encode(line):
    return list(line.encode("utf-8"))


def decode(ids):
    return "\\n".join(bytes(line).decode("utf-8", errors="replace") for line in split(ids))
""",
}

_USE = '''

def split(ids):
    lines = [[]]
    for i in ids:
        lines.append([]) if i == {eos_id} else lines[-1].append(i)
    return lines


def encode_text(text):
    *lines, last = text.split("\\n")
    return [i for line in lines for i in [*encode(line), {eos_id}]] + encode(last)


def score(text):
    """Nats and number of tokens of a text, line ends among them."""
    ids = [{eos_id}] + encode_text(text if text.endswith("\\n") else text + "\\n")
    nats, state = 0.0, start(1)
    for low in range(0, len(ids) - 1, {longest}):
        targets = ids[low + 1 : low + 1 + {longest}]
        log_probs, state = step([ids[low : low + len(targets)]], range(len(targets)), state)
        nats -= log_probs[0, np.arange(len(targets)), targets].sum()
    return nats, len(ids) - 1


def generate(prompt, count):
    """The likeliest continuation of a prompt."""
    given = encode_text(prompt)
    ids, new, state = given or [{eos_id}], [], start(1)
    for low in range(0, len(ids), {longest}):
        part = ids[low : low + {longest}]
        log_probs, state = step([part], [len(part) - 1], state)
    while len(new) < count:
        new.append(int(log_probs[0, -1].argmax()))
        log_probs, state = step([[new[-1]]], [0], state)
    return decode(given + new)


nats, tokens = score("She had been forced into prudence in her youth .\\n")
print("perplexity a token:", np.exp(nats / tokens))
print(generate("She had", 20))
'''


def program_card(
    config: ModelConfig,
    info: dict[str, Any],
    tokenizer: dict[str, Any],
    license: str,
    proof: dict[str, Any] | None,
    why_not: str,
) -> str:
    """The text.

    Args:
        config: of the model.
        info: the export's config.json, with `format`, `numbers`, `program` and perhaps
            `perplexity`.
        tokenizer: what `Tokenizer.describe` says.
        license: of the weights, as the hub names it.
        proof: what `allattn evaluate` found in a fresh process, or None.
        why_not: the reason, where there is none.
    """
    program, model = info["program"], info["model"]
    file = {"onnx": "model.onnx", "pt2": "model.pt2"}[info["format"]]
    needs = {"onnx": "onnxruntime", "pt2": "torch"}[info["format"]]
    M, T = model["mem_len"], program["longest_call"]
    values = {
        "mem_len": M,
        "longest": T,
        "eos_id": tokenizer["eos_id"],
        "shapes": [shape for shape in program["state_shapes"]],
        "dtype": "bfloat16"
        if info["numbers"] == "bf16"
        else "float16"
        if info["numbers"] == "fp16"
        else "float32",
    }
    runner = (_ONNX if info["format"] == "onnx" else _PT2).format(**values)
    needs += ", sentencepiece" if tokenizer["kind"] == "sentencepiece" else ""
    compiled = ""
    if info.get("compiled"):
        compiled = (
            "\n`compiled.pt2` is the same, compiled for the kind of processor that it was made on: "
            "`torch._inductor.aoti_load_package(path)` in place of `torch.export.load(path)"
            ".module()`.\n"
        )
    run = info["run"]
    return f"""{front_matter(config, info, license, needs.split(",")[0])}

# {run["name"]}

A language model ({config.family}), trained and pruned with allattn, as `{file}` in
{info["numbers"]}: {sum(config.heads)} of {run["run_heads"]} attention heads are left.

```
{picture(config.heads, run["head_ids"], run["first_heads"])}
```

## Perplexity

{perplexities(proof, why_not, info)}

## Use

A call takes token ids and a state, and gives log-probabilities and the next state:

| in | shape | |
| --- | --- | --- |
| `ids` | [batch, length] int64 | length: 1 to {T} |
| `wanted` | [k] int64 | the positions of `ids` to give log-probabilities of |
| `padding` | [batch] int64 | how many of the last {M} + length positions are not there |
| `keys_NN`, `values_NN` | [batch, heads, {M}, {model["d_head"]}] | of each layer NN with heads |

Out: `log_probs` [batch, k, {model["vocab_size"]}], then the next `padding`, `keys_NN` and
`values_NN`, in the same order. A stream starts with a `padding` of {M} (+ n where a row of `ids`
begins with n tokens that are only filling) and zeros: what is not there yet is masked, not attended
to. Each row is a stream of its own, at its own place.
{compiled}
Run this in the folder; it needs numpy, {needs}, nothing of allattn.

```python
import numpy as np

folder = "."
{runner.strip()}

{_TOKENIZERS[tokenizer["kind"]].strip()}
{_USE.format(**values).rstrip()}
```
"""
