"""Prompts as engines without packing compute them: side by side, padded to the longest."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.engine.packed_batch import PackedBatch


class PaddedSdpaAttention(SdpaAttention):
    """What packing is compared with: a step of whole prompts is one call; chunks and decodes are as without padding."""

    def prefill(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch
    ) -> list[Tensor]:
        if any(prefill.num_computed for prefill in batch.prefills):
            return super().prefill(q_THd, k_TKd, v_TKd, cache_2BSKd, batch)
        lengths = [prefill.length for prefill in batch.prefills]
        tensors = [each[batch.num_decodes :].split(lengths) for each in (q_THd, k_TKd, v_TKd)]
        q, k, v = (pad_sequence(list(each), batch_first=True).transpose(1, 2) for each in tensors)
        # Padding is behind every token of its prompt, so none attends to it.
        out_PHLd = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out_HLd[:, :length].transpose(0, 1) for out_HLd, length in zip(out_PHLd, lengths, strict=True)]
