"""`Attention`: projections, norms of queries and keys, rotation; the backend does the rest.

Legend: T tokens, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from moe_optimizer.engine.attention.base import AttentionBackend
from moe_optimizer.engine.attention.context import AttentionContext
from moe_optimizer.engine.layers.linear import Linear, MergedLinear
from moe_optimizer.engine.layers.norm import RMSNorm
from moe_optimizer.engine.layers.rope import rotate

QKNorm = Literal["none", "head", "whole"]
"""Whether queries and keys are normalized, and over what: each head, or all heads of a token together."""


class Attention(nn.Module):
    """Grouped-query attention. `kv_cache` and `backend` are set before the first call."""

    kv_cache: Tensor
    """[2, blocks, block size, K, d]: this layer's keys and values."""
    backend: AttentionBackend

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm: QKNorm = "none",
        eps: float = 1e-6,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.num_kv_heads, self.clip, self.qk_norm = head_dim, num_kv_heads, clip, qk_norm
        sizes = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
        self.qkv_proj = MergedLinear(hidden_size, sizes, bias=bias)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias)
        if qk_norm != "none":
            self.q_norm = RMSNorm(head_dim if qk_norm == "head" else sizes["q"], eps)
            self.k_norm = RMSNorm(head_dim if qk_norm == "head" else sizes["k"], eps)

    def forward(self, x_TH: Tensor, rope: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
        """Let every token attend to itself and those before it in its sequence."""
        q, k, v = self.qkv_proj(x_TH)
        if self.qk_norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (tensor.clamp(-self.clip, self.clip) for tensor in (q, k, v))
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        out = self.backend.attend(q, k, v, self.kv_cache, context)
        return self.o_proj(out.flatten(-2))

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> torch.Size:
        """Return the shape of `kv_cache`."""
        return torch.Size((2, num_blocks, block_size, self.num_kv_heads, self.head_dim))
