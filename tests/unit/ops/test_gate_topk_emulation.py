"""The gate product and top-k of few tokens, the CUDA source run thread by thread on the CPU, against torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.ops.gate_topk import MAX_TOKENS
from moe_optimizer.ops.kernel_arguments import GateTopk
from tests.gate_cases import RULES, assert_gated, assert_routed, make_gate_case, poisoned, results


def run(emulator: ModuleType, call: GateTopk, seed: int = 1) -> GateTopk:
    words = torch.zeros(call.x.shape[0] * call.gate.shape[0], dtype=torch.int32)
    emulator.cuda_gate_run(*call.call(words.data_ptr()), seed)
    assert not words.any(), "the next call finds them as this one did"
    return call


# Lanes without a piece of the row; several steps along H; more tokens than blocks.
@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"),
    [(1, 128, 2048), (1, 8, 8), (2, 60, 264), (3, 33, 1032), (4, 6, 4104), (7, 24, 72), (8, 20, 512), (8, 3, 264)],
)  # fmt: skip
def test_matches_the_reference_whoever_runs_first(gate_emulator: ModuleType, tokens, experts, hidden):
    call = make_gate_case(tokens, experts, hidden, top_k=min(4, experts))
    assert_gated(run(gate_emulator, call))
    first = results(call)
    run(gate_emulator, poisoned(call), seed=7)
    assert all(torch.equal(one, two) for one, two in zip(first, results(call), strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_chooses_what_torch_chooses(gate_emulator: ModuleType, rule):
    experts, options = RULES[rule]
    assert_gated(run(gate_emulator, make_gate_case(1 if experts > 200 else 3, experts, 136, **options)))


def test_rows_of_x_and_of_the_gate_may_lie_apart(gate_emulator: ModuleType):
    assert_gated(run(gate_emulator, make_gate_case(6, 20, 80, padding=24, top_k=5)))


@pytest.mark.parametrize("rule", ["qwen3", "deepseek-v3"])
def test_padding_goes_to_no_expert(gate_emulator: ModuleType, rule):
    experts, options = RULES[rule]
    call = make_gate_case(5, experts, 64, **options)
    run(gate_emulator, call)
    _, ids, weights = results(call)
    padding = torch.arange(5) % 4 > 1
    run(gate_emulator, poisoned(call)._replace(is_padding=padding))
    assert torch.equal(call.topk_ids, ids.masked_fill(padding[:, None], -1))
    assert torch.equal(call.topk_weights, weights.masked_fill(padding[:, None], 0))


def test_equal_logits_go_to_the_lowest_ids(gate_emulator: ModuleType):
    call = make_gate_case(2, 128, 64, top_k=5)
    call.gate.copy_(call.gate[:1].expand(128, -1))
    run(gate_emulator, call)
    assert call.topk_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    torch.testing.assert_close(call.topk_weights, torch.full((2, 5), 0.2))


def test_infinite_and_zero_logits_are_chosen_as_torch_chooses(gate_emulator: ModuleType):
    call = make_gate_case(1, 8, 8, top_k=8)
    call.x.fill_(1)
    call.gate.zero_()
    call.gate[:, 0] = torch.tensor([0.0, float("-inf"), -1.0, 2.0, -0.0, 1e-3, -1e-3, 2.0])
    assert_routed(run(gate_emulator, call))
    assert call.topk_ids[0].tolist() == [3, 7, 5, 0, 4, 6, 2, 1]


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_token_that_is_no_number_shows_in_its_weights_alone(gate_emulator: ModuleType, renormalize):
    call = make_gate_case(3, 128, 64, top_k=4, renormalize=renormalize)
    call.x[1] = float("nan")
    run(gate_emulator, call)
    assert call.topk_weights[1].isnan().all()
    assert call.topk_weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 0}, "T: got 0, expected at least 1"),
        ({"num_tokens": MAX_TOKENS + 1}, f"T: got {MAX_TOKENS + 1}, expected at most {MAX_TOKENS}"),
        ({"hidden_size": 12}, "H: got 12, expected a multiple of 8"),
        ({"x_stride": 20}, "elements between tokens: got 20, expected a multiple of 8"),
        ({"gate_stride": 20}, "elements between experts: got 20, expected a multiple of 8"),
        ({"gate": 24}, "address of the gate: got 24, expected a multiple of 16"),
        ({"num_experts": 1025}, "E: got 1025, expected at most 1024"),
        ({"top_k": 33}, "k: got 33, expected at most 32"),
        ({"num_experts": 3}, "k: got 4, expected at most 3"),
    ],
    ids=str,
)
def test_what_no_kernel_covers_is_refused_by_name_and_number(gate_emulator: ModuleType, change, message):
    fields, router = make_gate_case(2, 64, 64, top_k=4).call()
    with pytest.raises(ValueError, match=message):
        gate_emulator.cuda_gate_layout(fields | change, router)


@pytest.mark.parametrize("change", [{"num_groups": 33}, {"num_groups": 5}, {"topk_groups": 9}, {"topk_groups": 0}])
def test_groups_that_do_not_divide_the_experts_are_refused(gate_emulator: ModuleType, change):
    call = make_gate_case(2, 64, 64, top_k=4, num_expert_group=8, topk_group=4)
    fields, router = call.call()
    gate_emulator.cuda_gate_layout(fields, router)
    with pytest.raises(ValueError, match=r"groups|E: got 64"):
        gate_emulator.cuda_gate_layout(fields, router | change)


def test_a_block_has_an_expert_and_a_warp_a_token(gate_emulator: ModuleType):
    found = gate_emulator.cuda_gate_layout(*make_gate_case(3, 61, 64, top_k=1).call())
    assert (found["blocks"], found["threads"]) == (61, 96)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, MAX_TOKENS),
    experts=st.integers(1, 100),
    hidden=st.integers(1, 80),
    renormalize=st.booleans(),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    bias=st.booleans(),
    seed=st.integers(1, 10**6),
    data=st.data(),
)
def test_any_covered_call_matches_the_reference(
    gate_emulator: ModuleType, tokens, experts, hidden, renormalize, scoring, bias, seed, data
):
    options: dict[str, Any] = {"renormalize": renormalize, "scoring": scoring, "bias": bias}
    options["top_k"] = data.draw(st.integers(1, min(32, experts)))
    call = make_gate_case(tokens, experts, 8 * hidden, seed=seed, **options)
    assert_routed(run(gate_emulator, call, seed=seed))
    assert call.router.logits.isfinite().all()
