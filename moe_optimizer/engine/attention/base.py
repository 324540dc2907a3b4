"""`AttentionBackend`: what a backend computes, and which one this machine uses."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_optimizer.engine.attention.context import AttentionContext
from moe_optimizer.log import get_logger

_log = get_logger(__name__)


class AttentionBackend(Protocol):
    """Causal attention of a step's tokens over their sequences' keys and values.

    Legend: T tokens, H query heads, K key/value heads, d head size, B blocks, S block size.
    """

    def attend(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, context: AttentionContext
    ) -> Tensor:
        """Store the keys and values in the cache, and return the attention's output [T, H, d].

        cache_2BSKd[0] holds keys, [1] values. Query head h reads key/value head h // (H / K).
        """
        ...


def store(k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, slots_T: Tensor) -> None:
    """Write keys and values into their slots of the cache."""
    keys, values = cache_2BSKd.flatten(1, 2)
    keys.index_copy_(0, slots_T, k_TKd)
    values.index_copy_(0, slots_T, v_TKd)


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend `name`; "auto" is the fastest that this device has."""
    from moe_optimizer.engine.attention.sdpa import SdpaAttention

    if name == "auto" and device.type == "cuda":
        _log.warning("attention runs through torch's SDPA: each step gathers the KV blocks that it reads")
    return SdpaAttention()
