"""Measures how much converted weights, in FP8 or four bits, change the output of one layer's experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.ops.fused_experts import fused_experts
from moe_optimizer.ops.int4 import Int4Weight

CALIBRATION_TOKENS = 64
"""Chosen: the mean of some 64 x H squared differences moves by less than a hundredth from one draw to the next."""
_CHOICES = 8


def experts_output_error(
    w13: Tensor,
    w2: Tensor,
    w13_converted: tuple[Tensor | Int4Weight, Tensor | None],
    w2_converted: tuple[Tensor | Int4Weight, Tensor | None],
) -> float:
    """Return ||y_converted - y|| / ||y|| over calibration tokens, y being the SwiGLU experts' output [T, H].

    The tokens are synthetic: independent normal values, as a normalised input of weight one has, from a fixed seed;
    they are dealt to the experts in turn, so every expert counts alike. What real text does to a layer (large
    values in a few channels, busy experts) is not in it.

    E experts, H hidden size, I expert width.

    Args:
        w13: [E, 2I, H], gate rows first; float32, bfloat16 or float16. The inputs are made in its dtype.
        w2: [E, H, I], dtype of w13.
        w13_converted: weights and scales of w13, as `quantize_fp8` or `quantize_mxfp4` returns them; an INT4 weight,
            and no scales.
        w2_converted: of w2.

    Returns:
        0.0 where the output is zero.
    """
    experts, hidden = w13.shape[0], w13.shape[2]
    top_k = min(_CHOICES, experts)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(CALIBRATION_TOKENS, hidden, generator=generator, device="cpu").to(w13.device, w13.dtype)
    slots = torch.arange(CALIBRATION_TOKENS * top_k, dtype=torch.int32, device=w13.device)
    topk_ids = (slots % experts).view(CALIBRATION_TOKENS, top_k)
    topk_weights = torch.full(topk_ids.shape, 1 / top_k, dtype=torch.float32, device=w13.device)
    exact = fused_experts(x, w13, w2, topk_weights, topk_ids).float()
    (changed_w13, w13_scale), (changed_w2, w2_scale) = w13_converted, w2_converted
    changed = fused_experts(
        x, changed_w13, changed_w2, topk_weights, topk_ids, w13_scale=w13_scale, w2_scale=w2_scale
    ).float()
    size = exact.norm()
    return float((changed - exact).norm() / size) if size else 0.0
