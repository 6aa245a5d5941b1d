"""The pruning methods by name."""

from __future__ import annotations

from allattn.config import PruneConfig
from allattn.pruning.hard_concrete import HardConcrete
from allattn.pruning.method import Method, PruningState
from allattn.pruning.scored import Scored
from allattn.pruning.subset import Subset

__all__ = ["METHODS", "Method", "PruningState", "Scored", "build_method"]

METHODS: dict[str, type[Method]] = {
    "hard_concrete": HardConcrete,
    "subset": Subset,
    "importance": Scored,
    "magnitude": Scored,
    "random": Scored,
}


def build_method(config: PruneConfig, seed: int, state: PruningState) -> Method:
    """The method that a config names."""
    return METHODS[config.method](config, seed, state)
