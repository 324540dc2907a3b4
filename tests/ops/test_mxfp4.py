"""Quantising weights to MXFP4: rounding, the choice of scales, what is exact, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import four_bit_codes, fused_experts, reference
from moe_optimizer.ops.mxfp4 import E2M1_VALUES, dequantize_mxfp4, quantize_mxfp4
from tests.ops.moe_cases import make_case

EVERY_CODE = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def group_of(*values: float) -> torch.Tensor:
    """One row of one group: the values, then zeros."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


def test_a_packed_byte_has_the_even_column_in_its_low_half() -> None:
    packed, scale = quantize_mxfp4(group_of(6.0, -0.5, 4.0, 3.0))
    assert packed[0, :2].tolist() == [0x7 | 0x9 << 4, 0x6 | 0x5 << 4]
    assert scale.tolist() == [[127]]
    assert dequantize_mxfp4(packed, scale)[0, :4].tolist() == [6.0, -0.5, 4.0, 3.0]


def test_codes_and_scales_of_a_checkpoint_mean_what_gpt_oss_writes() -> None:
    packed = torch.arange(16, dtype=torch.uint8).mul(0x11)[None]  # every code twice in a row
    want = EVERY_CODE.repeat_interleave(2)
    assert torch.equal(dequantize_mxfp4(packed, torch.tensor([[127]], dtype=torch.uint8))[0], want)
    assert torch.equal(dequantize_mxfp4(packed, torch.tensor([[120]], dtype=torch.uint8))[0], want / 128)
    assert dequantize_mxfp4(packed, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


# 6 holds the scale at 1. Ties go to the code with an even number: 0, 1, 2, 4.
@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (0.26, 0.5), (4.9, 4.0)],
)
def test_values_are_rounded_to_the_nearest_and_ties_to_the_even_code(value: float, rounded: float) -> None:
    restored = dequantize_mxfp4(*quantize_mxfp4(group_of(6.0, value, -value)))
    assert restored[0, :3].tolist() == [6.0, rounded, -rounded]


def test_a_scale_is_the_one_with_the_least_squared_error_not_the_one_of_the_largest_value() -> None:
    # Scale 1 makes 6 of the 7.9; scale 2 keeps it, nearly, and is coarser for the rest.
    few, many = group_of(7.9), torch.tensor([[7.9, *[1.5] * 31]])
    assert quantize_mxfp4(few)[1].item() == 128
    assert quantize_mxfp4(many)[1].item() == 127


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-60, 60), dtype=st.sampled_from(FLOATS[:2]))
def test_no_other_power_of_two_has_a_smaller_error(seed: int, exponent: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(6, 64, generator=generator) * 2.0**exponent).to(dtype)
    packed, scale = quantize_mxfp4(weight)
    groups = weight.double().unflatten(-1, (-1, 32))
    error = (dequantize_mxfp4(packed, scale, torch.float64).unflatten(-1, (-1, 32)) - groups).square().sum(-1)
    for other in range(-4, 5):
        factor = torch.ldexp(torch.ones(scale.shape, dtype=torch.float64), scale.int() - 127 + other)[..., None]
        # Nearest by distance to every number, unlike the code under test.
        nearest = (groups[..., None] / factor[..., None] - EVERY_CODE.double()).abs().amin(-1) * factor
        assert bool((error <= nearest.square().sum(-1) * (1 + 1e-6)).all())


@pytest.mark.parametrize("exponent", [-120, -30, 0, 7, 120])
@pytest.mark.parametrize("largest", E2M1_VALUES[1:])
def test_e2m1_numbers_times_a_power_of_two_survive_unchanged(exponent: int, largest: float) -> None:
    values = EVERY_CODE[EVERY_CODE.abs() <= largest].double() * 2.0**exponent
    weight = group_of(*values.tolist())
    assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(weight)), weight)


# What the kernels turn the weights into. E4M3 has 3 bits of mantissa and the exponents -9 (subnormal) to 8.
def test_every_weight_is_exact_in_bf16_and_within_e4m3s_range_in_e4m3() -> None:
    for exponent in range(-120, 121):
        values = EVERY_CODE * 2.0**exponent
        assert torch.equal(values.to(torch.bfloat16).float(), values)
    for exponent in range(-8, 7):  # 0.5 * 2**-8 is the smallest E4M3 number, 6 * 2**6 = 384 lies below 448
        values = EVERY_CODE * 2.0**exponent
        assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)
    for exponent in (-9, 7):
        values = EVERY_CODE * 2.0**exponent
        assert not torch.equal(values.to(torch.float8_e4m3fn).float(), values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_result_has_the_shapes_that_fused_experts_takes(dtype: torch.dtype) -> None:
    packed, scale = quantize_mxfp4(torch.ones(3, 5, 96, dtype=dtype))
    assert (packed.shape, scale.shape) == ((3, 5, 48), (3, 5, 3))
    assert quantize_mxfp4(torch.ones(5, 96))[1].shape == (5, 3)
    assert dequantize_mxfp4(packed, scale, dtype).eq(1).all()


def test_zeros_stay_zero_with_scale_one() -> None:
    packed, scale = quantize_mxfp4(torch.zeros(2, 3, 64))
    assert packed.eq(0).all()
    assert scale.eq(127).all()


def test_the_smallest_and_largest_numbers_stay_finite() -> None:
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    assert dequantize_mxfp4(*quantize_mxfp4(group_of(tiny, huge))).isfinite().all()
    restored = dequantize_mxfp4(*quantize_mxfp4(group_of(tiny, 1e-44)), torch.float64)
    assert restored[0, 0].item() == pytest.approx(tiny)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinite_and_undefined_weights_are_refused_with_their_expert(value: float) -> None:
    weight = torch.ones(4, 20, 64)
    weight[2, 19, 3] = value
    with pytest.raises(TensorContractError, match="expert 2"):
        quantize_mxfp4(weight)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4, 32, dtype=torch.int8), "torch.int8"),
        (torch.ones(32), r"\[32\]"),
        (torch.ones(4, 48), r"\[4, 48\].* 32"),
    ],
)
def test_what_is_no_matrix_of_whole_groups_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        quantize_mxfp4(weight)


def test_scales_of_another_matrix_are_refused() -> None:
    packed, scale = quantize_mxfp4(torch.ones(4, 64))
    with pytest.raises(TensorContractError, match=r"scale: got .*\[4, 1\], expected .*\[4, 2\]"):
        dequantize_mxfp4(packed, scale[:, :1])


def test_in_chunks_the_bits_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(1))
    whole = quantize_mxfp4(weight)
    monkeypatch.setattr(four_bit_codes, "CHUNK_ELEMENTS", 1)
    in_chunks = quantize_mxfp4(weight)
    assert torch.equal(whole[0], in_chunks[0])
    assert torch.equal(whole[1], in_chunks[1])


def test_the_reference_computes_with_the_restored_weights() -> None:
    case = make_case(5, 96, 64)
    (w13, w13_scale), (w2, w2_scale) = quantize_mxfp4(case.w13), quantize_mxfp4(case.w2)
    routing = (case.topk_weights, case.topk_ids)
    got = reference.fused_experts(case.x, w13, w2, *routing, w13_scale=w13_scale, w2_scale=w2_scale)
    restored = (dequantize_mxfp4(w13, w13_scale), dequantize_mxfp4(w2, w2_scale))
    assert torch.equal(got, reference.fused_experts(case.x, *restored, *routing))


def test_the_op_refuses_groups_that_are_not_whole_and_scales_that_are_not_bytes() -> None:
    case = make_case(5, 96, 64)
    (w13, w13_scale), (w2, w2_scale) = quantize_mxfp4(case.w13), quantize_mxfp4(case.w2)
    routing = (case.topk_weights, case.topk_ids)
    with pytest.raises(TensorContractError, match=r"w13 columns: got 48, expected .*32"):
        fused_experts(case.x[:, :48], w13[..., :24], w2[:, :48], *routing, w13_scale=w13_scale, w2_scale=w2_scale)
    with pytest.raises(TensorContractError, match=r"w13_scale .*float32"):
        fused_experts(case.x, w13, w2, *routing, w13_scale=w13_scale.float(), w2_scale=w2_scale)
    with pytest.raises(TensorContractError, match=r"w2_scale dim 2: got 1, expected 2"):
        fused_experts(case.x, w13, w2, *routing, w13_scale=w13_scale, w2_scale=w2_scale[..., :1])


@pytest.mark.parametrize(("row", "pitch"), [(240, 256), (1440, 1536), (720, 768), (704, 704), (192, 192), (48, 48)])
def test_rows_of_codes_begin_on_lines_of_memory_where_that_takes_little_more(row: int, pitch: int) -> None:
    packed = torch.randint(0, 256, (2, 3, row), dtype=torch.uint8, generator=torch.Generator().manual_seed(row))
    held = four_bit_codes.rows_on_lines(packed)
    assert torch.equal(held, packed)
    assert held.stride() == (3 * pitch, pitch, 1)
    assert four_bit_codes.rows_on_lines(held) is held
    assert held.untyped_storage().nbytes() == 2 * 3 * pitch
