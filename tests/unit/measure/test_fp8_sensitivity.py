"""Comparing a layer with its FP8 copy, call by call; the whole of it runs in tests/vllm/test_fp8_sensitivity.py."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.measure.fp8_sensitivity import LayerErrors  # noqa: E402
from moe_optimizer.ops.fp8_quant import dequantize_fp8, quantize_fp8  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights, WeightFormat  # noqa: E402

GENERATOR = torch.Generator().manual_seed(5)


def layer(scale: float = 0.1) -> KernelWeights:
    w13 = torch.randn(4, 64, 128, generator=GENERATOR) * scale
    return KernelWeights(format="plain", w13=w13, w2=torch.randn(4, 128, 32, generator=GENERATOR) * scale)


def computed(weights: KernelWeights, tokens: int = 16) -> ExpertsCall:
    call = ExpertsCall(
        out=torch.empty(tokens, 128),
        x=torch.randn(tokens, 128, generator=GENERATOR),
        topk_weights=torch.full((tokens, 2), 0.5),
        topk_ids=torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2) % 4,
        expert_map=None,
        w13_bias=None,
        w2_bias=None,
    )
    WeightFormat().compute(weights, call)
    return call


def test_the_error_is_over_all_calls_of_a_layer() -> None:
    errors, weights = LayerErrors("block"), layer()
    calls = [computed(weights), computed(weights, tokens=3)]
    for call in calls:
        errors.add(0, weights, call)
    fp8 = KernelWeights(
        format="plain",
        w13=dequantize_fp8(*quantize_fp8(weights.w13)),
        w2=dequantize_fp8(*quantize_fp8(weights.w2)),
    )
    difference, size = 0.0, 0.0
    for call in calls:
        exact = call.out.clone()
        WeightFormat().compute(fp8, call)
        difference += float((call.out - exact).square().sum())
        size += float(exact.square().sum())
    assert errors.by_layer()[0] == pytest.approx((difference / size) ** 0.5, rel=1e-3)


def test_the_exact_output_goes_on() -> None:
    errors, weights = LayerErrors("channel"), layer()
    call = computed(weights)
    before: Any = call.out.clone()
    errors.add(0, weights, call)
    assert torch.equal(call.out, before)


def test_layers_are_kept_apart() -> None:
    errors, one, other = LayerErrors("block"), layer(), layer()
    for index, weights in ((7, one), (3, other)):
        errors.add(index, weights, computed(weights))
    found = errors.by_layer()
    assert list(found) == [3, 7]
    assert len(set(found.values())) == 2


def test_an_output_of_zero_has_no_error() -> None:
    errors, weights = LayerErrors("block"), layer(scale=0.0)
    errors.add(0, weights, computed(weights))
    assert list(errors.by_layer().values()) == [0.0]
