"""Attention through the build of FlashAttention that vLLM brings, which reads pages of 16 tokens."""

from typing import Any

import torch
from torch import Tensor
from vllm.vllm_flash_attn import flash_attn_varlen_func

from moe_optimizer.engine.attention.triton_attention import TritonAttention, store
from moe_optimizer.engine.packed_batch import PackedBatch

_HEAD_SIZES = 8
"""It takes multiples of this."""


class VllmFlashAttention(TritonAttention):
    """One call for decodes and prefills. What FlashAttention cannot compute, float32 above all, goes through Triton."""

    def __init__(self, version: int) -> None:
        self.version = version

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        if q_THd.dtype == torch.float32 or q_THd.shape[-1] % _HEAD_SIZES:
            return super().attend(q_THd, k_TKd, v_TKd, cache_2BSKd, batch)
        store(k_TKd, v_TKd, cache_2BSKd, batch.slots_T)
        keys, values = cache_2BSKd
        out_THd: Any = flash_attn_varlen_func(
            q_THd, keys, values,
            max_seqlen_q=max((prefill.end - prefill.begin for prefill in batch.prefills), default=1),
            cu_seqlens_q=batch.query_starts_S1.int(),
            # A bound that the host knows without asking the device.
            max_seqlen_k=batch.block_tables_SN.shape[1] * batch.block_size,
            seqused_k=batch.context_lengths_S.int(),
            block_table=batch.block_tables_SN, causal=True, fa_version=self.version,
        )  # fmt: skip
        return out_THd
