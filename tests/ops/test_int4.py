"""INT4: the layout, rounding, the choice of scales, and the readers of three checkpoint formats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import four_bit_codes
from moe_optimizer.ops.int4 import Int4Weight, dequantize_int4, quantize_int4
from moe_optimizer.ops.int4_readers import from_awq, from_compressed_tensors, from_gptq

GROUPS = (32, 64, 128)


def integers(*shape: int, seed: int = 0, below: int = 16) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(9)) + 0.1).to(dtype)


def plain(codes: Tensor, zero: Tensor, scale: Tensor, group: int) -> Tensor:
    """What the matrix [N, K] means, element by element, from codes [N, K] and zero and scale [N, K / G]."""
    rows, columns = codes.shape
    want = torch.empty(rows, columns, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            want[n, k] = (int(codes[n, k]) - int(zero[n, k // group])) * scale[n, k // group].double()
    return want


def word(codes: list[int]) -> int:
    """Eight codes as a signed word, the first in the lowest bits."""
    value = sum(code << 4 * place for place, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def words(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """int32 [a, b / 8] of [a, b]: code i of a word is element order[i] of its eight."""
    rows = [[word([row[at + i] for i in order]) for at in range(0, len(row), 8)] for row in codes.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def test_a_packed_byte_has_the_even_column_in_its_low_half_and_8_is_zero() -> None:
    codes = torch.full((1, 16), 0x88, dtype=torch.uint8)
    codes[0, 0] = 0x0F
    weight = Int4Weight(codes, torch.tensor([[0.5]], dtype=torch.bfloat16))
    assert dequantize_int4(weight)[0].tolist() == [3.5, -4.0, *[0.0] * 30]
    zero = torch.tensor([[15]], dtype=torch.uint8)
    assert dequantize_int4(weight._replace(zero=zero))[0, :3].tolist() == [0.0, -7.5, -3.5]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_quantised_weights_lie_within_half_a_scale_or_are_clipped(
    group: int, zero_points: bool, scale_dtype: torch.dtype
) -> None:
    values = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(group)) + zero_points
    weight = quantize_int4(values, group, zero_points=zero_points, scale_dtype=scale_dtype)
    assert weight.codes.shape == (3, 5, 128)
    assert (weight.scale.shape, weight.scale.dtype) == ((3, 5, 256 // group), scale_dtype)
    codes = four_bit_codes.unpack_pairs(weight.codes)
    step = weight.scale.double().repeat_interleave(group, -1)
    far = (dequantize_int4(weight, torch.float64) - values).abs() > step / 2 * (1 + 1e-5)
    assert not bool((far & (codes > 0) & (codes < 15)).any())
    assert (weight.zero is not None) == zero_points


# The sum over the candidates' squared errors, each by the nearest of sixteen numbers.
@pytest.mark.parametrize("group", GROUPS)
def test_no_candidate_has_a_smaller_error(group: int) -> None:
    values = torch.randn(7, 2 * group, generator=torch.Generator().manual_seed(group))
    weight = quantize_int4(values, group)
    groups = values.double().unflatten(-1, (-1, group))
    error = (dequantize_int4(weight, torch.float64).unflatten(-1, (-1, group)) - groups).square().sum(-1)
    largest = values.unflatten(-1, (-1, group)).abs().amax(-1)
    steps = torch.arange(-8, 8, dtype=torch.float64)
    for percent in range(65, 101, 5):
        scale = (largest / 7 * (percent / 100)).bfloat16().double()[..., None]
        nearest = (groups[..., None] - steps * scale[..., None]).abs().amin(-1)
        assert bool((error <= nearest.square().sum(-1) * (1 + 1e-5)).all())


def test_one_large_weight_among_many_is_clipped_where_that_is_better() -> None:
    alone, among = torch.zeros(1, 128), torch.full((1, 128), 0.53)
    alone[0, 0] = among[0, 0] = 7.0
    assert dequantize_int4(quantize_int4(alone, 128))[0, 0] == 7.0
    assert dequantize_int4(quantize_int4(among, 128))[0, 0] < 7.0


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_int4_already_survives_unchanged(group: int) -> None:
    codes = integers(6, 256, below=15) - 7
    codes[:, ::group] = 7  # the range, so that the scale is the one that was
    values = codes * 0.25
    assert torch.equal(dequantize_int4(quantize_int4(values, group)), values)


def test_groups_of_zeros_and_tiny_groups_stay_finite() -> None:
    zeros = quantize_int4(torch.zeros(2, 3, 64), 64)
    assert dequantize_int4(zeros).eq(0).all()
    assert zeros.scale.eq(1).all()
    tiny = torch.full((1, 32), torch.finfo(torch.float32).tiny)
    assert dequantize_int4(quantize_int4(tiny, 32, scale_dtype=torch.float16)).isfinite().all()
    huge = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert dequantize_int4(quantize_int4(huge, 32, zero_points=True)).isfinite().all()


def test_in_chunks_the_bits_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(2, 70, 64, generator=torch.Generator().manual_seed(1))
    whole = quantize_int4(values, 32, zero_points=True)
    monkeypatch.setattr(four_bit_codes, "CHUNK_ELEMENTS", 1)
    for one, other in zip(whole, quantize_int4(values, 32, zero_points=True), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("weight", "group", "message"),
    [
        (torch.ones(4, 32, dtype=torch.int8), 32, "torch.int8"),
        (torch.ones(32), 32, r"\[32\]"),
        (torch.ones(4, 96), 64, r"\[4, 96\].* 64"),
        (torch.ones(4, 96), 48, "group: got 48"),
        (torch.full((2, 3, 32), float("nan")), 32, "expert 0"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight: Tensor, group: int, message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        quantize_int4(weight, group)


def test_scales_and_zero_points_of_another_matrix_are_refused() -> None:
    weight = quantize_int4(torch.ones(4, 64), 32, zero_points=True)
    with pytest.raises(TensorContractError, match="scale dim 1: got 3, expected 2 or 1"):
        dequantize_int4(weight._replace(scale=weight.scale[:, :1].repeat(1, 3)))
    with pytest.raises(TensorContractError, match=r"scale dtype: got torch\.float32"):
        dequantize_int4(weight._replace(scale=weight.scale.float()))
    assert weight.zero is not None
    with pytest.raises(TensorContractError, match="zero dim 1: got 1, expected 2"):
        dequantize_int4(weight._replace(zero=weight.zero[:, :1]))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("less_one", [True, False])
def test_gptq_means_what_its_words_say(group: int, less_one: bool) -> None:
    columns, rows = 256, 24
    codes, scale = integers(rows, columns), scales(columns // group, rows)
    zero = integers(rows, columns // group, seed=1, below=15) + int(less_one)
    stored = words((zero - int(less_one)).T)
    g_idx = torch.arange(columns, dtype=torch.int32) // group
    got = from_gptq(words(codes).T.contiguous(), scale, stored, g_idx, zeros_less_one=less_one)
    assert torch.equal(dequantize_int4(got, torch.float64), plain(codes, zero, scale.T, group))
    assert got.scale.dtype == torch.float16
    assert got.codes.is_contiguous()


def test_gptq_of_a_symmetric_matrix_has_no_zero_points() -> None:
    codes, scale = integers(16, 64), scales(2, 16)
    sevens = torch.full((2, 2), 0x77777777, dtype=torch.int32)
    with_zeros, without = (from_gptq(words(codes).T.contiguous(), scale, zeros) for zeros in (sevens, None))
    assert with_zeros.zero is None
    assert torch.equal(dequantize_int4(with_zeros), dequantize_int4(without))
    assert torch.equal(dequantize_int4(without, torch.float64), plain(codes, torch.full((16, 2), 8), scale.T, 32))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zero_points", [True, False])
def test_awq_means_what_its_words_say(group: int, zero_points: bool) -> None:
    columns, rows = 128, 40
    codes, scale = integers(rows, columns), scales(columns // group, rows)
    zero = integers(rows, columns // group, seed=1) if zero_points else torch.full((rows, columns // group), 8)
    stored = words(zero.T, AWQ_ORDER) if zero_points else None
    got = from_awq(words(codes.T, AWQ_ORDER), scale, stored)
    assert all(tensor is None or tensor.is_contiguous() for tensor in got)
    assert torch.equal(dequantize_int4(got, torch.float64), plain(codes, zero, scale.T, group))
    assert (got.zero is not None) == zero_points


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("zero_points", [True, False])
def test_compressed_tensors_mean_what_its_words_say(group: int, zero_points: bool) -> None:
    columns, rows = 128, 20  # the last word of zero points is not full
    codes, scale = integers(rows, columns), scales(rows, columns // group, dtype=torch.bfloat16)
    zero = integers(rows, columns // group, seed=1) if zero_points else torch.full((rows, columns // group), 8)
    padded = torch.nn.functional.pad(zero.T, (0, 4))
    got = from_compressed_tensors(words(codes), scale, words(padded).T.contiguous() if zero_points else None)
    assert torch.equal(dequantize_int4(got, torch.float64), plain(codes, zero, scale, group))
    assert got.scale.dtype == torch.bfloat16


@pytest.mark.thorough
def test_compressed_tensors_read_as_that_package_unpacks_them() -> None:
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", exc_type=ImportError)
    codes, zero = (integers(20, 128) - 8).to(torch.int8), (integers(20, 2, seed=1) - 8).to(torch.int8)
    scale = scales(20, 2)
    got = from_compressed_tensors(pack.pack_to_int32(codes, 4), scale, pack.pack_to_int32(zero, 4, packed_dim=0))
    wide = (each.double().repeat_interleave(64, -1) for each in (zero, scale))
    assert torch.equal(dequantize_int4(got, torch.float64), (codes.double() - next(wide)) * next(wide))


def test_all_experts_at_once_are_each_expert_alone() -> None:
    codes, zero, scale = integers(3, 16, 64), integers(3, 16, 2, seed=1), scales(3, 2, 16)
    stacked = torch.stack([words(each.T, AWQ_ORDER) for each in codes])
    zeros = torch.stack([words(each.T, AWQ_ORDER) for each in zero])
    together = from_awq(stacked, scale, zeros)
    for expert in range(3):
        alone = dequantize_int4(from_awq(stacked[expert], scale[expert], zeros[expert]))
        assert torch.equal(dequantize_int4(together.expert(expert)), alone)


def test_act_order_is_refused_with_its_reason() -> None:
    codes, scale = words(integers(16, 64)), scales(2, 16)
    order = torch.arange(64).flip(0) // 32
    with pytest.raises(TensorContractError, match="act-order"):
        from_gptq(codes.T.contiguous(), scale, None, order)
    with pytest.raises(TensorContractError, match="act-order"):
        from_compressed_tensors(codes, scale.T.contiguous(), None, order)
    assert from_gptq(codes.T.contiguous(), scale, None, torch.empty(0)).zero is None


def test_a_zero_point_of_16_is_refused() -> None:
    codes, scale = words(integers(16, 64)), scales(2, 16)
    with pytest.raises(TensorContractError, match="zero point 16"):
        from_gptq(codes.T.contiguous(), scale, torch.full((2, 2), -1, dtype=torch.int32))


def test_stored_tensors_of_other_dtypes_and_shapes_are_refused() -> None:
    codes, scale = words(integers(16, 64)), scales(16, 2)
    with pytest.raises(TensorContractError, match="weight_packed: got"):
        from_compressed_tensors(codes.long(), scale)
    with pytest.raises(TensorContractError, match="scale dim 1: got 5, expected 2 or 1"):
        from_compressed_tensors(codes, scale[:, :1].repeat(1, 5))
    with pytest.raises(TensorContractError, match="scales: got shape"):
        from_gptq(codes.T.contiguous(), scale[0])
    with pytest.raises(TensorContractError, match="zero dim 1: got 1, expected 2"):
        from_awq(words(integers(64, 16)), scale.T.contiguous(), words(integers(1, 16)))
