"""Relevance: how much each head contributes to what the model predicts.

Layer-wise relevance propagation (Bach et al. 2015; for heads Voita et al. 2019, section 4) of the
logit of the most likely token. Relevance is passed back in proportion to contribution (the z rule):
of z = sum_j x_j w_j + b, input j takes x_j w_j / z of z's relevance, and b the rest. Where every
step is linear this is gradient times input, so a backward pass does it. The rules, by part:

- logit: before the normaliser, hence linear in the last vector; in an adaptive softmax the logit of
  the cluster plus that of the token in it.
- softmax: attention weights are constants (rule AH of Ali et al. 2022, arXiv 2202.07304). All
  relevance goes to values, none to queries, keys and positions.
- LayerNorm: its 1 / standard deviation is a constant (rule LN there); subtracting the mean and
  scaling are linear.
- residual connection: a sum, so each branch takes its share of the sum.
- ReLU: passes on what it got, as 0 gives and takes nothing.
- biases (of linear maps, norms, logits) and persistent values: sources, that keep their share.
- memory: the inputs that earlier segments left are sources as well, so relevance stops there.

The gates stand right behind the heads: a head's relevance is gate * d logit / d gate. Shapes:
B sequences, T tokens, K predictions of a segment, N heads of a layer, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from allattn.analysis.sample import Sample
from allattn.analysis.undisturbed import undisturbed
from allattn.model.transformer import Memory, TransformerLM, watched
from allattn.pruning.importance import put_probes

PREDICTIONS = 4  # of a segment: each needs a backward pass of its own


def relevance(
    model: TransformerLM,
    sample: Sample,
    batch_size: int = 8,
    on_tokens: Callable[[int], object] = lambda n: None,
) -> list[list[float]]:
    """By layer and head, the mean share of the layer's relevance for the top-1 logit.

    As in Voita et al., a head's relevance for one prediction is the sum over its outputs (at every
    position of the segment that the prediction draws on), is normalised over the heads of its
    layer, and then averaged over predictions. Here absolute values are normalised,
    |R_h| / sum |R|: in a causal model many heads push the top logit down, and shares of a sum that
    can be near zero have no bounds. So a layer's shares add up to 1, unless all its heads are dead
    (then to 0); they do not compare layers. The predictions are PREDICTIONS evenly spaced ones of
    each segment, its last among them.

    Args:
        model: on any device; left as it was. Gates count as evaluation has them: a head whose gate
            is 0 has relevance 0.
        sample: text, with memory from segment to segment.
        batch_size: lanes side by side; changes nothing but rounding.
        on_tokens: called with the number of tokens after each segment.

    Raises:
        RuntimeError: a relevance that is not finite.
    """
    sums = torch.zeros(len(model.layers), max(model.config.heads, default=0), dtype=torch.float64)
    n_predictions = 0
    with linear(model), torch.enable_grad():
        probes = put_probes(model)
        live = [(i, probe) for i, probe in enumerate(probes) if probe is not None]
        for stream in sample.streams(batch_size, on_tokens) if live else ():
            memory: Memory | None = None
            for ids_BT, _ in stream:
                for _, probe in live:
                    probe.start(len(ids_BT))
                logits_BK, memory = top_logits(model, ids_BT, memory)
                n_predictions += logits_BK.numel()
                values = [probe.value for _, probe in live if probe.value is not None]
                for logits_B in logits_BK.unbind(1):
                    grads = torch.autograd.grad(logits_B.sum(), values, retain_graph=True)
                    for (i, _), value_BN, grad_BN in zip(live, values, grads, strict=True):
                        size_BN = (value_BN.detach() * grad_BN).double().abs()
                        total_B1 = size_BN.sum(1, keepdim=True)
                        share_BN = size_BN / total_B1.masked_fill(total_B1 == 0, 1.0)
                        sums[i, : value_BN.shape[1]] += share_BN.sum(0).cpu()
    if not sums.isfinite().all():
        raise RuntimeError("relevance: a head's is not finite; the model has diverged")
    rows = (sums / max(n_predictions, 1)).tolist()
    return [row[:n] for row, n in zip(rows, model.config.heads, strict=True)]


def top_logits(
    model: TransformerLM, ids_BT: Tensor, memory: Memory | None
) -> tuple[Tensor, Memory]:
    """Logits [B, K] of the most likely next token at K positions, first to last; the new memory."""
    T = ids_BT.shape[1]
    K = min(T, PREDICTIONS)
    device = model.norm.weight.device
    x_BTD, memory = model.hidden(ids_BT.to(device), memory, None)
    places = torch.tensor([T * (k + 1) // K - 1 for k in range(K)], device=device)
    h_BKD = model.norm(x_BTD[:, places])
    with torch.no_grad():
        top_BK = model.vocabulary(h_BKD, "log_probs").argmax(-1)
    return model.vocabulary(h_BKD, "logits_of", top_BK), memory


@contextlib.contextmanager
def linear(model: TransformerLM) -> Iterator[None]:
    """The same outputs, but gradient times input is relevance by the rules above.

    Attention weights and the scales of the norms are constants. The model is in evaluation mode and
    its weights have no gradient; all is as before at the end.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        stack.enter_context(watched(model, lambda _, weights: weights.detach()))
        for norm in norms:
            stack.callback(norm.register_forward_hook(_with_constant_scale).remove)
        yield


def _with_constant_scale(norm: nn.LayerNorm, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """What the norm gave, computed again with the gradient of a linear map."""
    (x,) = inputs
    centred = x - x.mean(-1, keepdim=True)
    scale = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt().detach()
    return centred * scale * norm.weight + norm.bias
