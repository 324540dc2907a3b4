"""The gate product and top-k in one launch on a GPU: right, deterministic, capturable, chained with the experts.

Timing lives in benchmarks/ops/bench_cuda_gate.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops import cuda_dispatch, gate_topk, reference
from moe_optimizer.ops.cuda_variants import DirectVariant, GemmMode, GroupedVariant
from moe_optimizer.ops.gate_topk import MAX_TOKENS, run_kernel, why_no_kernel
from moe_optimizer.ops.kernel_arguments import CudaProblem, GateTopk
from tests.gate_cases import RULES, assert_gated, assert_routed, make_gate_case, poisoned, results
from tests.gpu.test_cuda_kernels import on_gpu
from tests.kernel_emulator import Case, assert_close, make_case

pytestmark = pytest.mark.gpu


def case(tokens: int, experts: int, hidden: int, **options: Any) -> GateTopk:
    return make_gate_case(tokens, experts, hidden, device="cuda", **options)


def run(call: GateTopk) -> GateTopk:
    """Errors of the launch surface here."""
    assert why_no_kernel(call) is None
    run_kernel(call)
    torch.cuda.synchronize()
    return call


def same(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden"),
    [(1, 128, 2048), (2, 128, 2048), (8, 128, 2048), (1, 8, 8), (3, 61, 264), (5, 64, 1032), (7, 256, 7168),
     (8, 512, 2048), (8, 160, 5120), (6, 1024, 520), (8, 3, 520), (4, 32, 2880)],
)  # fmt: skip
def test_matches_the_reference_with_the_same_bits_every_time(tokens, experts, hidden):
    call = case(tokens, experts, hidden, top_k=min(8, experts))
    assert_gated(run(call))
    first = results(call)
    for _ in range(10):
        assert same(first, results(run(poisoned(call))))


@pytest.mark.parametrize("tokens", range(1, MAX_TOKENS + 1))
def test_every_number_of_tokens_matches_the_reference(tokens):
    assert_gated(run(case(tokens, 128, 2048, top_k=8, seed=tokens)))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_chooses_what_torch_chooses(rule):
    experts, options = RULES[rule]
    for seed in range(1, 9):
        assert_gated(run(case(5, experts, 1024, seed=seed, **options)))


@pytest.mark.parametrize("tokens", [1, 8])
def test_logits_and_experts_are_those_of_torch_and_vllm_up_to_ties(tokens):
    ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM for its top-k")
    differing = total = 0
    for seed in range(40):
        call = run(case(tokens, 128, 2048, top_k=8, seed=seed + 1))
        theirs = torch.nn.functional.linear(call.x, call.gate)
        ours = call.router.logits
        differing += int((ours != theirs).sum())
        total += ours.numel()
        # Their top-k of our logits: the experts differ only where two logits are equal.
        weights, ids = torch.empty_like(call.topk_weights), torch.empty_like(call.topk_ids)
        ops.topk_softmax(weights, ids, torch.empty_like(ids), ours, True)
        assert torch.equal(ours.gather(1, ids.long()), ours.gather(1, call.topk_ids.long()))
        torch.testing.assert_close(weights, call.topk_weights, rtol=1e-4, atol=1e-6)
    assert differing <= 0.02 * total


def test_rows_of_x_and_of_the_gate_may_lie_apart():
    assert_gated(run(case(6, 128, 2048, padding=24, top_k=8)))


def test_what_lies_around_the_outputs_stays_as_it_was():
    call = case(3, 61, 264, top_k=5)
    guarded = []
    for tensor in results(call):
        whole = torch.full((tensor.numel() + 64,), 7, dtype=tensor.dtype, device="cuda")
        guarded.append((whole, whole[32:-32].view(tensor.shape)))
    logits, ids, weights = (inner for _, inner in guarded)
    call = call._replace(router=call.router._replace(logits=logits), topk_ids=ids, topk_weights=weights)
    assert_gated(run(call))
    for whole, inner in guarded:
        inner.fill_(7)
        assert (whole == 7).all()


@pytest.mark.parametrize("tokens", [5, 8])
def test_padding_goes_to_no_expert(tokens):
    call = case(tokens, 128, 2048, top_k=8)
    run(call)
    _, ids, weights = results(call)
    padding = torch.arange(tokens, device="cuda") >= 3
    run(poisoned(call)._replace(is_padding=padding))
    assert torch.equal(call.topk_ids, ids.masked_fill(padding[:, None], -1))
    assert torch.equal(call.topk_weights, weights.masked_fill(padding[:, None], 0))


def test_equal_logits_go_to_the_lowest_ids():
    call = case(2, 128, 64, top_k=5)
    call.gate.copy_(call.gate[:1].clone().expand(128, -1))
    run(call)
    assert call.topk_ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_infinite_and_zero_logits_are_chosen_as_torch_chooses():
    call = case(1, 8, 8, top_k=8)
    call.x.fill_(1)
    call.gate.zero_()
    call.gate[:, 0] = torch.tensor([0.0, float("-inf"), -1.0, 2.0, -0.0, 1e-3, -1e-3, 2.0], device="cuda")
    assert_routed(run(call))


@pytest.mark.parametrize("tokens", [0, 1, MAX_TOKENS, MAX_TOKENS + 1])
def test_the_op_takes_any_number_of_tokens(tokens):
    call = case(tokens, 128, 256, top_k=8)
    logits = torch.empty_like(call.router.logits)
    weights, ids = gate_topk(call.x, call.gate, top_k=8, logits=logits)
    if tokens:
        assert_gated(
            call._replace(router=call.router._replace(logits=logits), topk_weights=weights, topk_ids=ids)
        )  # fmt: skip
    assert ids.shape == (tokens, 8)


def test_the_registered_op_passes_torchs_checks():
    call = case(4, 128, 256, top_k=8)
    rule = (8, None, True, "softmax", None, None, 1.0, None)
    written = (call.router.logits, call.topk_weights, call.topk_ids)
    torch.library.opcheck(torch.ops.moe_optimizer.gate_topk_out.default, (call.x, call.gate, *rule, *written))


def test_what_no_kernel_covers_is_refused_with_the_reason():
    call = case(2, 128, 256, top_k=8)
    assert "multiple of 8" in (why_no_kernel(call._replace(x=call.x[:, :252], gate=call.gate[:, :252])) or "")
    assert "float32" in (why_no_kernel(call._replace(x=call.x.float(), gate=call.gate.float())) or "")
    assert "at most 8" in (why_no_kernel(case(9, 128, 256, top_k=8)) or "")


def layers(count: int, tokens: int) -> list[tuple[GateTopk, CudaProblem]]:
    """Layers that read one x each: a gate of 128 experts, and experts that take its ids and weights."""
    made = []
    for seed in range(1, count + 1):
        call = case(tokens, 128, 512, top_k=8, seed=seed)
        problem = on_gpu(make_case(tokens, 8, 128, 512, 64, seed=seed)).problem
        made.append((call, replace(problem, x=call.x, topk_ids=call.topk_ids, topk_weights=call.topk_weights)))
    return made


DIRECT, GROUPED = DirectVariant(), GroupedVariant(GemmMode.BF16)


@pytest.mark.parametrize("variant", [DIRECT, GROUPED], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_the_experts_follow_at_once_with_its_ids_and_weights(tokens, variant):
    for call, problem in layers(3, tokens):
        run_kernel(poisoned(call))
        cuda_dispatch.run(problem, variant)
        torch.cuda.synchronize()
        assert_gated(call)
        assert_close(Case(problem), problem.out)


@pytest.mark.parametrize("variant", [DIRECT, GROUPED], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_a_captured_graph_of_many_layers_follows_its_inputs(tokens, variant):
    # Each layer's x is made by the launch before its gate, as a norm makes it; every launch overlaps its neighbours.
    made = layers(6, tokens)
    sources = [torch.randn_like(call.x) for call, _ in made]

    def forward() -> None:
        for (call, problem), source in zip(made, sources, strict=True):
            torch.mul(source, 0.5, out=call.x)
            run_kernel(call)
            cuda_dispatch.run(problem, variant)

    cuda_dispatch.prepare_device(torch.device("cuda", 0))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        forward()
    for _ in range(20):
        for source in sources:
            source.normal_()
        for call, problem in made:
            poisoned(call)
            problem.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        found = [(*results(call), problem.out.clone()) for call, problem in made]
        for (call, _), source in zip(made, sources, strict=True):
            assert torch.equal(call.x, source * 0.5)
            assert_gated(call)
        for index, (call, problem) in enumerate(made):  # one after the other, nothing overlapping
            torch.cuda.synchronize()
            run_kernel(call)
            torch.cuda.synchronize()
            cuda_dispatch.run(problem, variant)
            torch.cuda.synchronize()
            assert same(found[index], (*results(call), problem.out))


def test_a_gate_that_the_launch_before_writes_is_read_after_it():
    call = case(4, 128, 2048, top_k=8)
    for seed in range(30):
        fresh = torch.randn(128, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()
        torch.cuda.synchronize()
        call.gate.copy_(fresh)
        run_kernel(call)
        torch.cuda.synchronize()
        bound = (call.router.logits.float() - reference.gate_logits(call.x, fresh).float()).abs()
        assert (bound <= 2.0**-7 * call.router.logits.float().abs() + 1e-3).all()
