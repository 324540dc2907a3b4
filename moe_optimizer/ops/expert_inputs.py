"""What every kernel of `fused_experts` is given, and how much of it kernels cover."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_EXPERTS = 1024
"""On one device."""
MAX_TOP_K = 32
DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
"""As the compiled module numbers them."""


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


def as_float32(tensor: Tensor | None) -> Tensor | None:
    """Return a scale or bias as the kernels read it: float32 and contiguous, the tensor itself where it is that."""
    return None if tensor is None else tensor.float().contiguous()
