"""Attention through torch's `scaled_dot_product_attention`: on every device, in every dtype."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_optimizer.engine.packed_batch import DecodeGroup, PackedBatch


class SdpaAttention:
    """Prefills one sequence at a time; decodes those of similar length together, over their gathered contexts."""

    capturable = False

    def __init__(self) -> None:
        self._workspace = torch.empty(0)

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        for stored, new in zip(cache_2BSKd.flatten(1, 2), (k_TKd, v_TKd), strict=True):
            stored.index_copy_(0, batch.slots_T, new)
        out_THd, count = torch.empty_like(q_THd), batch.num_decodes
        if count:
            self.decode(q_THd[:count], cache_2BSKd, batch, out_THd[:count])
        if batch.prefills:
            parts = self.prefill(q_THd, k_TKd, v_TKd, cache_2BSKd, batch)
            torch.cat(parts, out=out_THd[count:])
        return out_THd

    def decode(self, q_DHd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch, out_DHd: Tensor) -> None:
        """Write the output of each decode, whose key and value are stored."""
        for group in batch.decode_groups:
            out_GHd = self._decode(q_DHd.index_select(0, group.rows_G), cache_2BSKd, group)
            out_DHd.index_copy_(0, group.rows_G, out_GHd)

    def prefill(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch
    ) -> list[Tensor]:
        """Return the output of each prefill, whose keys and values are stored."""
        parts = []
        for prefill, block_ids in zip(batch.prefills, batch.block_tables_SN[batch.num_decodes :], strict=True):
            rows = slice(prefill.begin, prefill.end)
            keys, values = k_TKd[rows], v_TKd[rows]
            if prefill.num_computed:
                read_N = block_ids[: -(-prefill.length // batch.block_size)]
                keys, values = cache_2BSKd.index_select(1, read_N).flatten(1, 2)[:, : prefill.length]
            parts.append(_prefill(q_THd[rows], keys, values, prefill.num_computed))
        return parts

    def _decode(self, q_GHd: Tensor, cache_2BSKd: Tensor, group: DecodeGroup) -> Tensor:
        """One query per sequence. Query heads that share a key/value head are its rows, so nothing is repeated."""
        num, heads, size = q_GHd.shape
        kv_heads = cache_2BSKd.shape[3]
        gathered = self._gather(cache_2BSKd, group.block_tables_GN.flatten())
        keys, values = gathered.view(2, num, -1, kv_heads, size).transpose(2, 3)
        q_GKRd = q_GHd.view(num, kv_heads, heads // kv_heads, size)
        return scaled_dot_product_attention(q_GKRd, keys, values, group.mask_G11L).reshape(num, heads, size)

    def _gather(self, cache_2BSKd: Tensor, block_ids: Tensor) -> Tensor:
        """Copy blocks into a buffer that is kept: fresh memory of this size costs more than the copy."""
        num_elements = cache_2BSKd[:, 0].numel() * len(block_ids)
        if self._workspace.numel() < num_elements:
            self._workspace = cache_2BSKd.new_empty(num_elements)
        gathered = self._workspace[:num_elements].view(2, len(block_ids), *cache_2BSKd.shape[2:])
        for half, target in zip(cache_2BSKd, gathered, strict=True):
            torch.index_select(half, 0, block_ids, out=target)
        return gathered


def _prefill(q_THd: Tensor, k_LKd: Tensor, v_LKd: Tensor, num_computed: int) -> Tensor:
    """A prompt or a chunk of one, behind `num_computed` tokens whose keys and values come first."""
    mask = None
    if num_computed:
        mask = torch.ones(len(q_THd), len(k_LKd), dtype=torch.bool, device=q_THd.device).tril(num_computed)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q_THd, k_LKd, v_LKd))
    shared = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=shared)
    return out[0].transpose(0, 1)
