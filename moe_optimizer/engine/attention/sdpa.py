"""Attention through torch's `scaled_dot_product_attention`: on every device, in every dtype."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_optimizer.engine.packed_batch import PackedBatch
from moe_optimizer.ops import token_rows


class SdpaAttention:
    """Prefills one sequence at a time; decodes all together, over contexts that are gathered and padded."""

    capturable = False

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        for stored_BSKd, new_TKd in zip(cache_2BSKd, (k_TKd, v_TKd), strict=True):
            if not token_rows.store_rows(new_TKd, batch.slots_T, stored_BSKd):
                stored_BSKd.flatten(0, 1).index_copy_(0, batch.slots_T, new_TKd)
        out_THd, count = torch.empty_like(q_THd), batch.num_decodes
        if count:
            self.decode(q_THd[:count], cache_2BSKd, batch, out_THd[:count])
        if batch.prefills:
            torch.cat(self.prefill(q_THd, k_TKd, v_TKd, cache_2BSKd, batch), out=out_THd[count:])
        return out_THd

    def decode(self, q_DHd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch, out_DHd: Tensor) -> None:
        """Write each decode's output. Query heads that share a key/value head are its rows: nothing is repeated."""
        tables_DN, mask_D11L = batch.decode_contexts
        keys_DKLd, values_DKLd = cache_2BSKd[:, tables_DN].flatten(2, 3).transpose(2, 3)
        q_DKRd = q_DHd.unflatten(1, (keys_DKLd.shape[1], -1))
        out_DHd.copy_(scaled_dot_product_attention(q_DKRd, keys_DKLd, values_DKLd, mask_D11L).flatten(1, 2))

    def prefill(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch
    ) -> list[Tensor]:
        """Return the output of each prefill; of a chunk the keys and values before it are read from the cache."""
        parts = []
        for prefill, block_ids in zip(batch.prefills, batch.block_tables_SN[batch.num_decodes :], strict=True):
            rows, mask = slice(prefill.begin, prefill.end), None
            queries, keys, values = q_THd[rows], k_TKd[rows], v_TKd[rows]
            if before := prefill.num_computed:
                read_N = block_ids[: -(-prefill.length // batch.block_size)]
                keys, values = cache_2BSKd.index_select(1, read_N).flatten(1, 2)[:, : prefill.length]
                mask = torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device).tril(before)
            q, k, v = (each.transpose(0, 1)[None] for each in (queries, keys, values))
            shared = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=shared)
            parts.append(out[0].transpose(0, 1))
        return parts
