"""By how much converted weights change a layer's output: known answers, and what must raise it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from moe_optimizer.ops import reference
from moe_optimizer.ops.experts_error import CALIBRATION_TOKENS, experts_output_error
from moe_optimizer.ops.fp8_quant import dequantize_fp8, quantize_fp8

EXPERTS, HIDDEN, WIDTH = 6, 128, 64


def layer(seed: int = 7, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    # Not seed 0: the calibration tokens are made from it, and weights of the same numbers would go with them.
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * 0.1
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * 0.1
    return w13.to(dtype), w2.to(dtype)


def error(w13: torch.Tensor, w2: torch.Tensor) -> float:
    return experts_output_error(w13, w2, quantize_fp8(w13), quantize_fp8(w2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_weights_change_the_output_by_some_hundredths(dtype: torch.dtype) -> None:
    assert 0.03 < error(*layer(dtype=dtype)) < 0.06


def test_weights_that_fp8_holds_exactly_change_nothing() -> None:
    w13, w2 = (dequantize_fp8(*quantize_fp8(weight), torch.float32) for weight in layer(dtype=torch.float32))
    # Once more, with the same scales: every weight is an E4M3 number times its scale.
    assert error(w13, w2) < 1e-5


def test_it_is_the_relative_norm_of_the_difference() -> None:
    w13, w2 = layer(dtype=torch.float32)
    # All weights of the down projection 1.5 times as large: the output too, exactly.
    w2_fp8, scale = quantize_fp8(w2)
    changed = experts_output_error(w13, dequantize_fp8(w2_fp8, scale), quantize_fp8(w13), (w2_fp8, scale * 1.5))
    assert changed == pytest.approx(0.5, abs=0.05)


def test_one_bad_expert_shows() -> None:
    w13, w2 = layer()
    w13_fp8, scale = quantize_fp8(w13)
    scale[3] = 0
    # One expert of six without output: sqrt(1/6) of the norm.
    assert experts_output_error(w13, w2, (w13_fp8, scale), quantize_fp8(w2)) == pytest.approx(0.41, abs=0.04)


def test_it_is_the_same_every_time() -> None:
    assert error(*layer(1)) == error(*layer(1))


def test_weights_of_zero_have_no_error() -> None:
    w13, w2 = layer()
    assert error(torch.zeros_like(w13), w2) == 0.0


def test_there_are_tokens_for_every_expert_of_the_largest_models() -> None:
    assert CALIBRATION_TOKENS * 8 >= 512


@pytest.mark.parametrize("granularity", ["block", "channel"])
def test_a_slice_of_a_tensor_parallel_rank_is_as_good_as_the_whole(granularity: Literal["block", "channel"]) -> None:
    # Two ranks with half of the width each: gate rows, up rows and down columns. Blocks start anew in each slice, and
    # 96 is no multiple of 128, so they are others than those of the whole matrix.
    generator = torch.Generator().manual_seed(3)
    width = 192
    w13 = torch.randn(EXPERTS, 2 * width, HIDDEN, generator=generator) * 0.1
    w2 = torch.randn(EXPERTS, HIDDEN, width, generator=generator) * 0.1
    x = torch.randn(5, HIDDEN, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5], [3, 1]])
    weights = torch.full((5, 2), 0.5)
    exact = reference.fused_experts(x, w13, w2, weights, ids)
    total = torch.zeros_like(exact)
    for rank in range(2):
        half = slice(rank * width // 2, (rank + 1) * width // 2)
        w13_rank = torch.cat([w13[:, :width][:, half], w13[:, width:][:, half]], dim=1)
        (q13, s13), (q2, s2) = (quantize_fp8(w, granularity=granularity) for w in (w13_rank, w2[:, :, half]))
        total += reference.fused_experts(x, q13, q2, weights, ids, w13_scale=s13, w2_scale=s2)
    assert float((total - exact).norm() / exact.norm()) < 0.07


def test_a_slice_of_an_expert_parallel_rank_has_the_scales_of_the_whole() -> None:
    w13, _ = layer()
    whole, scale = quantize_fp8(w13)
    half, half_scale = quantize_fp8(w13[3:])
    assert torch.equal(half.view(torch.uint8), whole[3:].view(torch.uint8))
    assert torch.equal(half_scale, scale[3:])
