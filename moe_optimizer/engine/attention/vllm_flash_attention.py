"""Attention through the build of FlashAttention that vLLM brings, which reads pages of 16 tokens."""

from typing import Any

from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func

from moe_optimizer.engine.attention.flash_attention import FlashAttention
from moe_optimizer.engine.packed_batch import PackedBatch


class VllmFlashAttention(FlashAttention):
    """One call for decodes and prefills."""

    def __init__(self, version: int) -> None:
        self.version = version

    def compute(self, q_THd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        out_THd: Any = flash_attn_varlen_func(
            q_THd, *cache_2BSKd,
            max_seqlen_q=max((prefill.end - prefill.begin for prefill in batch.prefills), default=1),
            cu_seqlens_q=batch.query_starts_S1.int(),
            # A bound that the host knows without asking the device.
            max_seqlen_k=batch.block_tables_SN.shape[1] * batch.block_size,
            seqused_k=batch.context_lengths_S.int(),
            block_table=batch.block_tables_SN, causal=True, fa_version=self.version,
        )  # fmt: skip
        return out_THd
