"""Attention through FlashAttention: the package flash-attn."""

import torch
from torch import Tensor

from moe_optimizer.engine.attention.triton_attention import TritonAttention, store
from moe_optimizer.engine.packed_batch import PackedBatch


class FlashAttention(TritonAttention):
    """What FlashAttention cannot compute goes through Triton: float32, and head sizes that are no multiple of 8."""

    def __init__(self) -> None:
        import flash_attn

        self._flash = flash_attn

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        if q_THd.dtype == torch.float32 or q_THd.shape[-1] % 8:
            return super().attend(q_THd, k_TKd, v_TKd, cache_2BSKd, batch)
        store(k_TKd, v_TKd, cache_2BSKd, batch.slots_T)
        return self.compute(q_THd, cache_2BSKd, batch)

    def compute(self, q_THd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        """Decode through the kernel for a paged cache, and compute prefills packed one behind the other."""
        keys, values = cache_2BSKd
        count, (starts_S1, lengths_S) = batch.num_decodes, batch.int32_lengths
        out_THd = torch.empty_like(q_THd)
        if count:
            out_THd[:count] = self._flash.flash_attn_with_kvcache(
                q_THd[:count, None], keys, values,
                cache_seqlens=lengths_S[:count], block_table=batch.block_tables_SN[:count], causal=True,
            )[:, 0]  # fmt: skip
        if batch.prefills:
            key_starts = torch.nn.functional.pad(lengths_S[count:].cumsum(0), (1, 0)).int()
            out_THd[count:] = self._flash.flash_attn_varlen_func(
                q_THd[count:], keys, values,
                cu_seqlens_q=starts_S1[count:] - count, cu_seqlens_k=key_starts,
                max_seqlen_q=max(prefill.end - prefill.begin for prefill in batch.prefills),
                max_seqlen_k=max(prefill.length for prefill in batch.prefills),
                block_table=batch.block_tables_SN[count:], causal=True,
            )  # fmt: skip
        return out_THd
