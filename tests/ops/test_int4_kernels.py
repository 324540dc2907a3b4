"""Every instruction set's kernels on INT4 weights against plain torch on the same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import fused_experts, reference
from moe_optimizer.ops.four_bit_codes import pack_pairs
from moe_optimizer.ops.int4 import Int4Weight, dequantize_int4
from moe_optimizer.ops.int4_experts import Int4Inputs, run_int4, why_plain_torch
from tests.compiled_kernels import ISAS, needs_kernels
from tests.ops.moe_cases import DTYPES, Case, assert_each_as_exact_as_torch, make_case

pytestmark = needs_kernels


@dataclass(frozen=True)
class Int4Case:
    """A layer in INT4, and the same layer with the weights it means."""

    inputs: Int4Inputs
    dense: Case

    def on_isa(self, isa: str) -> Tensor:
        out = torch.full_like(self.inputs.x, float("nan"))
        run_int4(self.inputs, out, isa=isa)
        return out


def random_weight(like: Tensor, group: int, zero_points: bool, scale_dtype: torch.dtype, seed: int) -> Int4Weight:
    """Any codes and zero points: a distribution of real weights would hardly use the outer ones."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, like.shape, generator=generator)
    shape = (*like.shape[:-1], like.shape[-1] // group)
    scale = ((torch.rand(shape, generator=generator) + 0.5) * 0.2 * like.shape[-1] ** -0.5).to(scale_dtype)
    zero = torch.randint(16, shape, generator=generator).to(torch.uint8) if zero_points else None
    return Int4Weight(pack_pairs(codes), scale, zero)


def in_int4(
    case: Case, group: int, zero_points: bool = False, scale_dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Int4Case:
    w13 = random_weight(case.w13, group, zero_points, scale_dtype, seed)
    w2 = random_weight(case.w2, group, zero_points, scale_dtype, seed + 1)
    routing = (case.topk_weights, case.topk_ids, case.expert_map)
    inputs = Int4Inputs(case.x, *w13, *w2, *routing, case.w13_bias, case.w2_bias, case.activation)
    # In float32, which holds them exactly; `in_torch` rounds them to the dtype of its steps.
    return Int4Case(inputs, replace(case, w13=dequantize_int4(w13), w2=dequantize_int4(w2)))


def assert_every_instruction_set_is_as_exact_as_torch(case: Int4Case) -> None:
    assert why_plain_torch(case.inputs) is None
    assert_each_as_exact_as_torch(case.dense, {isa: case.on_isa(isa) for isa in ISAS})


# Tokens per expert: below, at and above one register tile (1 to 6 tokens) and one chunk (128). Sizes that leave one,
# two and three groups of 32 after the last whole step (64 or 128 columns).
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 64, 128, 129, 257]),
    group=st.sampled_from([32, 64, 128]),
    hidden_groups=st.integers(1, 5),
    intermediate_groups=st.integers(1, 5),
    experts=st.integers(1, 3),
    zero_points=st.booleans(),
    scale_dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    activation=st.sampled_from(["silu", "swigluoai"]),
    biases=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_instruction_set_is_as_exact_as_torch(
    dtype: torch.dtype,
    tokens: int,
    group: int,
    hidden_groups: int,
    intermediate_groups: int,
    experts: int,
    zero_points: bool,
    scale_dtype: torch.dtype,
    activation: str,
    biases: bool,
    seed: int,
) -> None:
    case = make_case(tokens, group * hidden_groups, group * intermediate_groups, experts, 1, dtype, seed, biases)
    case = replace(case, activation=activation)
    assert_every_instruction_set_is_as_exact_as_torch(in_int4(case, group, zero_points, scale_dtype, seed % 1000))


# Few tokens and many of one expert; rows beyond one block of 2048 columns, of the first matrix and of the second.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "intermediate", "group"), [(4128, 160, 32), (128, 2176, 128)])
def test_long_rows_are_as_exact_as_torch(dtype: torch.dtype, hidden: int, intermediate: int, group: int) -> None:
    for tokens in (2, 36):
        case = make_case(tokens, hidden, intermediate, experts=1, top_k=1, dtype=dtype)
        assert_every_instruction_set_is_as_exact_as_torch(in_int4(case, group, zero_points=True))


# The product of a unit vector is one weight: a wrong column, code, zero point, scale or row cannot cancel.
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("chunk", [3, 384])  # a register tile, and all
@pytest.mark.parametrize("zero_points", [False, True])
def test_every_code_is_read_exactly_at_every_column_with_the_terms_of_its_group(
    isa: str, dtype: torch.dtype, group: int, chunk: int, zero_points: bool
) -> None:
    hidden, width = 384 if group == 128 else 224 if group == 32 else 192, 128
    x = torch.eye(hidden).to(dtype)
    routing = torch.ones(hidden, 1), torch.zeros(hidden, 1, dtype=torch.int32)
    w13 = random_weight(torch.empty(1, 2 * width, hidden), group, zero_points, torch.float16, 3)
    # Gate: 2 everywhere.
    w13.codes[:, :width], w13.scale[:, :width] = 0xAA, 1.0
    if w13.zero is not None:
        w13.zero[:, :width] = 8
    # The down projection passes channel i on: row i has a 1 at column i.
    identity = torch.full((1, hidden, width), 8)
    for channel in range(width):
        identity[0, channel, channel] = 9
    w2 = Int4Weight(pack_pairs(identity), torch.ones(1, hidden, width // group, dtype=torch.float16))
    gate = torch.nn.functional.silu(torch.tensor(2.0, dtype=torch.float64))
    want = gate * dequantize_int4(w13, torch.float64)[0, width:].T
    for begin in range(0, hidden, chunk):
        rows = slice(begin, min(begin + chunk, hidden))
        inputs = Int4Inputs(x[rows], *w13, *w2, routing[0][rows], routing[1][rows], None, None, None, "silu")
        got = torch.full_like(x[rows], float("nan"))
        run_int4(inputs, got, isa=isa)
        tolerance = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-21}[dtype]
        assert torch.allclose(got[:, :width].double(), want[rows], rtol=tolerance, atol=1e-7)
        assert got[:, width:].eq(0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_groups_of_the_two_weights_may_differ(isa: str) -> None:
    case = make_case(5, 256, 96, dtype=torch.bfloat16)
    w13 = random_weight(case.w13, 128, True, torch.float16, 1)
    w2 = random_weight(case.w2, 32, False, torch.bfloat16, 2)
    inputs = Int4Inputs(case.x, *w13, *w2, case.topk_weights, case.topk_ids, None, None, None, "silu")
    out = torch.empty_like(case.x)
    run_int4(inputs, out, isa=isa)
    dense = replace(case, w13=dequantize_int4(w13), w2=dequantize_int4(w2))
    assert_each_as_exact_as_torch(dense, {isa: out})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_result_is_the_same_alone_among_many_and_again(isa: str, dtype: torch.dtype) -> None:
    case = in_int4(make_case(70, 2208, 160, experts=2, top_k=2, dtype=dtype), 32, zero_points=True)
    whole, given = case.on_isa(isa), case.inputs
    assert torch.equal(case.on_isa(isa), whole)
    for rows in (slice(0, 1), slice(10, 13), slice(20, 29), slice(40, 70)):
        part = given._replace(x=given.x[rows], topk_ids=given.topk_ids[rows], topk_weights=given.topk_weights[rows])
        assert torch.equal(replace(case, inputs=part).on_isa(isa), whole[rows])


@pytest.mark.parametrize("isa", ISAS)
def test_thread_counts_agree_bit_for_bit(isa: str) -> None:
    case = in_int4(make_case(64, 128, 96, dtype=torch.bfloat16), 32)
    first = case.on_isa(isa)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(case.on_isa(isa), first), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 40])
def test_skipped_slots_and_the_map_of_experts_are_as_in_the_reference(tokens: int) -> None:
    case = make_case(tokens, 64, 96, experts=4, top_k=3, dtype=torch.float32, biases=True)
    ids = torch.randint(-1, 9, case.topk_ids.shape, generator=torch.Generator().manual_seed(2))
    experts = torch.tensor([3, -1, 0, 2, -1, -1, 1, -1, -1], dtype=torch.int32)
    int4 = in_int4(replace(case, topk_ids=ids, expert_map=experts), 32, zero_points=True)
    assert_every_instruction_set_is_as_exact_as_torch(int4)
    nothing = int4.inputs._replace(topk_ids=torch.full_like(ids, -1))
    out = torch.full_like(case.x, float("nan"))
    run_int4(nothing, out)
    assert out.eq(0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_a_scale_that_is_not_a_number_reaches_the_output(isa: str, scale_dtype: torch.dtype) -> None:
    case = in_int4(make_case(3, 96, 64, experts=1, top_k=1), 32, scale_dtype=scale_dtype)
    assert case.on_isa(isa).isfinite().all()
    case.inputs.w13_scale[0, 0, 2] = float("nan")
    assert not case.on_isa(isa).isfinite().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [2, 20])
def test_strided_codes_are_read_in_place_and_nothing_beyond_them_counts(isa: str, tokens: int) -> None:
    case = in_int4(make_case(tokens, 96, 96, dtype=torch.bfloat16), 32)
    wide13, wide2 = (torch.full((*w.shape[:2], 80), 0x77, dtype=torch.uint8) for w in (case.inputs.w13, case.inputs.w2))
    wide13[..., 8:56], wide2[..., 8:56] = case.inputs.w13, case.inputs.w2
    strided = case.inputs._replace(w13=wide13[..., 8:56], w2=wide2[..., 8:56])
    assert torch.equal(replace(case, inputs=strided).on_isa(isa), case.on_isa(isa))


def test_fused_experts_takes_the_weights_as_one_class() -> None:
    case = in_int4(make_case(9, 128, 64, dtype=torch.bfloat16, biases=True), 64, zero_points=True)
    w13, w2 = case.inputs.weights
    routing = (case.inputs.topk_weights, case.inputs.topk_ids)
    biases: dict[str, Any] = {"w13_bias": case.inputs.w13_bias, "w2_bias": case.inputs.w2_bias}
    out = torch.empty_like(case.inputs.x)
    got = fused_experts(case.inputs.x, w13, w2, *routing, **biases)
    assert torch.equal(got, case.on_isa(""))
    assert fused_experts(case.inputs.x, w13, w2, *routing, **biases, out=out) is out
    assert torch.equal(got, out)
    plain = (dequantize_int4(w13), dequantize_int4(w2))
    want = reference.fused_experts(case.inputs.x, *plain, *routing, **biases)
    assert torch.equal(reference.fused_experts(case.inputs.x, w13, w2, *routing, **biases), want)
    with pytest.raises(TensorContractError, match="both Int4Weight"):
        fused_experts(case.inputs.x, w13, plain[1], *routing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w13_scale": torch.ones(8, 192, 3)}, "w13_scale dtype: got"),
        ({"w2_zero": torch.zeros(8, 96, 2, dtype=torch.uint8)}, "w2_zero dim 2: got 2, expected 3"),
        ({"w2_scale": torch.ones(8, 96, 2, dtype=torch.float16)}, "w2_scale dim 2: got 2, expected 3"),
        ({"x": torch.ones(5, 64)}, "w2 dim 1"),
        ({"activation": "gelu"}, "activation: got 'gelu'"),
        ({"topk_ids": torch.full((5, 2), 8)}, "got expert 8"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    inputs = in_int4(make_case(5, 96, 96), 32, zero_points=True).inputs._replace(**changes)
    with pytest.raises(TensorContractError, match=message):
        torch.ops.moe_optimizer.int4_experts(*inputs)


@pytest.mark.thorough
def test_registered_ops_pass_opcheck() -> None:
    case = in_int4(make_case(5, 64, 32, dtype=torch.bfloat16, biases=True), 32, zero_points=True)
    inputs = tuple(case.inputs._replace(expert_map=torch.arange(8, dtype=torch.int32)))
    torch.library.opcheck(torch.ops.moe_optimizer.int4_experts.default, inputs)
    arguments = (*inputs, torch.empty_like(case.inputs.x))
    torch.library.opcheck(torch.ops.moe_optimizer.int4_experts_out.default, arguments)
