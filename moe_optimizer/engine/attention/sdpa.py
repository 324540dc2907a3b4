"""Attention through torch's `scaled_dot_product_attention`: on every device, in every dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_optimizer.engine.attention.base import store
from moe_optimizer.engine.attention.context import AttentionContext, Prefill


class SdpaAttention:
    """Prefills one sequence at a time; decodes all at once, over their gathered and padded contexts."""

    name = "sdpa"

    def attend(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, context: AttentionContext
    ) -> Tensor:
        """See `AttentionBackend`."""
        store(k_TKd, v_TKd, cache_2BSKd, context.slots_T)
        out_THd = torch.empty_like(q_THd)
        if context.num_decodes:
            decodes = slice(0, context.num_decodes)
            out_THd[decodes] = _decode(q_THd[decodes], cache_2BSKd, context)
        for prefill in context.prefills:
            rows = slice(prefill.begin, prefill.end)
            if prefill.num_computed:
                out_THd[rows] = _prefill_behind(q_THd[rows], cache_2BSKd, prefill)
            else:
                out_THd[rows] = _prefill(q_THd[rows], k_TKd[rows], v_TKd[rows])
        return out_THd


def _decode(q_DHd: Tensor, cache_2BSKd: Tensor, context: AttentionContext) -> Tensor:
    """One query per sequence. The query heads that share a key/value head are its rows, so nothing is repeated."""
    num, heads, size = q_DHd.shape
    kv_heads = cache_2BSKd.shape[3]
    keys, values = (
        half.index_select(0, context.block_tables_DN.flatten()).view(num, -1, kv_heads, size).transpose(1, 2)
        for half in cache_2BSKd
    )
    q_DKGd = q_DHd.view(num, kv_heads, heads // kv_heads, size)
    out = F.scaled_dot_product_attention(q_DKGd, keys, values, attn_mask=context.decode_mask_D11L)
    return out.reshape(num, heads, size)


def _prefill(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
    """A whole prompt, or its first chunk."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q_THd, k_TKd, v_TKd))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _prefill_behind(q_THd: Tensor, cache_2BSKd: Tensor, prefill: Prefill) -> Tensor:
    """A chunk behind tokens that are in the cache."""
    length = prefill.context_length
    keys, values = (half.index_select(0, prefill.block_ids).flatten(0, 1)[:length] for half in cache_2BSKd)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q_THd, keys, values))
    mask = torch.ones(q_THd.shape[0], length, dtype=torch.bool, device=q.device).tril(prefill.num_computed)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)
