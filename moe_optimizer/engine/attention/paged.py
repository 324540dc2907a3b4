"""Attention on CPUs: prompts through torch's SDPA, decodes through our kernel that reads the KV blocks in place."""

from torch import Tensor

from moe_optimizer import ops
from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.engine.packed_batch import PackedBatch


class PagedAttention(SdpaAttention):
    """One call of `ops.paged_attention` for all decodes of a step."""

    def decode(self, q_DHd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch, out_DHd: Tensor) -> None:
        (keys, values), count = cache_2BSKd, len(q_DHd)
        tables, lengths = batch.block_tables_SN[:count], batch.context_lengths_S[:count]
        ops.paged_attention(q_DHd, keys, values, tables, lengths, out=out_DHd)
