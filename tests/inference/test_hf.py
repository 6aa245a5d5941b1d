"""The model in transformers is the model: logits, loss, padding, generation, files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from allattn.inference.load import load_pretrained
from allattn.model.generate import generate
from allattn.model.scoring import score_stream
from allattn.model.transformer import TransformerLM

pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from allattn.inference.hf import AllattnConfig, AllattnForCausalLM  # noqa: E402

KINDS = {
    "all-attention": {},
    "a layer without heads": {"n_heads": [2, 0, 1], "n_layers": 3},
    "no head at all": {"n_heads": [0, 0]},
    "transformer-xl": {"n_persistent": 0, "d_ff": 7},
    "adaptive": {"embedding": "adaptive", "cutoffs": [4, 7], "div_value": 2},
    "learned positions": {"position": "learned", "clamp_len": 5},
    "same length": {"same_length": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
ROOMY = {"seq_len": 64, "mem_len": 64}  # then nothing is forgotten, and no cache is needed


def wrap(model: TransformerLM) -> AllattnForCausalLM:
    hf = AllattnForCausalLM(AllattnConfig(model=dataclasses.asdict(model.config))).eval()
    hf.model = model
    return hf


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(1))


@every_kind
@pytest.mark.parametrize("grad", [False, True])
def test_a_long_text_runs_in_segments_with_memory(tiny_model, kind, grad):
    model, ids = tiny_model(**KINDS[kind]), some_ids(2, 15)
    expected, memory = [], None
    with torch.no_grad():
        for piece in ids.split(4, dim=1):
            output = model(piece, memory=memory)
            memory = output.memory
            expected.append(output.log_probs)
    with torch.set_grad_enabled(grad):
        output = wrap(model)(ids)
        again = wrap(model)(ids[:, 4:], past_key_values=wrap(model)(ids[:, :4]).past_key_values)
    assert output.logits.requires_grad == grad
    expected = torch.cat(expected, dim=1)
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(again.logits, expected[:, 4:])
    assert again.past_key_values.get_seq_length() == 15


@every_kind
def test_the_loss_of_a_text_is_that_of_evaluate(tiny_model, kind):
    model, ids = tiny_model(**KINDS[kind]), some_ids(23)
    nats, n = score_stream(model, model, ids.numpy(), 3, seq_len=4, batch_size=1).tolist()
    text = torch.cat([torch.tensor([3]), ids])[None]
    hf = wrap(model)
    with torch.no_grad():
        whole = hf(text, labels=text)
        lean = hf(text, labels=text, logits_to_keep=1)
        short = hf(text, labels=text, num_items_in_batch=2 * n)
    assert whole.loss.item() == pytest.approx(nats / n, rel=1e-12) and n == 23
    assert lean.loss.item() == pytest.approx(nats / n, rel=1e-12)
    assert short.loss.item() == pytest.approx(nats / n / 2, rel=1e-12)
    assert lean.logits.shape == (1, 1, 11)
    torch.testing.assert_close(lean.logits, whole.logits[:, -1:])


def test_labels_that_are_not_scored_and_gradients(tiny_model):
    hf, ids = wrap(tiny_model()), some_ids(2, 9)
    labels = ids.clone()
    labels[0, :6] = -100
    loss = hf(ids, labels=labels).loss
    log_probs = hf(ids).logits
    scored = [(0, i) for i in range(6, 9)] + [(1, i) for i in range(1, 9)]
    wanted = -sum(log_probs[b, i - 1, ids[b, i]] for b, i in scored) / len(scored)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(p.grad is not None for p in hf.parameters())


@every_kind
@pytest.mark.parametrize("grad", [False, True])
def test_a_padded_batch_is_each_text_alone(tiny_model, kind, grad):
    """Also where segments are cut: lengths that differ by no multiple of seq_len."""
    hf, lengths, S = wrap(tiny_model(**KINDS[kind])), (1, 3, 9, 14, 10), 14
    texts = [some_ids(20, 40)[i, :n] for i, n in enumerate(lengths)]
    nexts = some_ids(5, 6)
    ids, mask = torch.full((5, S), 3), torch.zeros(5, S, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, S - len(text) :], mask[row, S - len(text) :] = text, 1
    with torch.set_grad_enabled(grad):
        batch = hf(ids, attention_mask=mask)
        alone = [hf(text[None]) for text in texts]
        for row, one in enumerate(alone):
            torch.testing.assert_close(batch.logits[row, S - lengths[row] :], one.logits[0])
        for t in range(6):
            mask = torch.cat([mask, torch.ones(5, 1, dtype=torch.long)], dim=1)
            batch = hf(
                nexts[:, t, None], attention_mask=mask, past_key_values=batch.past_key_values
            )
            alone = [
                hf(nexts[i, t].view(1, 1), past_key_values=one.past_key_values)
                for i, one in enumerate(alone)
            ]
            joined = torch.cat([one.logits for one in alone])
            torch.testing.assert_close(batch.logits, joined)


@every_kind
def test_greedy_generation_is_that_of_allattn(tiny_model, kind):
    model = tiny_model(**KINDS[kind])
    prompts = some_ids(2, 10)
    expected = list(generate(model, prompts.tolist(), max_new_tokens=15, temperature=0))
    found = wrap(model).generate(prompts, max_new_tokens=15, do_sample=False)
    assert found[:, 10:].T.tolist() == expected


@every_kind
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "num_beams": 2},
    ],
    ids=str,
)
def test_generation_with_and_without_the_cache(tiny_model, kind, how):
    """Where nothing is forgotten, the whole text anew at every step is the oracle."""
    hf = wrap(tiny_model(**ROOMY, **KINDS[kind]))
    ids, mask = some_ids(2, 4), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        found.append(
            hf.generate(
                ids, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, pad_token_id=3,
                eos_token_id=5, return_dict_in_generate=True, output_scores=True, **how,
            )
        )  # fmt: skip
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(torch.stack(found[0].scores), torch.stack(found[1].scores))


def test_a_conversation_goes_on_from_its_cache(tiny_model):
    hf = wrap(tiny_model(**ROOMY))
    first = hf.generate(some_ids(1, 4), max_new_tokens=5, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, some_ids(1, 3)], dim=1)
    expected = hf.generate(ids, max_new_tokens=5)
    cache = first.past_key_values
    assert torch.equal(hf.generate(ids, max_new_tokens=5, past_key_values=cache), expected)


def test_a_cache_is_reordered_and_repeated(tiny_model):
    hf, ids = wrap(tiny_model()), some_ids(3, 7)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            expected = [hf(ids[[2, 0]]), hf(ids.repeat_interleave(2, 0))]
            moved = [hf(ids).past_key_values for _ in range(2)]
            moved[0].reorder_cache(torch.tensor([2, 0]))
            moved[1].batch_repeat_interleave(2)
            for cache, one in zip(moved, expected, strict=True):
                more = some_ids(len(one.logits), 2)
                torch.testing.assert_close(
                    hf(more, past_key_values=cache).logits,
                    hf(more, past_key_values=one.past_key_values).logits,
                )


def test_what_is_refused(tiny_model):
    hf, ids = wrap(tiny_model()), some_ids(1, 4)
    with pytest.raises(ValueError, match="output_attentions"):
        hf(ids, output_attentions=True)
    with pytest.raises(ValueError, match="between tokens"):
        hf(ids, attention_mask=torch.tensor([[1, 0, 1, 1]]))
    with torch.no_grad():
        cache = hf(ids, attention_mask=torch.tensor([[1, 1, 1, 0]])).past_key_values
    with pytest.raises(ValueError, match="no_grad"):
        hf(ids, past_key_values=cache)
    with torch.no_grad(), pytest.raises(ValueError, match="between tokens"):
        hf(ids[:, :1], attention_mask=torch.tensor([[1, 1, 1, 0, 1]]), past_key_values=cache)
    with pytest.raises(ValueError, match="forgot"):
        cache.crop(1)
    with pytest.raises(ValueError, match="vocabulary"):
        hf.resize_token_embeddings(20)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: assisted generation"):
        hf.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="assistant_model: assisted generation"):
        hf.generate(ids, assistant_model=hf, max_new_tokens=3)
    config = GenerationConfig(prompt_lookup_num_tokens=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: assisted generation"):
        hf.generate(ids, config)
    assert isinstance(hf(ids, return_dict=False), tuple)
    assert hf(ids, use_cache=False).past_key_values is None


# Files


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory) -> Path:
    """Of TINY_RUN, half of its heads gone: look only."""
    from allattn.cli import main

    folder = tmp_path_factory.mktemp("hf") / "model"
    assert main(["export", str(finished_run), "--out", str(folder)]) == 0
    return folder


def test_an_export_opens_with_the_registered_classes(exported):
    hf = AutoModelForCausalLM.from_pretrained(exported)
    model = load_pretrained(exported)
    assert type(hf) is AllattnForCausalLM and hf.dtype == torch.float32
    assert hf.config.num_attention_heads == model.config.heads and sum(model.config.heads) == 4
    ids = some_ids(2, 40)
    with torch.no_grad():
        assert torch.equal(hf(ids[:, :16]).logits, model(ids[:, :16]).log_probs)
    # one tensor for input and output, and none besides allattn's own
    names = {f"model.{name}" for name, _ in model.named_parameters()}
    assert set(load_file(exported / "model.safetensors")) == names
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "She had been\nforced into"
    assert tokenizer(text)["input_ids"] == tokenizer.inner.encode(text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_number_formats(exported, dtype):
    exact = AutoModelForCausalLM.from_pretrained(exported)
    hf = AutoModelForCausalLM.from_pretrained(exported, dtype=dtype)
    assert {p.dtype for p in hf.parameters()} == {dtype}
    ids = some_ids(2, 40)
    with torch.no_grad():
        found, wanted = hf(ids, labels=ids), exact(ids, labels=ids)
    assert found.logits.dtype == torch.float32
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=0.01)
    assert hf.generate(ids, max_new_tokens=4).shape == (2, 44)


def test_device_map(exported):
    pytest.importorskip("accelerate")
    hf = AutoModelForCausalLM.from_pretrained(exported, device_map="cpu")
    assert hf.generate(some_ids(1, 4), max_new_tokens=3).shape == (1, 7)


def test_saved_and_loaded_again(exported, tmp_path):
    hf = AutoModelForCausalLM.from_pretrained(exported)
    with torch.no_grad():
        for p in hf.parameters():
            p.mul_(1.01)
    hf.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "tuned")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    ids = some_ids(2, 16)
    with torch.no_grad():
        expected = hf(ids).logits
        assert torch.equal(again(ids).logits, expected)
        assert torch.equal(load_pretrained(tmp_path / "tuned")(ids).log_probs, expected)
    assert (tmp_path / "tuned" / "transformer.py").read_text() == (
        exported / "transformer.py"
    ).read_text()
    assert "valid_ppl" not in json.loads((tmp_path / "tuned" / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert tokenizer("Anne\n")["input_ids"] == tokenizer.inner.encode("Anne\n")


@pytest.mark.parametrize("how", ["exchanged", "renamed", "truncated", "less", "old", "newer keys"])
def test_weights_that_do_not_belong(exported, tmp_path, contents, how):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in contents(exported).items():
        (folder / name).write_bytes(data)
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors, values = load_file(path), json.loads(config.read_text())
    word = "sha256"
    if how == "exchanged":
        save_file({name: t + 1 for name, t in tensors.items()}, path)
    elif how == "renamed":
        path.rename(folder / "weights.safetensors")
        word = "missing"
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "less":  # and made to look right
        tensors.pop("model.norm.weight")
        save_file(tensors, path, metadata={"format": "pt"})
        values.pop("sha256")
        word = "model.norm.weight"
    elif how == "old":
        values["format_version"], word = 3, "export it again"
    else:
        values["model"]["n_hands"], word = 3, "n_hands"
    config.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=word):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_config_by_itself():
    config = AllattnConfig()
    assert config.num_attention_heads == [8] * 6 and config.max_position_embeddings > 1e6
    assert np.isclose(config.hidden_size, 256)
