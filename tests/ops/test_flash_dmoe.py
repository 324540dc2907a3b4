"""The whole layer: the compiled gate against the plain torch one, and gate plus experts against their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import flash_dmoe, fused_experts
from moe_optimizer.ops.topk_router import topk_router
from tests.compiled_kernels import needs_kernels
from tests.gate_cases import close_calls
from tests.ops.moe_cases import DTYPES, Case, make_case


def random_logits(tokens: int, num_experts: int) -> Tensor:
    return torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(0))


def visible_experts(num_experts: int) -> tuple[Tensor, Tensor]:
    """Experts whose output is 1 in column e and 0 elsewhere (hidden size `num_experts`), for x = 1 in column 0."""
    w13 = torch.zeros(num_experts, 32, num_experts)
    w13[:, 0, 0] = 30.0  # silu(30) = 30
    w13[:, 16, 0] = 1.0 / 30.0
    w2 = torch.zeros(num_experts, num_experts, 16)
    w2[torch.arange(num_experts), torch.arange(num_experts), 0] = 1.0
    return w13, w2


def routed_weights(router_logits: Tensor, **gate: Any) -> Tensor:
    """The weight [T, E] with which the compiled layer uses each expert."""
    tokens, num_experts = router_logits.shape
    w13, w2 = visible_experts(num_experts)
    x = torch.zeros(tokens, num_experts)
    x[:, 0] = 1.0
    return flash_dmoe(x, router_logits, w13, w2, **gate)


def expected_weights(router_logits: Tensor, **gate: Any) -> Tensor:
    weights, ids = topk_router(router_logits, **gate)
    return torch.zeros(router_logits.shape).scatter_add_(1, ids.long(), weights)


@needs_kernels
@settings(max_examples=80, deadline=None)
@given(
    tokens=st.integers(0, 20),
    groups=st.sampled_from([1, 2, 4, 8]),
    group_size=st.sampled_from([4, 8, 16]),
    top_k=st.integers(1, 8),
    kept=st.integers(1, 8),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    biased=st.booleans(),
    factor=st.sampled_from([1.0, 2.5]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_the_gate_is_that_of_the_reference(
    tokens: int,
    groups: int,
    group_size: int,
    top_k: int,
    kept: int,
    scoring: str,
    renormalize: bool,
    biased: bool,
    factor: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    num_experts = max(groups * group_size, 16)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, num_experts, generator=generator).to(dtype)
    kept = min(kept, groups)
    gate = {
        "top_k": min(top_k, kept * (num_experts // groups)),
        "renormalize": renormalize,
        "scoring": scoring,
        "num_expert_group": groups,
        "topk_group": kept,
        "score_bias": torch.randn(num_experts, generator=generator) if biased else None,
        "routed_scaling_factor": factor,
    }
    clear = ~close_calls(logits, topk_router(logits, **gate)[1], **gate)
    got, want = routed_weights(logits, **gate), expected_weights(logits, **gate)
    torch.testing.assert_close(got[clear], want[clear], rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("groups", [1, 4])
def test_the_lower_id_wins_a_tie(groups: int) -> None:
    got = routed_weights(torch.zeros(2, 16), top_k=3, num_expert_group=groups, topk_group=1)
    assert got.nonzero().tolist() == [[t, e] for t in range(2) for e in range(3)]


@needs_kernels
def test_a_nan_logit_reaches_the_output() -> None:
    logits = random_logits(2, 16)
    logits[1, 5] = float("nan")
    got = routed_weights(logits, top_k=2)
    assert not got[0].isnan().any()
    assert got[1].isnan().any()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_the_layer_is_gate_plus_experts_bit_for_bit(dtype: torch.dtype, tokens: int) -> None:
    case = make_case(tokens, 64, 48, experts=16, top_k=4, dtype=dtype)
    logits = random_logits(tokens, 16).to(dtype)
    got = flash_dmoe(case.x, logits, case.w13, case.w2, top_k=4)
    weights, ids = topk_router(logits.float(), top_k=4)
    want = fused_experts(case.x, case.w13, case.w2, weights, ids)
    if dtype == torch.float32:  # the weights may differ in the last place: exp is not torch's
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    else:
        torch.testing.assert_close(got, want)


@needs_kernels
def test_expert_map_leaves_the_experts_of_other_ranks_out() -> None:
    case = make_case(20, 64, 48, experts=8)
    logits = random_logits(20, 8)
    whole = flash_dmoe(case.x, logits, case.w13, case.w2, top_k=3)
    parts = torch.zeros_like(whole)
    for rank in range(2):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[rank * 4 : rank * 4 + 4] = torch.arange(4, dtype=torch.int32)
        local = slice(rank * 4, rank * 4 + 4)
        parts += flash_dmoe(case.x, logits, case.w13[local], case.w2[local], top_k=3, expert_map=expert_map)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


def test_sizes_without_a_kernel_give_the_same_layer_in_torch() -> None:
    case = make_case(6, hidden=20, intermediate=12)
    logits = random_logits(6, 8)
    weights, ids = topk_router(logits, top_k=2)
    want = Case(case.x, case.w13, case.w2, weights, ids).in_torch(torch.float64).float()
    torch.testing.assert_close(flash_dmoe(case.x, logits, case.w13, case.w2, top_k=2), want, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_out_is_written_and_returned() -> None:
    case = make_case(6)
    logits = random_logits(6, 8)
    out = torch.full_like(case.x, float("nan"))
    assert flash_dmoe(case.x, logits, case.w13, case.w2, top_k=2, out=out) is out
    assert torch.equal(out, flash_dmoe(case.x, logits, case.w13, case.w2, top_k=2))


@pytest.mark.thorough
@needs_kernels
def test_registered_ops_pass_opcheck() -> None:
    case = make_case(3)
    experts = (case.w13, case.w2, None, None, None, None, None, "silu")
    gate = (2, torch.zeros(8), True, "sigmoid", 2, 1, 1.5)
    inputs = (case.x, random_logits(3, 8), *experts, *gate)
    torch.library.opcheck(torch.ops.moe_optimizer.flash_dmoe.default, inputs)
    torch.library.opcheck(torch.ops.moe_optimizer.flash_dmoe_out.default, (*inputs, torch.empty_like(case.x)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router_logits": torch.zeros(3, 7)}, r"router_logits dim 1 .* 7, .* 8 .*w13"),
        ({"router_logits": torch.zeros(2, 8)}, r"router_logits dim 0 .* 2, .* 3 .*\(.*x "),
        ({"router_logits": torch.zeros(3, 8).double()}, r"router_logits dtype: .*float64"),
        ({"score_bias": torch.zeros(7)}, r"score_bias dim 0 .* 7, .* 8"),
        ({"top_k": 9}, r"top_k: got 9, .* 8"),
        ({"scoring": "argmax"}, r"scoring: .*'argmax', .*softmax"),
        ({"topk_group": 2}, r"topk_group: got 2, .*num_expert_group"),
        ({"num_expert_group": 2}, r"topk_group: got None, .* 2"),
        ({"num_expert_group": 1, "topk_group": 5}, r"topk_group: got 5, .* 1 "),
        (
            {"num_expert_group": 4, "topk_group": 1, "top_k": 3},
            r"top_k: got 3, .* 1 .* 2 ",
        ),
        ({"num_expert_group": 3, "topk_group": 1}, r"num_expert_group: got 3, .* 8"),
        ({"w2": torch.zeros(8, 64, 47)}, r"flash_dmoe: w13 .* 96, .* 94"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_broken_contract_names_what_got_and_expected(changes: dict[str, object], message: str) -> None:
    case = make_case(3)
    arguments: dict[str, Any] = {
        "x": case.x,
        "router_logits": torch.zeros(3, 8),
        "w13": case.w13,
        "w2": case.w2,
        "top_k": 2,
    } | changes
    with pytest.raises(TensorContractError, match=message):
        flash_dmoe(**arguments)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(8), r"router_logits: dimensions: .*\[8\], .* 2"),
        (torch.zeros(3, 8, dtype=torch.int32), r"router_logits: dtype: .*int32, .*float32"),
    ],
    ids=["rank", "dtype"],
)
def test_the_gate_in_torch_has_the_same_contract(logits: Tensor, message: str) -> None:
    with pytest.raises(TensorContractError, match=message):
        topk_router(logits, top_k=2)


@needs_kernels
def test_the_compiled_graph_holds_the_op_and_gives_the_same() -> None:
    case = make_case(6, dtype=torch.bfloat16)
    logits = random_logits(6, 8).bfloat16()

    def layer(x: Tensor, router_logits: Tensor) -> Tensor:
        return x + flash_dmoe(x * 2, router_logits, case.w13, case.w2, top_k=2)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(case.x, logits), layer(case.x, logits))
