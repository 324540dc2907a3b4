"""The inputs of `fused_experts` and the limits of its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moe_optimizer.ops import mxfp4
from moe_optimizer.ops.four_bit_codes import CODES_PER_BYTE

MAX_EXPERTS = 1024
"""On one device."""
MAX_TOP_K = 32


class Inputs(NamedTuple):
    """The inputs of the registered ops, in the order of their schema."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: str

    @property
    def top_k(self) -> int:
        """Slots per token."""
        return self.topk_ids.shape[1]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return columns_of(self.w2)

    def for_kernels(self) -> Inputs:
        """Return them as kernels read them: small tensors contiguous, scales and biases also float32 unless bytes.

        The weights are never copied. The result keeps the copies alive: kernels get addresses only.
        """
        return self._replace(
            topk_weights=self.topk_weights.contiguous(),
            topk_ids=self.topk_ids.contiguous(),
            expert_map=None if self.expert_map is None else self.expert_map.contiguous(),
            w13_scale=as_kernels_read(self.w13_scale),
            w2_scale=as_kernels_read(self.w2_scale),
            w13_bias=as_kernels_read(self.w13_bias),
            w2_bias=as_kernels_read(self.w2_bias),
        )


def holds_mxfp4(weight: Tensor) -> bool:
    """Return whether the elements of `weight` are pairs of 4-bit codes."""
    return weight.dtype == mxfp4.PACKED_DTYPE


def bits_of(weight: Tensor) -> int:
    """Return the bits of one weight, without its share of a scale."""
    return 8 * weight.element_size() // (CODES_PER_BYTE if holds_mxfp4(weight) else 1)


def columns_of(weight: Tensor) -> int:
    """Return K of a weight [E, N, K], which stores half as many elements where they are pairs of codes."""
    return weight.shape[-1] * (CODES_PER_BYTE if holds_mxfp4(weight) else 1)


def as_kernels_read(tensor: Tensor | None) -> Tensor | None:
    """Return a scale or bias contiguous and in float32, or in bytes where it is that; the tensor itself if it can."""
    if tensor is None:
        return None
    return (tensor if tensor.dtype == mxfp4.PACKED_DTYPE else tensor.float()).contiguous()
