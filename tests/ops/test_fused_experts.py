"""The compiled experts against plain torch: error, permutations, guard rows, determinism, contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import fused_experts, why_reference
from tests.compiled_kernels import AVAILABLE, needs_kernels
from tests.ops.moe_cases import DTYPES, Case, allowed_error, any_cases, assert_as_exact_as_torch, make_case, quantized


# Sizes: no token; one; fewer and more than a tile of tokens; H and I not multiples of 32 or 128.
@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 33])
@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 16), (80, 48), (272, 144)])
def test_error_is_at_most_twice_torch_in_the_same_dtype(
    dtype: torch.dtype, tokens: int, hidden: int, intermediate: int
) -> None:
    case = make_case(tokens, hidden, intermediate, dtype=dtype)
    got = case.kernel()
    assert got.shape == case.x.shape
    assert got.dtype == dtype
    assert_as_exact_as_torch(case, got)


@needs_kernels
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_cases(activations=("silu", "swigluoai"), biases=(False, True)))
def test_any_shape_and_routing_matches_the_reference(case: Case) -> None:
    assert_as_exact_as_torch(case, case.kernel())


@needs_kernels
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (1024, 32), (3, 32)])
def test_the_limits_of_experts_and_top_k_are_covered(experts: int, top_k: int) -> None:
    case = make_case(5, 32, 16, experts, top_k)
    assert why_reference(case.x, case.w13, case.w2, case.topk_ids) is None
    assert_as_exact_as_torch(case, case.kernel())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_tokens_on_one_expert(dtype: torch.dtype) -> None:
    case = make_case(700, 64, 1024, dtype=dtype)
    case = replace(case, topk_ids=torch.full_like(case.topk_ids, 3))
    assert_as_exact_as_torch(case, case.kernel())


# Distinct rows through identities: a wrong permutation of tokens, slots or rows cannot cancel.
@needs_kernels
def test_identity_weights_return_the_tokens_own_rows() -> None:
    size, experts = 64, 4
    eye = torch.eye(size)
    tokens = 37
    x = torch.arange(tokens * size, dtype=torch.float32).reshape(tokens, size) / 256 + 20  # silu(v) == v up there
    ids = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) * 3 + 1) % experts], 1)
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    ones = torch.zeros(size, size)
    ones[:, 0] = 1 / x[0, 0]
    x[:, 0] = x[0, 0]  # up = 1 for every row
    w13 = torch.cat([eye, ones]).expand(experts, -1, -1).contiguous()
    w2 = (factors[:, None, None] * eye).contiguous()
    weights = torch.stack([torch.full((tokens,), 0.5), torch.full((tokens,), 0.25)], 1)
    got = fused_experts(x, w13, w2, weights, ids)
    want = x * (weights * factors[ids]).sum(1, keepdim=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permuting_the_tokens_permutes_the_output_bit_for_bit(dtype: torch.dtype) -> None:
    case = make_case(50, 96, 80, dtype=dtype)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    permuted = replace(case, x=case.x[order], topk_ids=case.topk_ids[order], topk_weights=case.topk_weights[order])
    assert torch.equal(permuted.kernel(), case.kernel()[order])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_result_does_not_depend_on_the_rest_of_the_batch(dtype: torch.dtype) -> None:
    case = make_case(45, 160, 112, dtype=dtype)
    whole = case.kernel()
    for token in (0, 7, 44):
        rows = slice(token, token + 1)
        alone = replace(case, x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows])
        assert torch.equal(alone.kernel()[0], whole[token])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runs_and_thread_counts_agree_bit_for_bit(dtype: torch.dtype) -> None:
    case = make_case(64, 128, 96, dtype=dtype)
    first = case.kernel()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(case.kernel(), first), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_written_outside_the_output_rows(dtype: torch.dtype) -> None:
    case = make_case(9, 48, 32, dtype=dtype)
    guarded = torch.full((11, 80), 7.0, dtype=dtype)
    out = guarded[1:10, 16:64]
    assert case.kernel(out=out) is out
    assert torch.equal(out, case.kernel())
    inside = torch.zeros_like(guarded, dtype=torch.bool)
    inside[1:10, 16:64] = True
    assert (guarded[~inside] == 7.0).all()


@needs_kernels
def test_the_output_may_be_the_input() -> None:
    case = make_case(30, dtype=torch.bfloat16)
    want = case.kernel()
    x = case.x.clone()
    fused_experts(x, case.w13, case.w2, case.topk_weights, case.topk_ids, out=x)
    assert torch.equal(x, want)


# More than one pass of 2048 tokens: the first writes where the second has yet to read.
@needs_kernels
def test_the_output_may_overlap_the_input() -> None:
    case = make_case(2100, 32, 16, experts=4)
    memory = torch.zeros(2101, 32)
    memory[:-1] = case.x
    out = memory[1:]
    replace(case, x=memory[:-1]).kernel(out=out)
    assert torch.equal(out, case.kernel())


@needs_kernels
def test_strided_activations_and_weights_are_read_in_place() -> None:
    case = make_case(6, 64, 32)
    wide_x = torch.zeros(6, 100)
    wide_x[:, 4:68] = case.x
    wide_w13 = torch.zeros(8, 64, 80)
    wide_w13[:, :, 8:72] = case.w13
    got = replace(case, x=wide_x[:, 4:68], w13=wide_w13[:, :, 8:72]).kernel()
    assert torch.equal(got, case.kernel())


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_expert_parallel_ranks_sum_to_the_whole(dtype: torch.dtype, ranks: int) -> None:
    case = make_case(40, 64, 48, experts=9, top_k=3, dtype=dtype)
    owner = torch.arange(9) * ranks // 9
    parts = torch.zeros(40, 64, dtype=torch.float64)
    for rank in range(ranks):
        local = torch.nonzero(owner == rank).flatten()
        expert_map = torch.full((9,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(len(local), dtype=torch.int32)
        part = replace(case, w13=case.w13[local], w2=case.w2[local], expert_map=expert_map)
        got = part.kernel()
        assert_as_exact_as_torch(part, got)
        parts += got.double()
    want = case.in_torch(torch.float64)
    assert (parts - want).abs().max().item() <= allowed_error(case, want)


@needs_kernels
def test_a_token_without_a_valid_slot_is_zero() -> None:
    case = make_case(3)
    poisoned = torch.full_like(case.x, float("nan"))
    case.kernel(out=poisoned)
    replace(case, topk_ids=torch.full_like(case.topk_ids, -1)).kernel(out=poisoned)
    assert torch.equal(poisoned, torch.zeros_like(poisoned))


@pytest.mark.thorough
@needs_kernels
def test_registered_ops_pass_opcheck() -> None:
    case = make_case(5, dtype=torch.bfloat16)
    inputs = tuple(case.inputs())
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts.default, inputs)
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts_out.default, (*inputs, torch.empty_like(case.x)))


# The schema test is left out: it compares inputs before and after with an operation that torch lacks for E4M3.
@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("scales", ["block", "channel"])
def test_registered_ops_pass_opcheck_with_fp8_weights(scales: str) -> None:
    case = quantized(make_case(5, dtype=torch.bfloat16, biases=True), scales)
    inputs = tuple(replace(case, expert_map=torch.arange(8, dtype=torch.int32)).inputs())
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts.default, inputs, test_utils=tests)
    arguments = (*inputs, torch.empty_like(case.x))
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts_out.default, arguments, test_utils=tests)


def test_sizes_without_a_kernel_run_in_torch_and_say_why() -> None:
    case = make_case(4, hidden=24, intermediate=20)
    reason = why_reference(case.x, case.w13, case.w2, case.topk_ids)
    assert reason is not None
    if AVAILABLE:
        assert "H=24" in reason
    torch.testing.assert_close(case.kernel().double(), case.in_torch(torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"hidden": 0, "intermediate": 16}, "H=0, I=16"),
        ({"hidden": 16, "intermediate": 0}, "H=16, I=0"),
        ({"hidden": 16, "intermediate": 16, "experts": 1025}, "experts, got 1025"),
        ({"hidden": 16, "intermediate": 16, "top_k": 33}, "per token, got 33"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes_outside_the_limits_run_in_torch_and_say_why(sizes: dict[str, int], reason: str) -> None:
    hidden, width = sizes["hidden"], sizes["intermediate"]
    case = make_case(3, 16, 16, sizes.get("experts", 8), sizes.get("top_k", 2))
    case = replace(case, x=case.x[:, :hidden], w13=case.w13[:, : 2 * width, :hidden], w2=case.w2[:, :hidden, :width])
    if AVAILABLE:
        assert (why_reference(case.x, case.w13, case.w2, case.topk_ids) or "").endswith(reason)
    torch.testing.assert_close(case.kernel().double(), case.in_torch(torch.float64), rtol=1e-5, atol=1e-5)


def _wrong(case: Case) -> dict[str, tuple[Case, str]]:
    return {
        "w2 H": (replace(case, w2=case.w2[:, :-1]), r"w2 dim 1 .* 63, .* 64 .*x "),
        "w13 2I": (replace(case, w13=case.w13[:, :-2]), r"w13 dim 1 .* 94, .* 96"),
        "w13 E": (replace(case, w13=case.w13[:-1]), r"w13 dim 0 .* 7, .* 8"),
        "rank": (replace(case, x=case.x[0]), r"x dimensions: got \[64\], expected 2"),
        "dtype": (replace(case, w2=case.w2.double()), r"w2 dtype: .*float64, .*float32"),
        "ids": (replace(case, topk_ids=case.topk_ids.to(torch.int16)), r"topk_ids dtype: got torch.int16"),
        "T": (replace(case, topk_ids=case.topk_ids[:-1]), r"topk_ids dim 0 .* 2, .* 3"),
        "weights": (replace(case, topk_weights=case.topk_weights.half()), r"topk_weights dtype: got torch.float16"),
        "stride": (replace(case, x=case.x.T.contiguous().T), r"x stride .* 3, .* 1"),
        "overlap": (replace(case, w2=case.w2[:1].expand(8, -1, -1)), r"w2 stride of dim 0: .* 0,"),
        "activation": (replace(case, activation="relu"), r"activation: .*'relu', .*silu"),
        "device": (replace(case, w2=case.w2.to("meta")), r"w2 device: .*meta, .*cpu"),
        "empty map": (
            replace(case, expert_map=torch.zeros(0, dtype=torch.int32)),
            r"expert_map dim 0 .* 0, .* 1",
        ),
        "id": (replace(case, topk_ids=torch.full_like(case.topk_ids, 8)), r"expert 8.*below 8"),
        "map": (
            replace(case, expert_map=torch.full((8,), 8, dtype=torch.int32)),
            r"expert_map: .*expert 8.*below 8",
        ),
    }


@needs_kernels
@pytest.mark.parametrize("name", list(_wrong(make_case(3))))
def test_a_broken_contract_names_tensor_dimension_got_and_expected(name: str) -> None:
    case, message = _wrong(make_case(3))[name]
    with pytest.raises(TensorContractError, match=message):
        case.kernel()


# More tokens than one pass of 2048: the passes join without a seam.
@needs_kernels
def test_many_tokens_are_computed_in_passes() -> None:
    case = make_case(4500, 32, 16, experts=4)
    whole = case.kernel()
    for rows in (slice(0, 2048), slice(2040, 2060), slice(4096, 4500)):
        part = replace(case, x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows])
        assert torch.equal(part.kernel(), whole[rows])


@needs_kernels
def test_a_wrong_id_in_the_last_pass_leaves_the_output_alone() -> None:
    case = make_case(4500, 32, 16, experts=4)
    ids = case.topk_ids.clone()
    ids[4321, 1] = 4
    out = torch.full_like(case.x, 7.0)
    with pytest.raises(TensorContractError, match=r"expert 4.*token 4321,.*1,"):
        replace(case, topk_ids=ids).kernel(out=out)
    assert (out == 7.0).all()
