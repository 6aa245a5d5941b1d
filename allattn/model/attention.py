"""One attention layer: content keys and persistent vectors share one softmax.

Shapes: B batch, T queries, M memory, S = M + T content keys, P persistent vectors, N heads,
H head width, D model width.

Two ways to compute it will live here: `reference`, the equation as it is written, is the oracle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from allattn.model.positions import shift_by_query


class Attention(nn.Module):
    """Multi-head attention with relative positions (Dai et al. 2019, section 3.3) and persistent
    vectors (Sukhbaatar et al. 2019, equations 9 to 12).

    Attributes:
        gate: optional module that returns one multiplier a head, [N] or [B, N]; None: all ones.
    """

    def __init__(self, d_model: int, n_heads: int, d_head: int, n_persistent: int, dropout: float):
        """Allocate the weights; `transformer.init_weights` gives them values."""
        super().__init__()
        self.n_heads, self.d_head, self.n_persistent = n_heads, d_head, n_persistent
        self.dropout = dropout
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
        self.gate: nn.Module | None = None

    def forward(self, h_BSD: Tensor, T: int, positions_SD: Tensor, visible: Tensor) -> Tensor:
        """Attend from the last T positions to all S.

        Args:
            h_BSD: normalised memory and segment.
            T: number of queries.
            positions_SD: a vector for each distance S-1, ..., 0.
            visible: boolean [1 or B, 1, T, S].

        Returns:
            [B, T, D], before the residual connection.
        """
        B, S, _ = h_BSD.shape
        N, H = self.n_heads, self.d_head
        q_BNTH = self.query(h_BSD[:, S - T :]).view(B, T, N, H).transpose(1, 2)
        k_BNSH = self.key(h_BSD).view(B, S, N, H).transpose(1, 2)
        v_BNSH = self.value(h_BSD).view(B, S, N, H).transpose(1, 2)
        r_NSH = self.position(positions_SD).view(S, N, H).transpose(0, 1)
        heads_BNTH = self._reference(q_BNTH, k_BNSH, v_BNSH, r_NSH, visible)
        if self.gate is not None:
            heads_BNTH = heads_BNTH * self.gate()[..., None, None].to(heads_BNTH.dtype)
        return self.output(heads_BNTH.transpose(1, 2).reshape(B, T, N * H))

    def _reference(
        self, q_BNTH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, r_NSH: Tensor, visible: Tensor
    ) -> Tensor:
        """The equation, explicit: [B, N, T, H]."""
        S, scale = k_BNSH.shape[2], 1 / math.sqrt(self.d_head)
        content = (q_BNTH + self.content_bias[:, None]) @ k_BNSH.transpose(2, 3)
        position = (q_BNTH + self.position_bias[:, None]) @ r_NSH.transpose(1, 2)
        scores = (content + shift_by_query(position)) * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.n_persistent:
            persistent = q_BNTH @ self.persistent_key.transpose(1, 2)  # sqrt(H) and scale cancel
            scores = torch.cat([scores, persistent], dim=-1)
        weights = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        heads = weights[..., :S].to(v_BNSH.dtype) @ v_BNSH
        if self.n_persistent:
            value = self.persistent_value * math.sqrt(self.n_persistent)
            heads = heads + weights[..., S:].to(v_BNSH.dtype) @ value.to(v_BNSH.dtype)
        return heads
