"""Quantising weights to FP8: the bound on the error, the edges, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import fp8_quant
from moe_optimizer.ops.fp8_quant import E4M3_MAX, Granularity, dequantize_fp8, quantize_fp8, saturated_share

GRANULARITIES: tuple[Granularity, ...] = ("block", "channel")
FP32_SLACK = 1 + 2.0**-19
"""Of half a step: beside a midpoint of the smallest numbers, up to 7.5 steps, the quotient is rounded and the product,
together by up to 29 * 2**-24 of it."""


def random_weight(seed: int, shape: tuple[int, ...], magnitude: float, dtype: torch.dtype) -> torch.Tensor:
    """Normal values with a few outliers, which is what makes one scale for many values lossy."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator)
    outliers = torch.rand(*shape, generator=generator) < 0.01
    return (torch.where(outliers, weight * 50, weight) * magnitude).to(dtype)


def spread_scale(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One scale for each weight; written out element by element, unlike the code under test."""
    rows = torch.arange(weight.shape[-2])
    if scale.dim() == weight.dim() - 1:
        return scale[..., rows, None].expand(weight.shape)
    columns = torch.arange(weight.shape[-1])
    return scale[..., (rows // 128)[:, None], (columns // 128)[None, :]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    experts=st.integers(1, 3),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    granularity=st.sampled_from(GRANULARITIES),
)
def test_the_error_is_at_most_half_a_step_of_e4m3(
    seed: int, experts: int, rows: int, columns: int, exponent: int, dtype: torch.dtype, granularity: Granularity
) -> None:
    weight = random_weight(seed, (experts, rows, columns), 2.0**exponent, dtype)
    quantized, scale = quantize_fp8(weight, granularity=granularity)
    error = (dequantize_fp8(quantized, scale) - weight.float()).abs()
    bound = torch.maximum(weight.float().abs() / 16, spread_scale(scale, weight) / 1024) * FP32_SLACK
    assert bool((error <= bound).all())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 300), columns=st.integers(1, 300))
def test_the_largest_value_of_a_block_is_exact_but_for_rounding(seed: int, rows: int, columns: int) -> None:
    weight = random_weight(seed, (rows, columns), 1.0, torch.float32)
    quantized, _ = quantize_fp8(weight)
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            assert quantized[row : row + 128, column : column + 128].float().abs().max() == E4M3_MAX


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_e4m3_numbers_times_a_power_of_two_survive_unchanged(dtype: torch.dtype, granularity: Granularity) -> None:
    # All finite E4M3 values, so every block and row holds the largest one and the scale is that power of two.
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    row = torch.where(every.isnan(), 0.0, every) / 4
    weight = row.repeat(130, 1).to(dtype)
    quantized, scale = quantize_fp8(weight, granularity=granularity)
    assert bool((scale == 0.25).all())
    assert torch.equal(dequantize_fp8(quantized, scale, dtype), weight)


def test_scales_have_the_shapes_that_fused_experts_takes() -> None:
    weight = torch.ones(3, 257, 129)
    assert quantize_fp8(weight)[1].shape == (3, 3, 2)
    assert quantize_fp8(weight, granularity="channel")[1].shape == (3, 257)
    assert quantize_fp8(weight[0])[1].shape == (3, 2)
    assert quantize_fp8(weight[0], granularity="channel")[1].shape == (257,)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_large_value_spoils_only_its_own_block(granularity: Granularity) -> None:
    weight = torch.full((256, 256), 1.0)
    weight[5, 7] = 1e6
    error = (dequantize_fp8(*quantize_fp8(weight, granularity=granularity)) - weight).abs()
    spoiled = torch.zeros(256, 256, dtype=torch.bool)
    spoiled[(5, slice(None)) if granularity == "channel" else (slice(128), slice(128))] = True
    assert bool((error[spoiled] > 0.5).any())
    assert bool((error[~spoiled] < 1e-6).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_stay_zero_with_scale_one(granularity: Granularity) -> None:
    quantized, scale = quantize_fp8(torch.zeros(2, 130, 5), granularity=granularity)
    assert bool((quantized.float() == 0).all())
    assert bool((scale == 1).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_numbers_too_small_for_a_scale_give_no_nan(granularity: Granularity) -> None:
    restored = dequantize_fp8(*quantize_fp8(torch.full((4, 4), 1e-44), granularity=granularity))
    assert bool((restored.abs() <= 1e-40).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinite_and_undefined_weights_are_refused_with_their_expert(value: float, granularity: Granularity) -> None:
    weight = torch.ones(4, 200, 200)
    weight[2, 199, 3] = value
    with pytest.raises(TensorContractError, match=r"expert 2 .*infinite"):
        quantize_fp8(weight, granularity=granularity)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4, 4, dtype=torch.int8), "got torch.int8"),
        (torch.ones(4), "got 1 dimensions"),
        (torch.ones(4, 4).to(torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
    ],
)
def test_a_tensor_that_is_no_matrix_of_floats_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        quantize_fp8(weight)


# The words come from a plan, which is a file.
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"granularity": "tensor"}, "granularity: .*'tensor', .*block"),
        ({"quantizer": "te"}, "quantizer: .*'te', .*builtin"),
    ],
)
def test_an_unknown_word_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        quantize_fp8(torch.ones(4, 4), **words)


def test_scales_of_another_matrix_are_refused() -> None:
    quantized, _ = quantize_fp8(torch.ones(130, 130))
    with pytest.raises(TensorContractError, match=r"scale: got \(1, 3, 2\), expected \(1, 2, 2\)"):
        dequantize_fp8(quantized, torch.ones(3, 2))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_in_chunks_the_bits_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, granularity: Granularity) -> None:
    weight = random_weight(1, (2, 700, 200), 1.0, torch.bfloat16)
    whole = quantize_fp8(weight, granularity=granularity)
    monkeypatch.setattr(fp8_quant, "CHUNK_ELEMENTS", 1)
    in_chunks = quantize_fp8(weight, granularity=granularity)
    assert torch.equal(whole[0].view(torch.uint8), in_chunks[0].view(torch.uint8))
    assert torch.equal(whole[1], in_chunks[1])
    assert torch.equal(dequantize_fp8(*whole), dequantize_fp8(*in_chunks))


def test_a_strided_weight_is_read_in_place() -> None:
    weight = random_weight(2, (300, 200), 1.0, torch.float32)
    quantized, scale = quantize_fp8(weight.T)
    expected, expected_scale = quantize_fp8(weight.T.contiguous())
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


def test_saturated_are_the_weights_at_the_largest_number_of_either_sign() -> None:
    quantized = torch.tensor([[[448.0, -448.0, 416.0, 0.0]], [[1.0, -2.0, 448.0, -416.0]]]).to(torch.float8_e4m3fn)
    assert saturated_share(quantized, quantized) == pytest.approx(3 / 8)


def test_a_scale_for_a_block_brings_few_weights_but_the_largest_there() -> None:
    weight = random_weight(0, (2, 256, 256), 1.0, torch.float32)
    blocks = 2 * 2 * 2
    # A weight within a rounding of the largest lands on the same number.
    assert blocks <= saturated_share(quantize_fp8(weight)[0]) * weight.numel() <= 3 * blocks
