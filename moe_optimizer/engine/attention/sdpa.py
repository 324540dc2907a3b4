"""Attention through torch's `scaled_dot_product_attention`: on every device, in every dtype."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_optimizer.engine.attention.base import store
from moe_optimizer.engine.attention.context import AttentionContext, Prefill


class SdpaAttention:
    """Prefills one sequence at a time; decodes all at once, over their gathered and padded contexts."""

    def attend(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, context: AttentionContext
    ) -> Tensor:
        """See `AttentionBackend`."""
        store(k_TKd, v_TKd, cache_2BSKd, context.slots_T)
        outputs = []
        if context.num_decodes:
            outputs.append(_decode(q_THd[: context.num_decodes], cache_2BSKd, context))
        for prefill in context.prefills:
            rows = slice(prefill.begin, prefill.end)
            outputs.append(_prefill(q_THd[rows], k_TKd[rows], v_TKd[rows], cache_2BSKd, prefill))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decode(q_DHd: Tensor, cache_2BSKd: Tensor, context: AttentionContext) -> Tensor:
    """One query per sequence. The query heads that share a key/value head are its rows, so nothing is repeated."""
    num, heads, size = q_DHd.shape
    kv_heads = cache_2BSKd.shape[3]
    keys, values = (
        half.index_select(0, context.block_tables_DN.flatten()).view(num, -1, kv_heads, size).transpose(1, 2)
        for half in cache_2BSKd
    )
    q_DKGd = q_DHd.view(num, kv_heads, heads // kv_heads, size)
    return scaled_dot_product_attention(q_DKGd, keys, values, context.decode_mask_D11L).reshape(num, heads, size)


def _prefill(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, prefill: Prefill) -> Tensor:
    """A prompt or a chunk of one; keys and values of tokens before it are read from the cache."""
    mask = None
    if prefill.num_computed:
        length = prefill.num_computed + len(q_THd)
        k_TKd, v_TKd = (half.index_select(0, prefill.block_ids).flatten(0, 1)[:length] for half in cache_2BSKd)
        mask = torch.ones(len(q_THd), length, dtype=torch.bool, device=q_THd.device).tril(prefill.num_computed)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q_THd, k_TKd, v_TKd))
    shared = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=shared)
    return out[0].transpose(0, 1)
