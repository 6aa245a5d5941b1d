"""Muon: the orthogonal step by SVD, its first steps by hand, and a run that stops and prunes."""

from __future__ import annotations

import pytest
import torch
from runs import STEPS, same_tensors

from allattn.config import Config, OptimizerConfig
from allattn.model.transformer import TransformerLM
from allattn.training.engine import World, build_engine
from allattn.training.muon import ADAM_RMS, MOMENTUM, is_matrix, orthogonal
from allattn.training.optim import build_optimizer


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (1, 6)])
def test_singular_vectors_stay_and_values_become_one(shape):
    x = torch.randn(shape, dtype=torch.float64) * 1e-3
    U, S, Vh = torch.linalg.svd(x, full_matrices=False)
    inner = U.T @ orthogonal(x) @ Vh.T
    diagonal = inner.diagonal()
    assert (inner - diagonal.diag()).abs().max() < 1e-9
    seen = S / S.norm() > 0.02  # what is smaller needs more than five steps
    assert ((0.6 < diagonal) & (diagonal < 1.3))[seen].all()


def test_two_steps_by_hand(tiny_model):
    model = tiny_model(d_ff=6)
    settings = OptimizerConfig(name="muon", lr=0.1, weight_decay=0.5)
    optimizer = build_optimizer(model, settings)
    other = tiny_model(d_ff=6)
    adam = build_optimizer(other, OptimizerConfig(lr=0.1, weight_decay=0.5))
    wanted = {n: p.detach().clone() for n, p in model.named_parameters()}
    momentum = {n: torch.zeros_like(p) for n, p in wanted.items()}
    names = [n for n, p in model.named_parameters() if is_matrix(n, p)]
    parts = ["query", "key", "value", "position", "output", "inner", "outer"]
    assert sorted({n.split(".")[-2] for n in names}) == sorted(parts)
    for _ in range(2):
        for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
            if n in names:
                momentum[n] = MOMENTUM * momentum[n] + (1 - MOMENTUM) * p.grad
                ahead = (1 - MOMENTUM) * p.grad + MOMENTUM * momentum[n]
                move = orthogonal(ahead) * ADAM_RMS * max(p.shape) ** 0.5
                wanted[n] = wanted[n] * (1 - 0.1 * 0.5) - 0.1 * move
        optimizer.step()
        adam.step()
    for (n, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), wanted[n] if n in names else q.detach())


def test_a_run_that_prunes_goes_on_exactly(make_config, train):
    """Across a removal, and stopped in the middle of every stage."""
    own = ["train.optimizer.name=muon", "train.save_every=1"]
    whole = train(make_config(*own, name="whole"))
    for stop in (2, 7, 12):
        parts = train(make_config(*own, name=f"stopped_{stop}"), stop)
        for kind in ("parameters", "optimizer"):
            assert same_tensors(whole.tensors(STEPS, kind), parts.tensors(STEPS, kind))
    assert sum(whole.meta(STEPS)["model"]["n_heads"]) == 4


def test_not_under_deepspeed(tiny_config):
    config = Config()
    config.train.optimizer.name = "muon"
    world = World(0, 2, torch.device("cpu"), deepspeed=True)
    with pytest.raises(ValueError, match=r"train.optimizer.name: muon is for one process"):
        build_engine(TransformerLM(tiny_config()), config, world, 1, None)
