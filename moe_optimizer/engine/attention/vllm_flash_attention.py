"""Attention through the build of FlashAttention that vLLM brings, which reads pages of 16 tokens."""

from typing import Any

from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from moe_optimizer.engine.attention.flash_attention import FlashAttention
from moe_optimizer.engine.packed_batch import PackedBatch


class VllmFlashAttention(FlashAttention):
    """One call for decodes and prefills."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._of: PackedBatch | None = None
        self._schedule: Any = None
        """Which core computes what of the batch `_of`."""

    def compute(self, q_THd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        starts_S1, lengths_S = batch.int32_lengths
        longest = max((prefill.end - prefill.begin for prefill in batch.prefills), default=1)
        # A bound that the host knows without asking the device.
        bound = batch.block_tables_SN.shape[1] * batch.block_size
        if self.version == 3 and self._of is not batch:
            # Else each layer's call works it out for itself, in a kernel of its own.
            self._of, self._schedule = batch, get_scheduler_metadata(
                batch_size=len(lengths_S), max_seqlen_q=longest, max_seqlen_k=bound, num_heads_q=q_THd.shape[1],
                num_heads_kv=cache_2BSKd.shape[3], headdim=q_THd.shape[2], cache_seqlens=lengths_S,
                qkv_dtype=q_THd.dtype, cu_seqlens_q=starts_S1, page_size=batch.block_size, causal=True,
            )  # fmt: skip
        out_THd: Any = flash_attn_varlen_func(
            q_THd, *cache_2BSKd, max_seqlen_q=longest, cu_seqlens_q=starts_S1, max_seqlen_k=bound,
            seqused_k=lengths_S, block_table=batch.block_tables_SN, causal=True, fa_version=self.version,
            scheduler_metadata=self._schedule,
        )  # fmt: skip
        return out_THd
