"""`AttentionBackend`: what one computes, and which one a device gets."""

import importlib.util
from typing import Literal, Protocol

import torch
from torch import Tensor

from moe_optimizer import ops
from moe_optimizer.engine.attention.padded_sdpa import PaddedSdpaAttention
from moe_optimizer.engine.attention.paged import PagedAttention
from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.engine.packed_batch import PackedBatch
from moe_optimizer.errors import UnsupportedError, described
from moe_optimizer.inspection.vllm_installation import flash_attention_versions
from moe_optimizer.log import get_logger

logger = get_logger(__name__)
BackendName = Literal["auto", "flash", "triton", "paged", "sdpa", "sdpa_padded"]
_PACKAGE_BLOCK, _VLLM_BLOCK = 256, 16
"""The package flash-attn and vLLM's build of it read pages of a multiple of this many tokens."""
_AMPERE, _HOPPER = 8, 9


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


def make_backend(name: BackendName, device: torch.device, block_size: int) -> AttentionBackend:
    """Return the backend `name`; "auto" is the fastest that this device has, with a warning where one is missing."""
    if name == "sdpa_padded":
        return PaddedSdpaAttention()
    if name == "paged" or (name == "auto" and device.type == "cpu"):
        why_not = ops.kernels_available()[1] if device.type == "cpu" else "our kernel for pages runs on CPUs only"
        if not why_not:
            return PagedAttention()
        if name == "paged":
            raise UnsupportedError(f"attention_backend: got 'paged', and {why_not}", hint="run: bash build.sh")
        logger.warning("%s: each decode copies the keys and values that it reads", why_not)
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return SdpaAttention()
    if name in ("auto", "flash"):
        flash = _flash_attention(device, block_size)
        if not isinstance(flash, str):
            return flash
        if name == "flash":
            raise UnsupportedError(f"attention_backend: got 'flash', and {flash}")
        logger.warning("%s: our Triton kernels reach 97 %% of its tokens/s (H200, Qwen3-0.6B)", flash)
    if importlib.util.find_spec("triton") is not None:
        from moe_optimizer.engine.attention.triton_attention import TritonAttention

        return TritonAttention()
    if name == "triton":
        raise UnsupportedError("attention_backend: got 'triton', and Triton is not installed")
    logger.warning("Triton is not installed: attention gathers what it reads, and decodes run without CUDA graphs")
    return SdpaAttention()


def _flash_attention(device: torch.device, block_size: int) -> AttentionBackend | str:
    """Return FlashAttention, or why there is none."""
    if device.type != "cuda":
        return "FlashAttention runs on CUDA only"
    if importlib.util.find_spec("triton") is None:
        return "FlashAttention needs Triton beside it, which is not installed"
    package, built = importlib.util.find_spec("flash_attn") is not None, flash_attention_versions()
    major = torch.cuda.get_device_capability(device)[0] if built else 0
    version = 3 if major == _HOPPER and 3 in built else 2 if major >= _AMPERE and 2 in built else None
    try:
        if package and block_size % _PACKAGE_BLOCK == 0:
            from moe_optimizer.engine.attention.flash_attention import FlashAttention

            return FlashAttention()
        if version is not None and block_size % _VLLM_BLOCK == 0:
            from moe_optimizer.engine.attention.vllm_flash_attention import VllmFlashAttention

            return VllmFlashAttention(version)
    except ImportError as error:
        return f"FlashAttention cannot be imported ({described(error)})"
    if package or version is not None:
        return f"FlashAttention needs block_size={_PACKAGE_BLOCK if package else _VLLM_BLOCK}"
    return "FlashAttention is not installed, nor a vLLM with its kernels for this GPU"
