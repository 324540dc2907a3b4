"""One call of the CUDA kernels as a flat list of integers; `csrc/launch/problem.h` reads it in the same order.

Addresses, sizes, strides and codes: nothing of torch crosses into the compiled module, and the tests hand the same
list to the kernels' emulation on the CPU.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.ops.expert_inputs import DTYPE_CODE

ACTIVATION_CODE = {"silu": 0, "swigluoai": 1}
SCORING_CODE = {"softmax": 0, "sigmoid": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How logits become expert ids and weights; see `reference` for the meaning."""

    logits: Tensor
    """[T, E] contiguous, float32 or bfloat16."""
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    score_bias: Tensor | None = None
    """float32 [E]: added for the choice only."""
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaProblem:
    """The checked tensors of one call; small ones already contiguous, biases and scales already float32."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    out: Tensor
    topk_weights: Tensor | None = None
    topk_ids: Tensor | None = None
    router: Router | None = None
    expert_map: Tensor | None = None
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    activation: str = "silu"

    @property
    def top_k(self) -> int:
        """Slots per token."""
        if self.router is not None:
            return self.router.top_k
        assert self.topk_ids is not None
        return self.topk_ids.shape[1]

    def values(self) -> list[int]:
        """Return the list that `problem_from_values` takes."""
        x, w13, w2, out = self.x, self.w13, self.w2, self.out
        scale_kind = 0 if self.w13_scale is None else (2 if self.w13_scale.dim() == 2 else 1)
        num_global = 0 if self.expert_map is None else self.expert_map.shape[0]
        ids = self.topk_ids
        sizes = [x.shape[0], x.shape[1], w2.shape[2], w13.shape[0], num_global, self.top_k]
        activations = [x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), DTYPE_CODE[x.dtype]]
        weights = [w13.data_ptr(), w2.data_ptr(), w13.stride(0), w13.stride(1), w2.stride(0), w2.stride(1)]
        scales = [scale_kind, _address(self.w13_scale), _address(self.w2_scale)]
        biases = [_address(self.w13_bias), _address(self.w2_bias)]
        routing = [_address(self.topk_weights), _address(ids), int(ids is not None and ids.dtype == torch.int64)]
        return [
            *sizes,
            *activations,
            *weights,
            DTYPE_CODE[w13.dtype],
            *scales,
            *biases,
            *routing,
            _address(self.expert_map),
            ACTIVATION_CODE[self.activation],
            *_router_values(self.router),
        ]


def _router_values(router: Router | None) -> list[int]:
    if router is None:
        return [0, 0, 0, 0, 1, 1, 0, _float_bits(1.0)]
    return [
        router.logits.data_ptr(),
        int(router.logits.dtype == torch.bfloat16),
        SCORING_CODE[router.scoring],
        int(router.renormalize),
        router.num_expert_group,
        router.topk_group,
        _address(router.score_bias),
        _float_bits(router.routed_scaling_factor),
    ]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]
