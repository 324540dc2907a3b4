"""Defines what an attention backend computes."""

from typing import Protocol

from torch import Tensor

from moe_optimizer.engine.packed_batch import PackedBatch


class AttentionBackend(Protocol):
    """Causal attention of a step's tokens over their sequences' keys and values.

    Legend: T tokens, H query heads, K key/value heads, d head size, B blocks, S block size.
    """

    capturable: bool
    """Whether a CUDA graph may hold its decodes: no choice of the host depends on the lengths."""

    def attend(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch) -> Tensor:
        """Store the keys and values in the cache, and return the attention's output [T, H, d].

        cache_2BSKd[0] holds keys, [1] values. Query head h reads key/value head h // (H / K).
        """
        ...
