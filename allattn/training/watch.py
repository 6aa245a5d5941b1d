"""What is measured at an evaluation: perplexity, and what the heads and the text look like.

Everything runs the model through the engine, alike on every rank: ZeRO-3 shows weights only inside
a module's forward. Nothing here draws from torch's random state.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from allattn.config import Config
from allattn.data.lanes import Corpus
from allattn.model.generate import generate
from allattn.model.scoring import perplexity, score_stream
from allattn.model.transformer import Output, watched
from allattn.training.live import LiveModel
from allattn.training.ranks import World

PIECES, QUERIES = 4, 64  # how much text the share of persistent vectors is measured on
PROMPT, NEW = 16, 32  # tokens of a text sample: the dearest part, a few milliseconds each
TEMPERATURE, TOP_K = 0.8, 40
LEAST = -1e4  # stands for log-probabilities that are no numbers


@dataclass
class Look:
    """What an evaluation sees beside the perplexity.

    Attributes:
        p_open: by layer and head of the run's first model (`LiveModel.p_open`).
        log_alphas: the gates' logits by layer; None for a layer without.
        persistent_share: by layer, the share of the open heads' attention that goes to persistent
            vectors; None for a layer without open heads. Empty for a model without such vectors.
        prompt: text from the corpus.
        sample: how the model goes on with it.
    """

    p_open: list[list[float | None]]
    log_alphas: list[Tensor | None]
    persistent_share: list[float | None]
    prompt: str
    sample: str


class Watch:
    """Evaluates a run's model, whatever shape it has by now."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        world: World,
        live: LiveModel,
        autocast: Callable[[], Any],
    ):
        """Take what does not change in a run; `autocast` gives a context of the run's precision.

        Raises:
            FileNotFoundError, ValueError: the corpus's tokenizer is missing or damaged.
        """
        self.config, self.corpus, self.world = config, corpus, world
        self.live, self.autocast = live, autocast
        self.tokenizer = corpus.tokenizer  # read here, before the run's folder is made
        self.split = "valid" if "valid" in corpus.splits else "train"

    def loss(self, split: str, most: int | None = None) -> dict[str, float]:
        """Loss and perplexity of a split, or of its first `most` tokens; NaN for one that is not
        there.
        """
        if split not in self.corpus.splits:
            return {"loss": float("nan"), "ppl": float("nan")}
        with self._evaluating():
            total = score_stream(
                self.live.engine,
                self.live.engine.module,
                self.corpus.tokens(split)[:most],
                self.tokenizer.eos_id,
                seq_len=self.config.model.seq_len,
                batch_size=self.config.train.eval_batch_size,
                rank=self.world.rank,
                world_size=self.world.size,
            )
        nats, tokens = self.world.sum(total).tolist()
        return {"loss": nats / tokens, "ppl": perplexity(nats / tokens)}

    def look(self) -> Look:
        """All the rest (all ranks must call it)."""
        eager = contextlib.nullcontext()
        if self.config.train.compile:
            # lengths that training never sees would be compiled for, minutes each
            eager = torch.compiler.set_stance("force_eager")
        with eager:
            share, (prompt, sample) = self.persistent_share(), self.text()
        return Look(self.live.p_open(), self.live.log_alphas(), share, prompt, sample)

    @torch.no_grad()
    def persistent_share(self) -> list[float | None]:
        """As `Look` has it: of the last queries of a few pieces of text, with full memory."""
        P, n_layers = self.config.model.n_persistent, self.config.model.n_layers
        if not P:
            return []
        open_heads = self.live.open_heads()
        shares: list[float | None] = [None] * n_layers

        def measure(layer: int, weights_BNTK: Tensor) -> Tensor:
            if open_heads[layer]:
                persistent_BNT = weights_BNTK[..., -P:].float().sum(-1)
                shares[layer] = float(persistent_BNT[:, open_heads[layer]].mean())
            return weights_BNTK

        pieces_BT = self._pieces(self.config.model.mem_len + QUERIES)
        before_BM, last_BT = pieces_BT[:, :-QUERIES], pieces_BT[:, -QUERIES:]
        engine = self.live.engine
        with self._evaluating():
            memory = engine.module.empty_cache()
            if before_BM.shape[1]:
                for part_BT in before_BM.split(self.config.model.seq_len, dim=1):
                    memory = engine(part_BT, memory=memory, last_only=True).memory
            with watched(engine.module, measure):
                engine(last_BT, memory=memory, last_only=True)
        return shares

    def text(self) -> tuple[str, str]:
        """A prompt from the corpus, and how the model goes on: the same draws at every call."""
        engine, decode = self.live.engine, self.tokenizer.decode
        prompt = self.corpus.tokens(self.split)[:PROMPT].tolist()

        def forward(*args: Any, **kwargs: Any) -> Output:
            output: Output = engine(*args, **kwargs)
            assert output.log_probs is not None, "no targets were given"
            # drawing from what is no number would end the run
            log_probs = output.log_probs.nan_to_num(LEAST, LEAST, LEAST)
            return dataclasses.replace(output, log_probs=log_probs)

        with self._evaluating():
            drawn = generate(
                engine.module,
                [prompt],
                max_new_tokens=NEW,
                temperature=TEMPERATURE,
                top_k=min(TOP_K, self.corpus.vocab_size),
                seed=self.config.run.seed,
                forward=forward,
            )
            new = [ids[0] for ids in drawn]  # never fewer: ranks run the model equally often
        return decode(prompt), decode(prompt + new)[len(decode(prompt)) :]

    def _pieces(self, length: int) -> Tensor:
        """Ids [PIECES, up to length] from places spread over a split."""
        tokens = self.corpus.tokens(self.split)
        length = min(length, len(tokens))
        starts = np.linspace(0, len(tokens) - length, PIECES).astype(int)
        rows = np.stack([tokens[start : start + length] for start in starts]).astype(np.int64)
        return torch.from_numpy(rows).to(self.world.device)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, in the run's precision."""
        self.live.engine.module.eval()
        with self.autocast():
            yield
