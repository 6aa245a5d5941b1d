"""allattn: train, prune and export language models made of attention only."""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "Config": "allattn.config",
    "ModelConfig": "allattn.config",
    "load_config": "allattn.config",
    "TransformerLM": "allattn.model.transformer",
    "Memory": "allattn.model.transformer",
    "load_pretrained": "allattn.inference.load",
    "load_tokenizer": "allattn.data.tokenizers",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):  # torch is slow to import: `allattn --help` and `show` wait for nothing
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'allattn' has no attribute {name!r}")
