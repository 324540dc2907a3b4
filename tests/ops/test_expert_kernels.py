"""Every instruction set's kernels, and FP8 weights, against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import fused_experts
from tests.compiled_kernels import ISAS, needs_kernels
from tests.ops.moe_cases import DTYPES, Case, assert_each_as_exact_as_torch, make_case, of_one_expert_each, quantized

pytestmark = needs_kernels

SCALES = ("block", "channel")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Arithmetic only: threads are tested in test_fused_experts, and waiting for each other costs more than work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_every_instruction_set_is_as_exact_as_torch(case: Case) -> None:
    # Together: the reference takes longer than the kernels.
    assert_each_as_exact_as_torch(case, {isa: case.on_isa(isa) for isa in ISAS})


# Tokens per expert: below, at and above one register tile (1 to 6 tokens), what eight rows are for (10) and one
# chunk (128).
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["same", *SCALES])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(drawn=of_one_expert_each([1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 13, 32, 127, 128, 129], step=16, most=20))
def test_every_instruction_set_is_as_exact_as_torch(
    dtype: torch.dtype, weights: str, drawn: Callable[..., Case]
) -> None:
    case = drawn(dtype=dtype)
    if weights != "same":
        case = quantized(case, weights)
    assert_every_instruction_set_is_as_exact_as_torch(case)


# K beyond one block of 2048 columns, of the first matrix and of the second: partial sums are put away and taken up
# again. The other size is small, which saves nine tenths of the time.
@pytest.mark.parametrize("weights", ["same", "block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_beyond_one_block_of_columns_are_as_exact_as_torch(weights: str, dtype: torch.dtype) -> None:
    for hidden, intermediate in ((4112, 144), (144, 2064)):
        case = make_case(36, hidden, intermediate, experts=1, top_k=1, dtype=dtype)
        if weights != "same":
            case = quantized(case, weights)
        assert_every_instruction_set_is_as_exact_as_torch(case)


# With these sizes a task has 256 rows: two blocks, which the rows that are multiplied together come from.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_each_row_of_a_task_has_the_scales_of_its_own_block(dtype: torch.dtype, tokens: int) -> None:
    case = make_case(tokens, 2048, 256, experts=8, top_k=8, dtype=dtype)
    every_expert = torch.arange(8, dtype=torch.int32).expand(tokens, -1).contiguous()
    case = quantized(replace(case, topk_ids=every_expert), "block")
    assert case.w13_scale is not None
    assert case.w2_scale is not None
    case.w13_scale[:, 1::2] *= 3
    case.w2_scale[:, 1::2] *= 5
    assert_every_instruction_set_is_as_exact_as_torch(case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["same", *SCALES])
def test_a_tokens_result_is_the_same_alone_and_among_many(isa: str, dtype: torch.dtype, weights: str) -> None:
    case = make_case(70, 2208, 176, experts=2, top_k=2, dtype=dtype)
    if weights != "same":
        case = quantized(case, weights)
    whole = case.on_isa(isa)
    for rows, part in case.parts():
        assert torch.equal(part.on_isa(isa), whole[rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [3, 40])  # converted on the fly, converted before
def test_every_fp8_code_is_read_exactly(isa: str, dtype: torch.dtype, tokens: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    columns = torch.cat([finite, finite[:2]])  # 256 codes, one per column
    hidden = 256
    w13 = torch.zeros(1, 32, hidden).to(torch.float8_e4m3fn)
    w13[0, :16] = columns  # gate reads code t where x is the unit vector t
    w13[0, 16:] = columns
    w2 = torch.zeros(1, hidden, 16).to(torch.float8_e4m3fn)
    w2[0, :, 0] = torch.tensor(1.0).to(torch.float8_e4m3fn)
    ones13, ones2 = torch.ones(1, 32), torch.ones(1, hidden)
    for first in range(0, hidden, tokens):
        x = torch.eye(hidden, dtype=dtype)[first : first + tokens]
        ids = torch.zeros(x.shape[0], 1, dtype=torch.int32)
        case = replace(
            make_case(1, hidden, 16, 1, 1, dtype),
            **{"x": x, "w13": w13, "w2": w2, "w13_scale": ones13, "w2_scale": ones2},
            **{"topk_ids": ids, "topk_weights": torch.ones(x.shape[0], 1)},
        )
        value = columns.float()[first : first + tokens]
        want = (torch.nn.functional.silu(value) * value).to(dtype).float()
        got = case.on_isa(isa)[:, 0].float()
        torch.testing.assert_close(got, want, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_an_fp8_nan_is_not_read_as_a_number(isa: str, dtype: torch.dtype, tokens: int, code: int) -> None:
    case = quantized(make_case(tokens, 64, 32, 1, 1, dtype), "block")
    w2 = case.w2.clone()
    w2.view(torch.uint8)[0, 5, 7] = code
    got = replace(case, w2=w2).on_isa(isa)
    assert got[:, 5].isnan().all()
    assert not got[:, :5].isnan().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_the_activation_is_exact_over_its_whole_range(isa: str, activation: str) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-1e-3, 1e-3, 99)])
    x = torch.zeros(len(gate), 16)
    x[:, 0], x[:, 1] = gate, 1.0
    w13 = torch.zeros(1, 32, 16)
    w13[0, 0, 0] = 1.0  # the first gate row
    w13[0, 1 if activation == "swigluoai" else 16, 1] = 1.0  # the first up row
    w2 = torch.zeros(1, 16, 16)
    w2[0, 0, 0] = 1.0
    ids = torch.zeros(len(gate), 1, dtype=torch.int32)
    case = replace(make_case(1, 16, 16, 1, 1), x=x, w13=w13, w2=w2, topk_ids=ids, topk_weights=torch.ones(len(gate), 1))
    case = replace(case, activation=activation)
    want = case.in_torch(torch.float64)[:, 0]
    # The exponent 1.702 * 120 is itself rounded to FP32, hence the second bound. Where the sigmoid leaves the range
    # of normal FP32, an absolute error of 1e-35 is left.
    rtol = 1e-5 if activation == "swigluoai" else 1e-6
    torch.testing.assert_close(case.on_isa(isa)[:, 0].double(), want, rtol=rtol, atol=1e-35)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(TensorContractError, match=r"instruction set: .*sse9"):
        make_case(1).on_isa("sse9")


def test_fp8_weights_need_both_scales() -> None:
    case = quantized(make_case(2), "block")
    with pytest.raises(TensorContractError, match=r"w2_scale presence: .*None,"):
        replace(case, w2_scale=None).kernel()


def test_scales_of_the_wrong_shape_are_refused() -> None:
    case = quantized(make_case(2, hidden=144), "block")
    assert case.w13_scale is not None
    with pytest.raises(TensorContractError, match=r"w13_scale dim 2:.* 1,.* 2"):
        replace(case, w13_scale=case.w13_scale[..., :1]).kernel()


def test_plain_weights_take_no_scales() -> None:
    case = make_case(2)
    with pytest.raises(TensorContractError, match=r"w13_scale presence:.*,.* None"):
        fused_experts(case.x, case.w13, case.w2, case.topk_weights, case.topk_ids, w13_scale=torch.ones(8, 96))


# A broken weight or token must show, not become a plausible number.
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("row", [0, 1])  # swigluoai: a row of the gate, and of up
def test_a_nan_reaches_the_output(isa: str, dtype: torch.dtype, activation: str, row: int) -> None:
    case = replace(make_case(3, 48, 32, experts=1, top_k=1, dtype=dtype), activation=activation)
    assert not case.on_isa(isa).isnan().any()
    w13 = case.w13.clone()
    w13[0, row, 5] = float("nan")
    assert replace(case, w13=w13).on_isa(isa).isnan().all()
