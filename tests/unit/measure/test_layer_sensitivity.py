"""Comparing a layer with its converted copy, call by call; the whole runs in tests/vllm/test_layer_sensitivity.py."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.measure.layer_sensitivity import LayerErrors  # noqa: E402
from moe_optimizer.ops.fp8_quant import dequantize_fp8, quantize_fp8  # noqa: E402
from moe_optimizer.ops.int4 import dequantize_int4, quantize_int4  # noqa: E402
from moe_optimizer.ops.mxfp4 import dequantize_mxfp4, quantize_mxfp4  # noqa: E402
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


def through(weight: Any, to: str) -> Any:
    """Return a weight as its conversion leaves it."""
    if to == "mxfp4":
        return dequantize_mxfp4(*quantize_mxfp4(weight))
    if to == "int4_g32":
        return dequantize_int4(quantize_int4(weight, 32))
    return dequantize_fp8(*quantize_fp8(weight))


@pytest.mark.parametrize("to", ["fp8_block", "mxfp4", "int4_g32"])
def test_the_error_is_over_all_calls_of_a_layer(to: Any) -> None:
    errors, weights = LayerErrors(to), layer()
    calls = [computed(weights), computed(weights, tokens=3)]
    for call in calls:
        errors.add(0, weights, call)
    changed = KernelWeights(format="plain", w13=through(weights.w13, to), w2=through(weights.w2, to))
    difference, size = 0.0, 0.0
    for call in calls:
        exact = call.out.clone()
        WeightFormat().compute(changed, call)
        difference += float((call.out - exact).square().sum())
        size += float(exact.square().sum())
    assert errors.by_layer()[0] == pytest.approx((difference / size) ** 0.5, rel=1e-3)


def test_the_exact_output_goes_on() -> None:
    errors, weights = LayerErrors("int4_g32"), layer()
    call = computed(weights)
    before: Any = call.out.clone()
    errors.add(0, weights, call)
    assert torch.equal(call.out, before)


def test_layers_are_kept_apart() -> None:
    errors, one, other = LayerErrors("fp8_block"), layer(), layer()
    for index, weights in ((7, one), (3, other)):
        errors.add(index, weights, computed(weights))
    found = errors.by_layer()
    assert list(found) == [3, 7]
    assert len(set(found.values())) == 2


def test_an_output_of_zero_has_no_error() -> None:
    errors, weights = LayerErrors("fp8_block"), layer(scale=0.0)
    errors.add(0, weights, computed(weights))
    assert list(errors.by_layer().values()) == [0.0]
