"""allattn: train, prune and export language models made of attention only.

    config = allattn.load_config("tiny", {"stages[1].prune.keep": 0.25})
    path = allattn.train(config)
    allattn.evaluate(path, split="test")["ppl"]
    model, tokenizer = allattn.load_pretrained(path), allattn.load_tokenizer(path)

The names in `__all__` are what later versions keep.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "Memory",
    "ModelConfig",
    "TransformerLM",
    "analyze",
    "compare",
    "config_text",
    "configs",
    "describe",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "load_pretrained",
    "load_tokenizer",
    "prepare",
    "prune",
    "save_config",
    "to_yaml",
    "train",
]

_HOMES = {
    "allattn.api.analysis": ("analyze",),
    "allattn.api.models": ("compare", "evaluate", "prune"),
    "allattn.api.runs": ("describe", "train"),
    "allattn.api.use": ("export", "generate", "load_tokenizer"),
    "allattn.config": (
        "Config",
        "ConfigError",
        "ModelConfig",
        "load_config",
        "save_config",
        "to_yaml",
    ),
    "allattn.config.shipped": ("config_text", "configs"),
    "allattn.data.prepare": ("prepare",),
    "allattn.inference.load": ("load_pretrained",),
    "allattn.machine.doctor": ("doctor",),
    "allattn.model.transformer": ("Memory", "TransformerLM"),
}
_EXPORTS = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from allattn.api.analysis import analyze
    from allattn.api.models import compare, evaluate, prune
    from allattn.api.runs import describe, train
    from allattn.api.use import export, generate, load_tokenizer
    from allattn.config import Config, ConfigError, ModelConfig, load_config, save_config, to_yaml
    from allattn.config.shipped import config_text, configs
    from allattn.data.prepare import prepare
    from allattn.inference.load import load_pretrained
    from allattn.machine.doctor import doctor
    from allattn.model.transformer import Memory, TransformerLM
else:

    def __getattr__(name: str) -> object:
        """Import what is asked for: torch is slow, and `allattn --help` waits for nothing."""
        if name in _EXPORTS:
            return getattr(import_module(_EXPORTS[name]), name)
        raise AttributeError(f"module 'allattn' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """What completion in a notebook offers."""
        return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
