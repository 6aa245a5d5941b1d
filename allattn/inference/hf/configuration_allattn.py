"""`AllattnConfig`: the `config.json` of an export, as transformers reads it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from allattn.config.schema import EXPORT_VERSION, ModelConfig

# A model with memory takes a text of any length; programs that cut texts want a number.
ANY_LENGTH = 1 << 24


class AllattnConfig(PretrainedConfig):
    """An exported model.

    Attributes:
        model: the fields of `ModelConfig`; with per-layer head counts, `n_heads` is a list.
        num_attention_heads: by layer, a list; 0 is a layer without attention.
    """

    model_type = "allattn"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        format_version: int = EXPORT_VERSION,
        **kwargs: Any,
    ):
        """Take the values of a `config.json`.

        Raises:
            ValueError: written by another version of allattn.
        """
        if format_version != EXPORT_VERSION:
            raise ValueError(
                f"config.json: an allattn export of format version {format_version}, this is the "
                f"code of {EXPORT_VERSION}; export it again with a new allattn (allattn export)"
            )
        self.format_version = format_version
        self.model = dict(model or {})
        kwargs |= standard_names(self.shape())
        self.use_cache = kwargs.pop("use_cache", True)
        for name in STANDARD:
            setattr(self, name, kwargs.pop(name))
        super().__init__(**kwargs)

    def shape(self) -> ModelConfig:
        """The model's shape.

        Raises:
            ValueError: a field that this version does not have.
        """
        try:
            return ModelConfig(**self.model)
        except TypeError as error:
            raise ValueError(f"config.json: model: {error}") from None


STANDARD = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def standard_names(shape: ModelConfig) -> dict[str, Any]:
    """What other programs look for in a `config.json`."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": ANY_LENGTH,
        "tie_word_embeddings": True,
    }
