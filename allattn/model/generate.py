"""Sample text from a model, token by token, with memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from allattn.model.transformer import Output, TransformerLM


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    forward: Callable[..., Output] | None = None,
) -> Iterator[list[int]]:
    """Yield the next id of every prompt, again and again, at constant time and memory a token.

    Args:
        model: in evaluation mode.
        prompts: ids, at least one each (a line end where there is nothing to go on from); their
            lengths may differ.
        max_new_tokens: how many to yield.
        temperature: 0 takes the likeliest token each time.
        top_k: draw among the k likeliest only.
        top_p: draw among the likeliest that together have at least this probability.
        seed: of the draws; they have a generator of their own.
        forward: the model by default, or an engine around it.
    """
    if not prompts or not all(prompts):
        raise ValueError("prompts: every prompt needs at least one token")
    forward = forward or model
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    # padded on the left, so that all end together; padding is never attended to
    longest = max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    padding_B = torch.tensor([longest - len(p) for p in prompts], device=device)
    memory = model.empty_cache()
    memory.padding = padding_B if padding_B.any() else None
    for part in ids_BT.split(model.config.seq_len, dim=1):
        output = forward(part, memory=memory, last_only=True)
        memory = output.memory
    for _ in range(max_new_tokens):
        assert output.log_probs is not None, "no targets were given"
        token_B = sample(output.log_probs[:, -1], temperature, top_k, top_p, generator)
        yield token_B.tolist()
        output = forward(token_B[:, None], memory=memory, last_only=True)
        memory = output.memory


def sample(
    log_probs_BV: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Draw one id for each row: [B]."""
    if temperature == 0:
        return log_probs_BV.argmax(-1)
    log_probs_BV = (log_probs_BV / temperature).log_softmax(-1)
    ordered, ids = log_probs_BV.sort(-1, descending=True)
    if top_k is not None:
        ordered[:, top_k:] = float("-inf")
    if top_p is not None:
        probs = ordered.softmax(-1)
        # a token goes if those before it already have the mass; the first one always stays
        ordered[probs.cumsum(-1) - probs >= top_p] = float("-inf")
    drawn = torch.multinomial(ordered.softmax(-1), 1, generator=generator)
    return ids.gather(-1, drawn).squeeze(-1)
