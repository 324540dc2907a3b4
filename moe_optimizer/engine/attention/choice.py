"""Chooses the attention backend of a device."""

import importlib.util
from typing import Literal

import torch

from moe_optimizer.engine.attention.base import AttentionBackend
from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.log import get_logger

logger = get_logger(__name__)
BackendName = Literal["auto", "flash", "triton", "sdpa"]
_FLASH_BLOCK = 256
"""FlashAttention 2 reads pages of a multiple of this many tokens."""


def make_backend(name: BackendName, device: torch.device, block_size: int) -> AttentionBackend:
    """Return the backend `name`; "auto" is the fastest that this device has, with a warning where one is missing.

    Raises:
        UnsupportedError: it was named, and cannot run here.
    """
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return SdpaAttention()
    why_no_flash = _why_no_flash(device, block_size)
    if name == "flash" or (name == "auto" and not why_no_flash):
        if why_no_flash:
            raise UnsupportedError(f"attention_backend: got 'flash', and {why_no_flash}")
        from moe_optimizer.engine.attention.flash_attention import FlashAttention

        return FlashAttention()
    if importlib.util.find_spec("triton") is not None:
        if name == "auto":
            logger.warning(
                "%s: attention runs through our Triton kernels; what FlashAttention would save is not measured",
                why_no_flash,
            )
        from moe_optimizer.engine.attention.triton_attention import TritonAttention

        return TritonAttention()
    if name == "triton":
        raise UnsupportedError("attention_backend: got 'triton', and Triton is not installed")
    logger.warning(
        "neither FlashAttention nor Triton can run: attention gathers the KV blocks that each step reads, and decodes "
        "run without CUDA graphs"
    )
    return SdpaAttention()


def _why_no_flash(device: torch.device, block_size: int) -> str:
    if device.type != "cuda":
        return "FlashAttention runs on CUDA only"
    if importlib.util.find_spec("flash_attn") is None:
        return "FlashAttention is not installed"
    return "" if block_size % _FLASH_BLOCK == 0 else f"FlashAttention needs block_size={_FLASH_BLOCK}"
