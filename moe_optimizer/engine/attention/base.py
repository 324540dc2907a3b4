"""`AttentionBackend`: what a backend computes, and which one this machine uses."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from moe_optimizer.engine.attention.context import AttentionContext
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.log import get_logger

_log = get_logger(__name__)

BACKENDS = ("auto", "sdpa", "flash_attn")


class AttentionBackend(Protocol):
    """Causal attention of a step's tokens over their sequences' keys and values.

    Legend: T tokens, H query heads, K key/value heads, d head size, B blocks, S block size.
    """

    name: str

    def attend(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, context: AttentionContext, scale: float
    ) -> Tensor:
        """Store the keys and values in the cache, and return the attention's output [T, H, d].

        cache_2BSKd[0] holds keys, [1] values. Query head h reads key/value head h // (H / K).
        """
        ...


def store(k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, slots_T: Tensor) -> None:
    """Write keys and values into their slots of the cache."""
    flat = cache_2BSKd.flatten(1, 2)
    flat[0].index_copy_(0, slots_T, k_TKd)
    flat[1].index_copy_(0, slots_T, v_TKd)


def make_backend(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Return the backend `name`; "auto" is FlashAttention where it can run, and torch's SDPA elsewhere.

    Raises:
        InputError: no backend has that name.
        UnsupportedError: FlashAttention was asked for and cannot run.
    """
    if name not in BACKENDS:
        raise InputError(f"attention_backend: got {name!r}, expected one of {', '.join(BACKENDS)}")
    why_not = _why_not_flash(device, dtype)
    if name == "flash_attn" and why_not:
        raise UnsupportedError(f"attention_backend: flash_attn cannot run: {why_not}", hint="use sdpa")
    if name == "flash_attn" or (name == "auto" and why_not is None):
        from moe_optimizer.engine.attention.flash import FlashAttention

        return FlashAttention()
    if name == "auto" and device.type == "cuda":
        _log.warning("attention runs through torch's SDPA: %s; each step gathers its KV blocks", why_not)
    from moe_optimizer.engine.attention.sdpa import SdpaAttention

    return SdpaAttention()


def _why_not_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, got {dtype}"
    return None if find_spec("flash_attn") else "the package flash_attn is not installed"
