"""One attention layer: content keys and persistent vectors share one softmax.

Shapes: B batch, T queries, M memory, S = M + T content keys, P persistent vectors, N heads,
H head width, D model width.

Two ways to compute it, the same to rounding: `reference`, the equation as it is written, is the
oracle; `fused` (see `fused.py`) never builds the [T, S + P] matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allattn.model.fused import fused_attention
from allattn.model.positions import Visible, shift_by_query

FEW_QUERIES = 16  # below it the fused core's bookkeeping costs more than it saves


def choose(
    wanted: str, device: str, dtype: torch.dtype, dropout: float, n_queries: int
) -> tuple[str, str]:
    """Which way to compute attention, and why.

    Args:
        wanted: `model.attention`: reference, fused or auto.
        device: `cpu` or `cuda`.
        dtype: of the matrix products.
        dropout: on attention weights, in this mode.
        n_queries: tokens that a call computes.

    Returns:
        `reference` or `fused`, and the reason in words.
    """
    if wanted == "reference":
        return "reference", "as configured"
    if dropout:
        return "reference", "attention dropout needs the weights"
    if device == "cpu" and dtype == torch.float16:
        return "reference", "the CPU has no float16 kernels for the fused core"
    if wanted == "fused":
        return "fused", "as configured"
    if device != "cpu":
        return "reference", "the fused core is tuned for CPUs"
    if n_queries < FEW_QUERIES:
        return "reference", f"the faster one for fewer than {FEW_QUERIES} tokens at a time"
    return "fused", "the faster one here"


class Attention(nn.Module):
    """Multi-head attention with relative positions (Dai et al. 2019, section 3.3) and persistent
    vectors (Sukhbaatar et al. 2019, equations 9 to 12).

    Attributes:
        gate: optional module that returns one multiplier a head, [N] or [B, N]; None: all ones.
        watch: optional function that is given the attention weights [B, N, T, S + P], content
            before persistent, and returns those to go on with; only `reference` has them.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_head: int,
        n_persistent: int,
        dropout: float,
        implementation: str = "reference",
        persistent_bias: bool = False,
    ):
        """Allocate the weights; `transformer.init_weights` gives them values."""
        super().__init__()
        self.n_heads, self.d_head, self.n_persistent = n_heads, d_head, n_persistent
        self.dropout, self.implementation = dropout, implementation
        width = n_heads * d_head
        self.query = nn.Linear(d_model, width, bias=False)
        self.key = nn.Linear(d_model, width, bias=False)
        self.value = nn.Linear(d_model, width, bias=False)
        self.position = nn.Linear(d_model, width, bias=False)
        self.output = nn.Linear(width, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.empty(n_heads, d_head))  # u
        self.position_bias = nn.Parameter(torch.empty(n_heads, d_head))  # w
        if n_persistent:
            # Kp' and Vp': the vectors are sqrt(H) Kp' and sqrt(P) Vp' (1907.01470, section 4.1)
            self.persistent_key = nn.Parameter(torch.empty(n_heads, n_persistent, d_head))
            self.persistent_value = nn.Parameter(torch.empty(n_heads, n_persistent, d_head))
        self.persistent_bias = nn.Parameter(torch.empty(n_heads)) if persistent_bias else None
        self.gate: nn.Module | None = None
        self.watch: Callable[[Tensor], Tensor] | None = None

    def forward(
        self,
        h_BSD: Tensor,
        T: int,
        positions_SD: Tensor,
        visible: Visible,
        cache: KeyValues | None = None,
    ) -> Tensor:
        """Attend from the last T positions to all S.

        Args:
            h_BSD: normalised memory and segment; with a cache the segment alone.
            T: number of queries.
            positions_SD: a vector for each distance S-1, ..., 0.
            visible: which keys each query sees.
            cache: keys and values of the memory; the segment's are added to it.

        Returns:
            [B, T, D], before the residual connection.
        """
        B, (N, H) = h_BSD.shape[0], (self.n_heads, self.d_head)
        h_BTD = h_BSD[:, -T:] if cache is None else h_BSD
        q_BTNH = self.query(h_BTD).view(B, T, N, H)
        # what depends on the weights alone is made once where the weights do not change
        once = cache.once if cache is not None else _anew
        kv = F.linear(h_BSD, once("key_value", self._key_value))
        kv_2BNSH = kv.view(B, -1, 2, N, H).permute(2, 0, 3, 1, 4)
        if cache is None:
            r_NSH = self._project(positions_SD)
        else:
            kv_2BNSH = cache.append(kv_2BNSH)
            r_NSH = cache.positions(positions_SD, self._project)
        if self._fused(q_BTNH, visible):
            heads_BTNH = fused_attention(
                q_BTNH,
                kv_2BNSH,
                r_NSH,
                self.content_bias,
                self.position_bias,
                *once("persistent", lambda: self._persistent(keys_first=cache is None)),
                self.persistent_bias,
                visible.window,
                visible.padding,
            )
        else:
            persistent = once("plain_persistent", self._plain_persistent)
            k_BNSH, v_BNSH = kv_2BNSH
            heads_BTNH = self._reference(q_BTNH, k_BNSH, v_BNSH, r_NSH, visible.mask, *persistent)
        weight = self.output.weight
        if self.gate is not None:
            gate = self.gate()
            if gate.dim() == 1:  # the same for all sequences: scaling Wo is less work
                weight = weight * gate.to(weight.dtype).repeat_interleave(H)
            else:
                heads_BTNH = heads_BTNH * gate[:, None, :, None].to(heads_BTNH.dtype)
        return F.linear(heads_BTNH.reshape(B, T, N * H), weight)

    def _key_value(self) -> Tensor:
        """Wk and Wv in one: the copy costs far less than a second pass over the input."""
        return torch.cat([self.key.weight, self.value.weight])

    def _project(self, positions_SD: Tensor) -> Tensor:
        r_SD: Tensor = self.position(positions_SD)
        return r_SD.view(-1, self.n_heads, self.d_head).transpose(0, 1)

    def _persistent(self, keys_first: bool) -> tuple[Tensor, Tensor]:
        """Kp and Vp, [N, P, H]; P is 0 for a Transformer-XL layer.

        The forward pass wants the transpose of Kp: `keys_first` leaves it to be made each time.
        """
        if not self.n_persistent:
            nothing = self.content_bias.new_empty(self.n_heads, 0, self.d_head)
            return nothing, nothing
        key = self.persistent_key * math.sqrt(self.d_head)
        if not keys_first:
            key = key.transpose(1, 2).contiguous().transpose(1, 2)
        return key, self.persistent_value * math.sqrt(self.n_persistent)

    def _plain_persistent(self) -> tuple[Tensor | None, Tensor | None]:
        """What the reference multiplies with: [N, H, P], without the sqrt(H) that its scale would
        cancel, and Vp, [N, P, H]; None for a Transformer-XL layer.
        """
        if not self.n_persistent:
            return None, None
        value = self.persistent_value * math.sqrt(self.n_persistent)
        return self.persistent_key.transpose(1, 2), value

    def _fused(self, q_BTNH: Tensor, visible: Visible) -> bool:
        """Whether this call takes the fused core."""
        dropout = self.dropout if self.training else 0.0
        if self.watch is not None or self.implementation == "reference":
            return False
        if visible.padding is not None and max(visible.padding) > visible.M:
            return False  # rows of padding: the reference has them see themselves
        wanted, T = self.implementation, q_BTNH.shape[1]
        return choose(wanted, q_BTNH.device.type, q_BTNH.dtype, dropout, T)[0] == "fused"

    def _reference(
        self,
        q_BTNH: Tensor,
        k_BNSH: Tensor,
        v_BNSH: Tensor,
        r_NSH: Tensor,
        mask: Tensor | None,
        key_NHP: Tensor | None,
        value_NPH: Tensor | None,
    ) -> Tensor:
        """The equation, explicit: [B, T, N, H]."""
        S, scale = k_BNSH.shape[2], 1 / math.sqrt(self.d_head)
        q_BNTH = q_BTNH.transpose(1, 2)
        content = (q_BNTH + self.content_bias[:, None]) @ k_BNSH.transpose(2, 3)
        position = (q_BNTH + self.position_bias[:, None]) @ r_NSH.transpose(1, 2)
        scores = (content + shift_by_query(position)) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if key_NHP is not None:
            persistent = q_BNTH @ key_NHP
            if self.persistent_bias is not None:
                persistent = persistent + self.persistent_bias[:, None, None]
            scores = torch.cat([scores, persistent], dim=-1)
        weights = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        if self.watch is not None:
            weights = self.watch(weights)
        heads = weights[..., :S].to(v_BNSH.dtype) @ v_BNSH
        if value_NPH is not None:
            heads = heads + weights[..., S:].to(v_BNSH.dtype) @ value_NPH.to(v_BNSH.dtype)
        return heads.transpose(1, 2)


def _anew(name: str, make: Callable[[], Any]) -> Any:
    """`KeyValues.once` where there is no cache."""
    return make()


class KeyValues:
    """A layer's keys and values of the last positions, for evaluation: a sliding buffer.

    The weights must not change while it is in use.

    New positions are written behind the old ones; when the buffer is full, those still wanted move
    to its front. With a buffer of twice the memory that is one copied position for a new one, so
    time and memory a token do not depend on how long the stream is.
    """

    def __init__(self, mem_len: int):
        """Nothing yet; after `trim` at most `mem_len` positions are kept."""
        self.mem_len = mem_len
        self.start = self.end = 0
        self.buffer: Tensor | None = None
        self.projected: Tensor | None = None
        self._made: dict[str, Any] = {}

    def append(self, kv_2BNTH: Tensor) -> Tensor:
        """Add T positions; all that are held, in order: [2, B, N, S, H], a view."""
        T = kv_2BNTH.shape[3]
        size = 0 if self.buffer is None else self.buffer.shape[3]
        if self.end + T > size:
            kept = None if self.buffer is None else self.buffer[:, :, :, self.start : self.end]
            n = self.end - self.start
            if n + T > size:
                shape = list(kv_2BNTH.shape)
                shape[3] = 2 * max(self.mem_len, n) + T
                self.buffer = kv_2BNTH.new_empty(shape)
            if n:
                assert self.buffer is not None and kept is not None
                # the source may overlap its place at the front
                self.buffer[:, :, :, :n] = kept.clone()
            self.start, self.end = 0, n
        assert self.buffer is not None, "made above"
        self.buffer[:, :, :, self.end : self.end + T] = kv_2BNTH
        self.end += T
        view = self.buffer[:, :, :, self.start : self.end]
        self.start = max(self.start, self.end - self.mem_len)
        return view

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returned the first time."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def select(self, rows: Tensor) -> None:
        """Keep these sequences in this order; one may be there several times."""
        if self.buffer is not None:
            self.buffer = self.buffer.index_select(1, rows)

    @classmethod
    def join(cls, parts: list[KeyValues]) -> KeyValues:
        """The sequences of all parts, which hold as many positions each."""
        joined = cls(parts[0].mem_len)
        joined.buffer = torch.cat([p._held() for p in parts], dim=1)
        joined.end = joined.buffer.shape[3]
        return joined

    def _held(self) -> Tensor:
        """All that is kept: [2, B, N, S, H], a view."""
        assert self.buffer is not None, "something was appended"
        return self.buffer[:, :, :, self.start : self.end]

    def positions(self, positions_SD: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """r for distances S-1, ..., 0: [N, S, H]; projected once, as long as S does not grow."""
        S = positions_SD.shape[0]
        if self.projected is None or self.projected.shape[1] < S:
            self.projected = project(positions_SD)
        return self.projected[:, -S:]
