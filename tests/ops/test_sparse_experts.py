"""The sparse experts kernel against the dense one on the expanded weights, and against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import sparse_experts
from moe_optimizer.ops.sparse_24 import expand_24, prune_24
from moe_optimizer.ops.sparse_experts import SparseInputs, in_plain_torch, run_sparse
from tests.compiled_kernels import ISAS, needs_kernels
from tests.ops.moe_cases import Case, any_cases, assert_as_exact_as_torch, make_case

pytestmark = needs_kernels


def pruned(case: Case) -> tuple[Case, SparseInputs]:
    """The case with the weights that are left, dense and compressed."""
    w13, w2 = prune_24(case.w13), prune_24(case.w2)
    inputs = SparseInputs(case.x, *w13, *w2, case.topk_weights, case.topk_ids, case.expert_map)
    return replace(case, w13=expand_24(w13), w2=expand_24(w2)), inputs


def on_isa(inputs: SparseInputs, isa: str) -> Tensor:
    out = torch.full_like(inputs.x, float("nan"))
    run_sparse(inputs, out, isa=isa)
    return out


def call(inputs: SparseInputs, **changes: Any) -> Tensor:
    arguments = inputs._replace(**changes)
    return sparse_experts(*arguments[:-1], expert_map=arguments.expert_map)


# H and I: below 32, odd multiples of 16 (the tail of an expansion), beyond one block of 2048 columns.
# Tokens: none, one, several register tiles, several chunks of 128.
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate"),
    [(0, 32, 16), (1, 16, 16), (1, 2064, 48), (5, 80, 144), (33, 64, 2096), (300, 48, 272)],
)
def test_the_result_is_that_of_the_dense_kernel_bit_for_bit(
    isa: str, tokens: int, hidden: int, intermediate: int
) -> None:
    dense, inputs = pruned(make_case(tokens, hidden, intermediate, experts=5, dtype=torch.bfloat16))
    got = on_isa(inputs, isa)
    assert torch.equal(got, dense.on_isa(isa))
    assert_as_exact_as_torch(dense, got)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_cases(dtypes=(torch.bfloat16,)), st.sampled_from(ISAS or ("",)))
def test_any_shape_and_routing_matches_the_reference(case: Case, isa: str) -> None:
    dense, inputs = pruned(case)
    assert_as_exact_as_torch(dense, on_isa(inputs, isa))


@pytest.mark.parametrize("isa", ISAS)
def test_thread_counts_agree_bit_for_bit(isa: str) -> None:
    _, inputs = pruned(make_case(64, 128, 96, dtype=torch.bfloat16))
    first = on_isa(inputs, isa)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(on_isa(inputs, isa), first), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


def test_only_the_experts_of_this_rank_count() -> None:
    case = make_case(20, 64, 48, experts=6, dtype=torch.bfloat16)
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1], dtype=torch.int32)
    local = [1, 3, 4]
    dense, inputs = pruned(replace(case, w13=case.w13[local], w2=case.w2[local], expert_map=expert_map))
    assert_as_exact_as_torch(dense, call(inputs))


# Every mask of a group in every place: a wrong bit order or a shifted value cannot cancel.
@pytest.mark.parametrize("isa", ISAS)
def test_every_pattern_of_a_group_is_expanded_in_place(isa: str) -> None:
    hidden, pairs = 48, [(a, b) for a in range(4) for b in range(a + 1, 4)]
    case = make_case(hidden, hidden, 16, experts=1, top_k=1, dtype=torch.bfloat16)
    w13 = torch.zeros(1, 32, hidden)
    for row in range(16):
        for group in range(hidden // 4):
            first, second = pairs[(row + group) % len(pairs)]
            w13[0, row, 4 * group + first], w13[0, row, 4 * group + second] = row + 1, -(group + 1)
    w13[0, 16:] = w13[0, :16]
    x = torch.eye(hidden).bfloat16()
    dense, inputs = pruned(replace(case, x=x, w13=w13.bfloat16()))
    assert torch.equal(dense.w13.float(), w13)  # nothing was lost by pruning
    assert torch.equal(on_isa(inputs, isa), dense.on_isa(isa))


def test_out_is_written_in_place_and_nothing_beside_it() -> None:
    _, inputs = pruned(make_case(9, 48, 32, dtype=torch.bfloat16))
    guarded = torch.full((11, 80), 7.0, dtype=torch.bfloat16)
    out = guarded[1:10, 16:64]
    assert sparse_experts(*inputs[:-1], out=out) is out
    assert torch.equal(out, call(inputs))
    guarded[1:10, 16:64] = 7.0
    assert (guarded == 7.0).all()


def test_out_may_overlap_the_input() -> None:
    _, inputs = pruned(make_case(2100, 32, 16, dtype=torch.bfloat16))
    memory = torch.zeros(2101, 32).bfloat16()
    memory[:-1] = inputs.x
    out = memory[1:]
    sparse_experts(memory[:-1], *inputs[1:-1], out=out)
    assert torch.equal(out, call(inputs))


@pytest.mark.thorough
def test_the_registered_ops_pass_opcheck() -> None:
    case = make_case(4, 32, 16, dtype=torch.bfloat16)
    _, inputs = pruned(replace(case, expert_map=torch.arange(8, dtype=torch.int32)))
    torch.library.opcheck(torch.ops.moe_optimizer.sparse_experts.default, tuple(inputs))
    arguments = (*inputs, torch.empty_like(inputs.x))
    torch.library.opcheck(torch.ops.moe_optimizer.sparse_experts_out.default, arguments)


def test_beyond_the_kernels_limits_plain_torch_runs() -> None:
    _, inputs = pruned(make_case(2, 16, 16, experts=3, top_k=33, dtype=torch.bfloat16))
    assert torch.equal(call(inputs), in_plain_torch(inputs))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(4, 32)}, "x dtype: .*float32, .*bfloat16"),
        ({"x": torch.ones(4, 24).bfloat16()}, "H: got 24, .* 16"),
        ({"w13_mask": torch.zeros(8, 32, 8, dtype=torch.uint8)}, "w13_mask dim 2: .* 8, .* 4"),
        ({"w2_mask": torch.zeros(8, 32, 2, dtype=torch.int32)}, "w2_mask dtype: .*int32"),
        ({"w2": torch.ones(8, 8, 32).bfloat16().transpose(1, 2)}, "w2 strides"),
        ({"topk_ids": torch.full((4, 2), 8)}, "topk_ids: got expert 8"),
    ],
    ids=["fp32", "ragged", "mask size", "mask dtype", "strides", "expert"],
)
def test_inputs_that_break_the_contract_are_refused(change: dict[str, Tensor], words: str) -> None:
    _, inputs = pruned(make_case(4, 32, 16, dtype=torch.bfloat16))
    with pytest.raises(TensorContractError, match=words):
        call(inputs, **change)
