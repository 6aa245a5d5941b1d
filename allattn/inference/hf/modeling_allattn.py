"""`AllattnForCausalLM`: a `TransformerLM` with the interface of transformers.

A text is run in segments of `seq_len` tokens with memory, as `allattn evaluate` runs it, so it may
be as long as one likes. Shapes: B batch, S tokens given, D model width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from allattn.data.checksum import check_sha256, sha256
from allattn.inference.hf.configuration_allattn import AllattnConfig
from allattn.model.attention import KeyValues
from allattn.model.transformer import Memory, TransformerLM

WEIGHTS = "model.safetensors"
# transformers renamed it in 5.x
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class AllattnCache(Cache):
    """The memory of a batch, as `generate` hands it round.

    Attributes:
        memory: of the tokens so far; at most `mem_len` positions.
        n_seen: how many tokens these were, padding included.
    """

    def __init__(self, memory: Memory, n_seen: int):
        """Hold a memory."""
        super().__init__(layers=[])
        self.memory, self.n_seen = memory, n_seen

    def __len__(self) -> int:
        return len(self.memory.hidden)

    def __repr__(self) -> str:
        return f"AllattnCache({self.n_seen} tokens seen, {self.memory.length} remembered)"

    @property
    def is_croppable(self) -> bool:
        """What was forgotten does not come back."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen."""
        return self.n_seen

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: see `is_croppable`."""
        raise ValueError("a memory cannot be shortened: what it forgot does not come back")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences in this order."""
        for layer, held in enumerate(self.memory.hidden):
            if isinstance(held, KeyValues):
                held.select(indices)
            elif held is not None:
                self.memory.hidden[layer] = held.index_select(0, indices)
        if self.memory.padding is not None:
            self.memory.padding = self.memory.padding.index_select(0, indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """What beam search does after every token."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times."""
        held = next((h for h in self.memory.hidden if h is not None), None)
        if held is None:
            return  # a model without heads remembers nothing
        if isinstance(held, KeyValues):
            assert held.buffer is not None, "a cache comes out of a forward pass"
            B, device = held.buffer.shape[1], held.buffer.device
        else:
            B, device = held.shape[0], held.device
        self.batch_select_indices(torch.arange(B, device=device).repeat_interleave(repeats))


class AllattnForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model; `model` is the `TransformerLM`."""

    config_class = AllattnConfig
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    _no_split_modules = ["TransformerLM"]  # layers share positions and masks: one device
    _is_stateful = True  # a memory cannot go back: no assisted generation
    # with allattn installed: puts the code beside saved weights, so that they load without it
    _write_code: Callable[[Path], None] | None = None

    def __init__(self, config: AllattnConfig):
        """Build; the weights are those of a fresh model until others are loaded."""
        super().__init__(config)
        self.model = TransformerLM(config.shape())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: `TransformerLM` gave its weights their first values."""

    def get_input_embeddings(self) -> nn.Module:
        """From ids to vectors."""
        vocabulary: nn.Module = self.model.vocabulary
        return vocabulary

    def get_output_embeddings(self) -> None:
        """None: input and output share their weights inside one module."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise ValueError("the vocabulary belongs to the tokenizer of training and stays as it is")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text as transformers does: greedy, sampled, or by beams.

        Raises:
            ValueError: assisted generation is asked for.
        """
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = config or self.generation_config
        for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
            # transformers refuses these for a stateful model, but not by the same error in every
            # version: a ValueError until 5.24, a RuntimeError since 5.25
            if kwargs.get(name, getattr(config, name, None)) is not None:
                raise ValueError(
                    f"{name}: assisted generation takes tokens back, and what a memory forgot does "
                    f"not come back; leave {name} out"
                )
        return super().generate(*args, **kwargs)

    # ---- forward ----------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: AllattnCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: AllattnCache | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Run tokens, after those that a cache remembers.

        Args:
            input_ids: [B, S].
            attention_mask: [B, S], or [B, tokens seen + S]; 0 at padding, on the left or right.
            past_key_values: what an earlier call returned; it is changed in place.
            labels: [B, S]; position i is scored against label i + 1. -100 is not scored.
            use_cache: return the memory (default: when not training).
            logits_to_keep: 0 for all positions, n for the last n, or the positions.
            output_attentions: not offered (`allattn.model.transformer.watched` shows them).
            output_hidden_states: not offered.
            return_dict: False for a tuple.
            cache: the newer name of `past_key_values`.
            num_items_in_batch: divide the sum of losses by it, not by the number of labels.

        Returns:
            `logits`: log-probabilities [B, S or fewer, V], float32; `loss`: mean nats a label; and
            the memory.

        Raises:
            ValueError: padding between tokens; an output that is not offered.
        """
        if output_attentions or output_hidden_states:
            raise ValueError("output_attentions, output_hidden_states: allattn does not give them")
        if input_ids.shape[1] == 0:
            raise ValueError("input_ids: empty; a text begins after a line end, the eos_token")
        past = past_key_values if past_key_values is not None else cache
        n_seen = 0 if past is None else past.n_seen
        padding_B = _left_padding(attention_mask)
        if past is not None:
            if torch.is_grad_enabled() and any(
                isinstance(held, KeyValues) for held in past.memory.hidden
            ):
                raise ValueError(
                    "past_key_values: made without gradients; go on under torch.no_grad()"
                )
            h_BSD, memory = self._segments(input_ids, past.memory, 0)
        else:
            h_BSD, memory = self._from_the_start(input_ids, padding_B)
        h_BSD = self.model.dropout(self.model.norm(h_BSD))

        everything = isinstance(logits_to_keep, int) and logits_to_keep == 0
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.vocabulary(h_BSD[:, kept], "log_probs")
        loss = None
        if labels is not None:
            targets = labels[:, 1:].to(logits.device)
            targets = targets.masked_fill(targets == -100, -1)
            if everything:
                nll = -logits[:, :-1].gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
                nll = nll.masked_fill(targets == -1, 0.0)
            else:  # what is not wanted is not computed: no [B, S, V]
                nll = self.model.vocabulary(h_BSD[:, :-1], "nll", targets)
            n = (targets != -1).sum() if num_items_in_batch is None else num_items_in_batch
            loss = nll.sum() / n
        if past is None:
            past = AllattnCache(memory, 0)
        past.memory, past.n_seen = memory, n_seen + input_ids.shape[1]
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        remembered: dict[str, Any] = {_CACHE: past if use_cache else None}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **remembered)
        return output.to_tuple() if return_dict is False else output

    def _segments(
        self,
        ids_BS: Tensor,
        memory: Memory | None,
        first: int,
        padding_B: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """The last layer's output for all tokens, in segments; `first`: length of a short first."""
        T = self.model.config.seq_len
        pieces = list(ids_BS[:, first:].split(T, dim=1))
        pieces = [ids_BS[:, :first], *pieces] if first else pieces
        found = []
        for piece in pieces:
            h, memory = self.model.hidden(piece, memory, padding_B)
            found.append(h)
        assert memory is not None, "there is at least one piece"
        return torch.cat(found, dim=1), memory

    def _new_memory(self, padding_B: Tensor | None) -> Memory | None:
        """Keys and values are kept, unless gradients flow: then layer inputs."""
        if torch.is_grad_enabled():
            return None
        memory: Memory = self.model.empty_cache()
        memory.padding = padding_B
        return memory

    def _from_the_start(self, ids_BS: Tensor, padding_B: Tensor | None) -> tuple[Tensor, Memory]:
        """As `_segments`, at the beginning of texts that are padded on the left.

        Each text's segments are cut where they would be without padding, so that a batch gives what
        each text gives alone: rows whose padding calls for the same cuts go together.
        """
        T = self.model.config.seq_len
        if padding_B is None or ids_BS.shape[1] <= T:
            return self._segments(ids_BS, self._new_memory(padding_B), 0, padding_B)
        parts, rows = [], []
        for first in (padding_B % T).unique().tolist():
            of = (padding_B % T == first).nonzero().squeeze(1)
            memory = self._new_memory(padding_B[of])
            parts.append(self._segments(ids_BS[of], memory, first, padding_B[of]))
            rows.append(of)
        if len(parts) == 1:
            return parts[0]
        h_BSD = torch.cat([h for h, _ in parts])
        cache = AllattnCache(_join([m for _, m in parts], [len(of) for of in rows]), 0)
        back = torch.cat(rows).argsort()
        cache.batch_select_indices(back)
        return h_BSD[back], cache.memory

    # ---- generation -------------------------------------------------------------------------

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: the first call makes the memory."""
        return False

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """What `generate` gives `forward`: the tokens that its cache has not seen."""
        cache = kwargs.get(_CACHE)
        n_seen = 0 if cache is None else cache.n_seen
        inputs = {
            "input_ids": input_ids[:, n_seen:],
            "attention_mask": kwargs.get("attention_mask"),
            "use_cache": kwargs.get("use_cache", True),
            "logits_to_keep": kwargs.get("logits_to_keep", 0),
            _CACHE: cache,
        }
        device = self.device
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}

    # ---- files ------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which would fill what is missing with noise: this refuses.

        Raises:
            ValueError: weights that were damaged or exchanged, or do not fit the config.
        """
        path = pretrained_model_name_or_path
        wants_info = kwargs.pop("output_loading_info", False)
        if isinstance(path, (str, Path)) and (Path(path) / "config.json").is_file():
            values = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
            check_sha256(Path(path), values.get("sha256", {}))
        # transformers declares the model alone
        both: Any = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        model, info = both
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(kind):
                names = ", ".join(str(name) for name in sorted(info[kind], key=str)[:3])
                raise ValueError(
                    f"{path}: the weights do not belong to its config.json: "
                    f"{kind.replace('_', ' ')}: {names}"
                )
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers; allattn loads the folder too."""
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        if not kwargs.get("is_main_process", True) or not (folder / "config.json").is_file():
            return
        if self._write_code is not None:
            self._write_code(folder)
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        values["sha256"] = {p.name: sha256(p) for p in sorted(folder.glob("*.safetensors"))}
        values.pop("valid_ppl", None)  # was of the weights before
        (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _left_padding(mask: Tensor | None) -> Tensor | None:
    """How many of the first tokens of each sequence are padding: [B]; None: none anywhere.

    Padding on the right is of no account: no token sees what comes after it.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        raise ValueError(f"attention_mask: [batch, tokens] is needed, not {list(mask.shape)}")
    real = mask != 0
    padding_B = (real.cumsum(1) == 0).sum(1)
    to_the_right = (real.flip(1).cumsum(1) == 0).sum(1)
    n = mask.shape[1]
    holes = real.sum(1) + padding_B + to_the_right != n
    if bool((holes & (padding_B < n)).any()):
        raise ValueError("attention_mask: padding between tokens; pad on the left")
    return padding_B if bool(padding_B.any()) else None


def _join(memories: list[Memory], sizes: list[int]) -> Memory:
    """The memories of several batches as that of one."""
    layers: list[Tensor | KeyValues | None] = []
    for held in zip(*(memory.hidden for memory in memories), strict=True):
        if held[0] is None:
            layers.append(None)
        elif isinstance(held[0], KeyValues):
            layers.append(KeyValues.join(list(held)))
        else:
            layers.append(torch.cat(list(held)))
    padding = None
    found = [memory.padding for memory in memories]
    if any(p is not None for p in found):
        like = next(p for p in found if p is not None)
        padding = torch.cat(
            [like.new_zeros(n) if p is None else p for p, n in zip(found, sizes, strict=True)]
        )
    return Memory(layers, memories[0].length, padding)
