"""`Attention`: projections, norms of queries and keys, rotation; the backend does the rest.

Legend: T tokens, H query heads, K key/value heads, N both together, d head size.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from moe_optimizer.engine.attention.backend import AttentionBackend
from moe_optimizer.engine.attention.paged import PagedAttention
from moe_optimizer.engine.layers.linear import Linear, MergedLinear
from moe_optimizer.engine.layers.norm import RMSNorm, normalized
from moe_optimizer.engine.layers.ranks import ALONE, Ranks
from moe_optimizer.engine.layers.rope import head_size, rotate
from moe_optimizer.engine.packed_batch import PackedBatch
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import decode_attention, token_rows

QKNorm = Literal["none", "head", "whole"]
"""Whether queries and keys are normalized, and over what: each head, or all heads of a token together."""


class Attention(nn.Module):
    """Grouped-query attention. `kv_cache` and `backend` are set before the first call.

    Several ranks share the heads; there may be fewer key/value heads than ranks, which then hold them more than once.
    """

    fused_methods = ("turned",)
    kv_cache: Tensor
    """[2, blocks, block size, K, d]: this layer's keys and values."""
    backend: AttentionBackend

    def __init__(self, config: Any, qk_norm: QKNorm = "none", ranks: Ranks = ALONE) -> None:
        super().__init__()
        if qk_norm == "whole" and ranks.size > 1:
            raise UnsupportedError(f"tensor_parallel_size: got {ranks.size}, expected 1: the norm spans all heads")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_heads = ranks.share(heads, "heads")
        self.num_kv_heads = 1 if ranks.size % kv_heads == 0 else ranks.share(kv_heads, "key/value heads")
        self.head_dim, self.qk_norm, self.eps = head_size(config), qk_norm, config.rms_norm_eps
        self.clip: float | None = getattr(config, "clip_qkv", None)
        self.is_plain = qk_norm != "whole" and self.clip is None and ranks.size == 1
        sizes = {"q": self.num_heads * self.head_dim} | dict.fromkeys("kv", self.num_kv_heads * self.head_dim)
        bias = getattr(config, "attention_bias", False)
        self.qkv_proj = MergedLinear(config.hidden_size, sizes, bias=bias, ranks=ranks)
        self.o_proj = Linear(heads * self.head_dim, config.hidden_size, bias=bias, ranks=ranks)
        if qk_norm != "none":
            self.q_norm = RMSNorm(self.head_dim if qk_norm == "head" else sizes["q"], config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim if qk_norm == "head" else sizes["k"], config.rms_norm_eps)

    def forward(self, x_TH: Tensor, rope: tuple[Tensor, Tensor], batch: PackedBatch) -> Tensor:
        """Let every token attend to itself and those before it in its sequence."""
        weights = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm == "head" else None
        if self.is_plain and isinstance(self.backend, PagedAttention) and not batch.prefills:
            qkv, o = ((each.weight, each.bias) for each in (self.qkv_proj, self.o_proj))
            places = (self.kv_cache, batch.slots_T, batch.block_tables_SN, batch.context_lengths_S)
            if (out := decode_attention.computed(x_TH, qkv, o, rope, places, norms=weights, eps=self.eps)) is not None:
                return out
        qkv = self.qkv_proj.product(x_TH)
        if self.qk_norm == "whole":
            q, k, v = self.qkv_proj.split(qkv)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        qk_TNd, v_TKd = qkv.unflatten(-1, (-1, self.head_dim)).tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        # In place: the product is nobody else's.
        if not token_rows.turn_heads(qk_TNd, self.num_heads, rope, weights, self.eps):
            qk_TNd = self.turned(qk_TNd, *rope)
        q_THd, k_TKd = qk_TNd.split([self.num_heads, self.num_kv_heads], dim=1)
        out = self.backend.attend(q_THd, k_TKd, v_TKd, self.kv_cache, batch)
        return self.o_proj(out.flatten(-2))

    def turned(self, qk_TNd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
        """Return queries and keys, normalized head by head if the model does that, and rotated."""
        if self.qk_norm == "head":
            norms = (self.q_norm, self.num_heads), (self.k_norm, self.num_kv_heads)
            weight_Nd = torch.cat([norm.weight.expand(count, -1) for norm, count in norms])
            qk_TNd = normalized(qk_TNd, weight_Nd, self.q_norm.eps)
        return rotate(qk_TNd, cos_T1d, sin_T1d)

    def kv_cache_shape(self, num_blocks: int, block_size: int) -> torch.Size:
        return torch.Size((2, num_blocks, block_size, self.num_kv_heads, self.head_dim))
