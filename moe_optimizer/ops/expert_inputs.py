"""The inputs of `fused_experts` and the limits of its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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

    def for_kernels(self) -> Inputs:
        """Return them as kernels read them: small tensors contiguous, scales and biases also float32.

        The weights are never copied. The result keeps the copies alive: kernels get addresses only.
        """
        return self._replace(
            topk_weights=self.topk_weights.contiguous(),
            topk_ids=self.topk_ids.contiguous(),
            expert_map=None if self.expert_map is None else self.expert_map.contiguous(),
            w13_scale=as_float32(self.w13_scale),
            w2_scale=as_float32(self.w2_scale),
            w13_bias=as_float32(self.w13_bias),
            w2_bias=as_float32(self.w2_bias),
        )


def as_float32(tensor: Tensor | None) -> Tensor | None:
    """Return a scale or bias as the kernels read it: float32 and contiguous, the tensor itself where it is that."""
    return None if tensor is None else tensor.float().contiguous()
