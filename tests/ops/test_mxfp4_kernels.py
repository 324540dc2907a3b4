"""Every instruction set's kernels on MXFP4 weights against plain torch on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moe_optimizer.ops import why_reference
from moe_optimizer.ops.mxfp4 import E2M1_VALUES
from tests.compiled_kernels import ISAS, needs_kernels
from tests.ops.moe_cases import DTYPES, Case, assert_each_as_exact_as_torch, in_four_bits, make_case, of_one_expert_each

pytestmark = needs_kernels


def assert_every_instruction_set_is_as_exact_as_torch(case: Case) -> None:
    assert_each_as_exact_as_torch(case, {isa: case.on_isa(isa) for isa in ISAS})


# Tokens per expert: below, at and above one register tile (1 to 6 tokens) and one chunk (128). Sizes that leave one,
# two and three groups after the last whole step (64 or 128 columns).
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=of_one_expert_each([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 13, 32, 127, 128, 129], step=32, most=10))
def test_every_instruction_set_is_as_exact_as_torch(dtype: torch.dtype, drawn: Callable[..., Case]) -> None:
    case = in_four_bits(drawn(dtype=dtype))
    assert why_reference(case.x, case.w13, case.w2, case.topk_ids) is None
    assert_every_instruction_set_is_as_exact_as_torch(case)


# K beyond one block of 2048 columns, of the first matrix and of the second.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_beyond_one_block_of_columns_are_as_exact_as_torch(dtype: torch.dtype) -> None:
    for hidden, intermediate in ((4128, 160), (160, 2080)):
        case = in_four_bits(make_case(36, hidden, intermediate, experts=1, top_k=1, dtype=dtype))
        assert_every_instruction_set_is_as_exact_as_torch(case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_result_is_the_same_alone_and_among_many(isa: str, dtype: torch.dtype) -> None:
    case = in_four_bits(make_case(70, 2208, 160, experts=2, top_k=2, dtype=dtype))
    whole = case.on_isa(isa)
    for rows, part in case.parts():
        assert torch.equal(part.on_isa(isa), whole[rows])


# The product of a unit vector is one weight times its scale: a wrong column, code, group or row cannot cancel.
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [3, 224])  # a register tile, and all
def test_every_code_is_read_exactly_at_every_column_with_the_scale_of_its_group(
    isa: str, dtype: torch.dtype, chunk: int
) -> None:
    hidden, width = 224, 32  # of the groups, 3 come after a whole step of 128, 1 after one of 64
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (2 * width, hidden), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 130, (1, 2 * width, hidden // 32), generator=generator, dtype=torch.uint8)
    codes[:width], exponents[:, :width] = 7, 127  # gate: 6 everywhere
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4)[None]
    # The down projection passes channel i on: row i has a 1 at column i.
    identity = torch.zeros(1, hidden, width // 2, dtype=torch.uint8)
    for channel in range(width):
        identity[0, channel, channel // 2] = 2 << 4 * (channel % 2)
    one = torch.full((1, hidden, 1), 127, dtype=torch.uint8)
    x = torch.eye(hidden).to(dtype)
    case = Case(x, packed, identity, torch.ones(hidden, 1), torch.zeros(hidden, 1, dtype=torch.int32))
    case = replace(case, w13_scale=exponents, w2_scale=one)
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    factors = torch.exp2(exponents[0, width:].float() - 127).repeat_interleave(32, -1)
    up = table[codes[width:].long()] * factors
    gate = torch.nn.functional.silu(torch.tensor(6.0)).item()
    want = (gate * up.T).to(torch.float64)
    for begin in range(0, hidden, chunk):
        rows = slice(begin, min(begin + chunk, hidden))
        got = case.of_rows(rows).on_isa(isa)[:, :width].double()
        assert torch.allclose(got, want[rows], rtol=2.0**-7 if dtype == torch.bfloat16 else 2.0**-10, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_that_is_not_a_number_reaches_the_output(isa: str, dtype: torch.dtype) -> None:
    case = in_four_bits(make_case(3, 96, 64, experts=1, top_k=1, dtype=dtype))
    assert case.on_isa(isa).isfinite().all()
    assert case.w13_scale is not None
    case.w13_scale[0, 0, 2] = 255
    assert not case.on_isa(isa).isfinite().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [2, 20])
def test_strided_weights_are_read_in_place_and_nothing_beyond_them_counts(isa: str, tokens: int) -> None:
    case = in_four_bits(make_case(tokens, 96, 96, dtype=torch.bfloat16))
    wide13, wide2 = (torch.full((*w.shape[:2], 80), 0x77, dtype=torch.uint8) for w in (case.w13, case.w2))
    wide13[..., 8:56], wide2[..., 8:56] = case.w13, case.w2
    strided = replace(case, w13=wide13[..., 8:56], w2=wide2[..., 8:56])
    assert torch.equal(strided.on_isa(isa), case.on_isa(isa))


@pytest.mark.thorough
def test_registered_ops_pass_opcheck_with_mxfp4_weights() -> None:
    case = in_four_bits(make_case(5, 64, 32, dtype=torch.bfloat16, biases=True))
    inputs = tuple(replace(case, expert_map=torch.arange(8, dtype=torch.int32)).inputs())
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts.default, inputs)
    arguments = (*inputs, torch.empty_like(case.x))
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts_out.default, arguments)
