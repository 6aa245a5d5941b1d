"""Make a perplexity task for lm-evaluation-harness from a text file.

    python tools/lm_eval_task.py TEXT --out DIR [--name my_text]
    lm_eval --model hf --model_args pretrained=EXPORT,trust_remote_code=True --batch_size 1 \
        --include_path DIR --tasks my_text

The text is one document: the harness scores it after the tokenizer's end token, every token once,
as `allattn evaluate --text` does, and gives the same `word_perplexity`. Words are counted as there
(whitespace words and line ends; the harness's own count has no line ends). The harness holds
log-probabilities of all tokens at once, some three times tokens x vocabulary x 4 bytes: for a long
text give `--lines N`, which starts a new document, and a new memory, every N lines.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
process_results: !function words.process_results
metric_list:
- metric: word_perplexity
- metric: byte_perplexity
- metric: bits_per_byte
metadata:
  version: 1.0
"""

WORDS = '''"""Words and bytes of a document, counted as `allattn evaluate --text` counts them."""


def process_results(doc, results):
    """Log-likelihood, and what it is spread over: whitespace words plus line ends; bytes."""
    (nats,), text = results, doc["text"]
    n_words, n_bytes = len(text.split()) + text.count("\\n"), len(text.encode("utf-8"))
    return {
        "word_perplexity": (nats, n_words),
        "byte_perplexity": (nats, n_bytes),
        "bits_per_byte": (nats, n_bytes),
    }
'''


def write_task(text: Path, out: Path, name: str, lines: int | None = None) -> None:
    """Write `NAME.yaml`, `words.py` and `NAME.jsonl` into a folder.

    Args:
        text: UTF-8; a last line without a newline gets one, as in `evaluate --text`.
        out: the folder.
        name: of the task.
        lines: of a document; None: all.

    Raises:
        ValueError: a name that the harness could not take, or nothing in the text.
    """
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ValueError(f"--name: letters, digits and _ are needed, not {name!r}")
    # neither splitlines() nor read_text(): only a newline ends a line, and nothing is translated
    whole = text.read_bytes().decode("utf-8").removesuffix("\n")
    found = whole.split("\n")
    if not whole:
        raise ValueError(f"{text}: empty")
    size = lines or len(found)
    documents = [found[i : i + size] for i in range(0, len(found), size)]
    out.mkdir(parents=True, exist_ok=True)
    data = (out / f"{name}.jsonl").resolve()
    rows = [json.dumps({"text": "\n".join(document) + "\n"}) + "\n" for document in documents]
    data.write_text("".join(rows), encoding="utf-8")
    (out / "words.py").write_text(WORDS, encoding="utf-8")
    (out / f"{name}.yaml").write_text(
        TASK.format(name=name, data=json.dumps(str(data))), encoding="utf-8"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, metavar="TEXT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--name", default="word_perplexity", metavar="NAME")
    parser.add_argument("--lines", type=int, metavar="N", help="of a document (default: all)")
    args = parser.parse_args()
    try:
        write_task(args.text, args.out, args.name, args.lines)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"lm_eval ... --include_path {args.out} --tasks {args.name}")


if __name__ == "__main__":
    main()
