"""The CUDA kernels on a GPU: right, deterministic, capturable. Timing lives in benchmarks/ops."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops import _load, cuda_dispatch, flash_dmoe, fused_experts, why_reference
from moe_optimizer.ops.cuda_variants import (
    PAIRED_TILES,
    TILE_TOKENS,
    DirectVariant,
    GemmMode,
    GroupedVariant,
    Variant,
)
from moe_optimizer.ops.kernel_arguments import CudaProblem, Router
from moe_optimizer.ops.measured_variant import measured_variant
from moe_optimizer.ops.topk_router import topk_router
from moe_optimizer.specs.kernel_speeds import rounds_activations
from tests.kernel_emulator import Case, assert_close, make_case

pytestmark = pytest.mark.gpu

FP8_TOKENS_BOUND = 0.06
DIRECT = DirectVariant()
BF16 = GroupedVariant(GemmMode.BF16)
FP8_WEIGHTS = GroupedVariant(GemmMode.FP8_WEIGHTS)
MXFP4_WEIGHTS = GroupedVariant(GemmMode.MXFP4_WEIGHTS)
MXFP4 = GroupedVariant(GemmMode.MXFP4)


def on_gpu(case: Case) -> Case:
    """The same inputs on the GPU."""
    moved: dict[str, Any] = {}
    for item in fields(CudaProblem):
        value = getattr(case.problem, item.name)
        moved[item.name] = value.cuda() if isinstance(value, Tensor) else value
    return Case(CudaProblem(**moved))


def run(problem: CudaProblem, variant: Variant) -> Tensor:
    """Output poisoned before, errors of the launch surface here."""
    problem.out.fill_(float("nan"))
    cuda_dispatch.run(problem, variant)
    torch.cuda.synchronize()
    return problem.out


def ids_and_weights(problem: CudaProblem) -> tuple[Tensor, Tensor]:
    """The given weights and ids, in the order of the ops."""
    assert problem.topk_weights is not None
    assert problem.topk_ids is not None
    return problem.topk_weights, problem.topk_ids


@pytest.mark.parametrize("fp8", [None, "block", "channel"])
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(1, 2048, 768), (7, 272, 208), (64, 1200, 560)])
def test_direct_matches_the_reference_with_the_same_bits_every_time(tokens, hidden, width, fp8):
    case = on_gpu(make_case(tokens, 4, 16, hidden, width, fp8=fp8))
    first = run(case.problem, DIRECT).clone()
    assert_close(case, first)
    for _ in range(10):
        assert torch.equal(first, run(case.problem, DIRECT))


@pytest.mark.parametrize("hidden", [2048, 1200])
def test_direct_in_wide_steps_matches_the_reference_with_the_same_bits_every_time(hidden):
    # 768 tiles of one token.
    case = on_gpu(make_case(1, 8, 16, hidden, 768))
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    assert _load.kernels().cuda_layout(*case.problem.call(DIRECT, blocks), 0)["launch"]["up_wide"]
    first = run(case.problem, DIRECT).clone()
    assert_close(case, first)
    for _ in range(10):
        assert torch.equal(first, run(case.problem, DIRECT))


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 32), (4, 8), (8, 4), (8, 3)])
@pytest.mark.parametrize("experts", [1, 3, 40])
def test_direct_with_few_pairs_any_of_them_skipped_or_repeated(tokens, top_k, experts):
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    case = on_gpu(make_case(tokens, top_k, experts, 272, 144, ids=ids))
    assert_close(case, run(case.problem, DIRECT))


@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.BF16])
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(5, 2048, 768), (130, 272, 208), (700, 512, 144)])
def test_grouped_bf16_matches_the_reference(tokens, hidden, width, tile):
    case = on_gpu(make_case(tokens, 2, 5, hidden, width))
    assert_close(case, run(case.problem, GroupedVariant(GemmMode.BF16, tile)))


@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.FP8_WEIGHTS])
@pytest.mark.parametrize("fp8", ["block", "channel"])
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(5, 2048, 768), (300, 272, 208)])
def test_grouped_fp8_weights_match_the_reference(tokens, hidden, width, fp8, tile):
    case = on_gpu(make_case(tokens, 2, 5, hidden, width, fp8=fp8))
    assert_close(case, run(case.problem, GroupedVariant(GemmMode.FP8_WEIGHTS, tile)))


# 90 groups along K, as in gpt-oss: exponents start at any even byte.
@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(1, 2048, 768), (7, 288, 224), (64, 2880, 2880), (16, 1056, 96)]
)
def test_direct_mxfp4_matches_the_reference_with_the_same_bits_every_time(tokens, hidden, width):
    case = on_gpu(make_case(tokens, 4, 8, hidden, width, mxfp4=True))
    first = run(case.problem, DIRECT).clone()
    assert_close(case, first)
    for _ in range(10):
        assert torch.equal(first, run(case.problem, DIRECT))


@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.MXFP4_WEIGHTS])
@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(5, 2048, 768), (300, 288, 224), (40, 2880, 480), (700, 1056, 96)]
)
def test_grouped_mxfp4_weights_match_the_reference(tokens, hidden, width, tile):
    case = on_gpu(make_case(tokens, 2, 5, hidden, width, mxfp4=True))
    assert_close(case, run(case.problem, GroupedVariant(GemmMode.MXFP4_WEIGHTS, tile)))


@pytest.mark.parametrize("exponent", [0, 94, 127, 150, 160])
@pytest.mark.parametrize("variant", [DIRECT, MXFP4_WEIGHTS], ids=str)
def test_mxfp4_weights_are_exact_over_the_range_of_their_scales(variant, exponent):
    # Every code, of subnormal BF16 too. Another scale of all weights of w2 changes every output by a power of two.
    case = on_gpu(make_case(9, 2, 3, 288, 96, mxfp4=True))
    problem = case.problem
    assert problem.w2_scale is not None
    problem.w2_scale.fill_(120)
    want = run(problem, variant).clone()
    assert_close(case, want)
    problem.w2_scale.fill_(exponent)
    got = run(problem, variant).float()
    if exponent > 0:
        assert torch.equal(
            got, torch.ldexp(want.float(), torch.tensor(exponent - 120, device="cuda")).bfloat16().float()
        )
    else:  # weights below 2^-94 lose bits
        assert got.abs().max() < 2.0**-94


@pytest.mark.parametrize("exponent", [161, 254, 255])
@pytest.mark.parametrize("variant", [DIRECT, MXFP4_WEIGHTS], ids=str)
def test_scales_beyond_bf16_and_no_number_show_in_their_row_alone(variant, exponent):
    problem = on_gpu(make_case(9, 2, 3, 64, 96, mxfp4=True)).problem
    assert problem.w2_scale is not None
    problem.w2_scale[:, 1::2] = exponent
    out = run(problem, variant)
    assert not out[:, 1::2].isfinite().any()
    assert out[:, ::2].isfinite().all()


@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.FP8])
@pytest.mark.parametrize("fp8", ["block", "channel"])
def test_grouped_fp8_tokens_stay_within_their_rounding(fp8, tile):
    case = on_gpu(make_case(300, 2, 5, 272, 208, fp8=fp8))
    want = case.reference().float()
    out = run(case.problem, GroupedVariant(GemmMode.FP8, tile)).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.MXFP4])
@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(5, 2048, 768), (300, 288, 224), (40, 2880, 480), (700, 1056, 96)]
)
def test_grouped_mxfp4_in_e4m3_stays_within_the_rounding_of_the_tokens(tokens, hidden, width, tile):
    case = on_gpu(make_case(tokens, 2, 5, hidden, width, mxfp4=True))
    want = case.reference().float()
    out = run(case.problem, GroupedVariant(GemmMode.MXFP4, tile)).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


def test_mxfp4_in_e4m3_with_biases_the_clamped_activation_and_a_map():
    ids = torch.randint(-1, 6, (120, 2), generator=torch.Generator().manual_seed(3))
    case = on_gpu(
        make_case(120, 2, 4, 288, 160, mxfp4=True, ids=ids, expert_map=torch.tensor([-1, 1, -1, 0, 2, 3]),
                  activation="swigluoai", bias=True, int64_ids=True)
    )  # fmt: skip
    want = case.reference().float()
    assert (run(case.problem, MXFP4).float() - want).norm() <= FP8_TOKENS_BOUND * want.norm()


@pytest.mark.parametrize("exponent", [100, 120, 140])
def test_mxfp4_weights_are_exact_in_e4m3_wherever_their_scales_lie(exponent):
    # Another scale of all weights of w2 changes every output by a power of two.
    problem = on_gpu(make_case(90, 2, 3, 288, 96, mxfp4=True)).problem
    assert problem.w2_scale is not None
    problem.w2_scale.fill_(125)
    problem.w2_scale[..., ::2] = 112
    want = run(problem, MXFP4).clone().float()
    problem.w2_scale.add_(exponent - 125)
    expected = torch.ldexp(want, torch.tensor(exponent - 125, device="cuda")).bfloat16().float()
    assert torch.equal(run(problem, MXFP4).float(), expected)


@pytest.mark.parametrize(
    "variant",
    [GroupedVariant(mode, tile, paired=True) for mode, tiles in PAIRED_TILES.items() for tile in tiles],
    ids=str,
)
@pytest.mark.parametrize("routing", ["even", "one expert", "one token each", "nothing"])
def test_paired_blocks_give_the_bits_of_single_ones_every_time(variant, routing):
    tokens, experts = (9, 12) if routing == "one token each" else (1500, 4)
    ids = {
        "even": None,
        "one expert": torch.full((tokens, 2), 2),
        "one token each": torch.arange(9).unsqueeze(1).expand(-1, 2),
        "nothing": torch.full((tokens, 2), -1),
    }[routing]
    fp8 = "block" if variant.mode == GemmMode.FP8 else None
    problem = on_gpu(make_case(tokens, 2, experts, 1200, 272, ids=ids, fp8=fp8)).problem
    want = run(problem, replace(variant, paired=False)).clone()
    assert not want.isnan().any()
    for _ in range(10):
        assert torch.equal(want, run(problem, variant))


@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_biases_clamped_activation_map_and_skipped_ids(grouped, mxfp4):
    variant = DIRECT if not grouped else MXFP4_WEIGHTS if mxfp4 else BF16
    ids = torch.randint(-1, 6, (12, 2), generator=torch.Generator().manual_seed(3))
    expert_map = torch.tensor([-1, 1, -1, 0, 2, 3])
    case = on_gpu(
        make_case(12, 2, 4, 288, 160, mxfp4=mxfp4, ids=ids, expert_map=expert_map, activation="swigluoai",
                  bias=True, int64_ids=True)
    )  # fmt: skip
    assert_close(case, run(case.problem, variant))


@pytest.mark.parametrize("variant", [DIRECT, BF16], ids=str)
def test_all_tokens_on_one_expert_and_duplicate_ids(variant):
    case = on_gpu(make_case(16, 3, 4, 272, 144, ids=torch.full((16, 3), 2)))
    assert_close(case, run(case.problem, variant))


@pytest.mark.parametrize("variant", [DIRECT, BF16], ids=str)
def test_nothing_routed_here_gives_zeros(variant):
    case = on_gpu(make_case(5, 2, 4, 272, 144, ids=torch.full((5, 2), -1)))
    assert not run(case.problem, variant).any()


@pytest.mark.parametrize("variant", [DIRECT, BF16], ids=str)
def test_rows_around_the_output_stay_as_they_were(variant):
    case = on_gpu(make_case(9, 2, 4, 272, 144))
    guard = torch.full((9 + 2, 272 + 16), 7.0, dtype=torch.bfloat16, device="cuda")
    run(replace(case.problem, out=guard[1:-1, :272]), variant)
    assert_close(case, guard[1:-1, :272])
    guard[1:-1, :272] = 7.0
    assert (guard == 7.0).all()


@pytest.mark.parametrize(
    "variant", [DIRECT, BF16, FP8_WEIGHTS, GroupedVariant(GemmMode.FP8), MXFP4_WEIGHTS, MXFP4], ids=str
)
def test_the_same_input_gives_the_same_bits(variant):
    fp8 = None if variant in (DIRECT, BF16, MXFP4_WEIGHTS, MXFP4) else "block"
    case = on_gpu(make_case(16, 4, 16, 2048, 768, fp8=fp8, mxfp4=variant in (MXFP4_WEIGHTS, MXFP4)))
    first = run(case.problem, variant).clone()
    for _ in range(20):
        assert torch.equal(first, run(case.problem, variant))


def assert_a_graph_follows_its_inputs(case: Case, variant: Variant) -> None:
    problem = case.problem
    run(problem, variant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda_dispatch.run(problem, variant)
    for seed in range(3):
        g = torch.Generator(device="cuda").manual_seed(seed)
        problem.x.copy_(torch.randn(problem.x.shape, device="cuda", generator=g))
        assert problem.topk_ids is not None
        problem.topk_ids.copy_(torch.rand(8, 16, device="cuda", generator=g).topk(4).indices)
        problem.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(case, problem.out)


@pytest.mark.parametrize(
    ("variant", "mxfp4"),
    [(DIRECT, False), (BF16, False), (GroupedVariant(GemmMode.BF16, 160, paired=True), False), (DIRECT, True),
     (MXFP4_WEIGHTS, True)], ids=str,
)  # fmt: skip
def test_a_captured_graph_follows_its_inputs(variant, mxfp4):
    assert_a_graph_follows_its_inputs(on_gpu(make_case(8, 4, 16, 512, 256, mxfp4=mxfp4)), variant)


def test_a_kernel_that_overlaps_the_one_before_waits_for_what_it_wrote():
    # Layer after layer on one stream, each reading the last one's output: 40 chained calls against 40 separate ones.
    case = on_gpu(make_case(8, 4, 16, 512, 512))
    problems = [replace(case.problem, out=torch.empty_like(case.problem.x)) for _ in range(2)]
    for variant in (DIRECT, BF16):
        outs = []
        for apart in (False, True):
            x = case.problem.x.clone()
            for layer in range(40):
                problem = replace(problems[layer % 2], x=x)
                cuda_dispatch.run(problem, variant)
                if apart:
                    torch.cuda.synchronize()
                x = problem.out
            torch.cuda.synchronize()
            outs.append(x.clone())
        assert torch.equal(*outs)


def test_two_streams_do_not_disturb_each_other():
    cases = [on_gpu(make_case(200, 2, 8, 512, 256, seed=s)) for s in (1, 2)]
    streams = [torch.cuda.Stream() for _ in cases]
    cuda_dispatch.prepare_device(cases[0].problem.x.device)
    torch.cuda.synchronize()
    for _ in range(10):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                cuda_dispatch.run(case.problem, BF16)
    torch.cuda.synchronize()
    for case in cases:
        assert_close(case, case.problem.out)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("tokens", [3, 200])
def test_from_logits_equals_from_the_ids_that_torch_chooses(tokens, scoring):
    case = on_gpu(make_case(tokens, 4, 32, 272, 144))
    logits = torch.randn(tokens, 32, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    weights, ids = topk_router(logits, top_k=4, scoring=scoring)
    chosen = Case(replace(case.problem, topk_weights=weights.contiguous(), topk_ids=ids.contiguous()))
    routed = replace(
        case.problem, router=Router(logits=logits, top_k=4, scoring=scoring), topk_ids=None, topk_weights=None
    )
    assert_close(chosen, run(routed, DIRECT if tokens <= 64 else BF16))


@pytest.mark.parametrize("tokens", [4, 100])
def test_the_registered_ops_pass_opcheck_and_run_the_kernels(tokens, monkeypatch):
    case = on_gpu(make_case(tokens, 2, 8, 272, 144))
    p = case.problem
    ran = []
    monkeypatch.setattr(cuda_dispatch, "run", lambda *a, _run=cuda_dispatch.run: (ran.append(1), _run(*a))[1])
    arguments = (p.x, p.w13, p.w2, p.topk_weights, p.topk_ids, None, None, None, None, None, "silu")
    assert why_reference(p.x, p.w13, p.w2, ids_and_weights(p)[1]) is None
    assert_close(case, fused_experts(p.x, p.w13, p.w2, *ids_and_weights(p)))
    assert ran
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts.default, arguments)
    out = torch.empty_like(p.x)
    torch.library.opcheck(torch.ops.moe_optimizer.fused_experts_out.default, (*arguments, out))


# Qwen3-30B-A3B's layer, of which the package ships measured speeds for some GPUs.
@pytest.mark.parametrize("fp8", [None, "block"])
@pytest.mark.parametrize("tokens", [1, 32, 300])
def test_the_default_kernel_of_a_measured_layer_keeps_the_activations(tokens, fp8):
    case = on_gpu(make_case(tokens, 8, 128, 2048, 768, fp8=fp8))
    p = case.problem
    variant = measured_variant(p)
    assert variant is None or not rounds_activations(str(variant))
    out = fused_experts(p.x, p.w13, p.w2, *ids_and_weights(p), w13_scale=p.w13_scale, w2_scale=p.w2_scale)
    assert_close(case, out)
    if variant is not None:
        assert torch.equal(out, run(p, variant))


def test_the_output_may_be_the_input():
    case = on_gpu(make_case(4, 2, 8, 272, 144))
    p = case.problem
    want = Case(replace(p, x=p.x.clone()))
    fused_experts(p.x, p.w13, p.w2, *ids_and_weights(p), out=p.x)
    assert_close(want, p.x)


def test_flash_dmoe_runs_under_torch_compile():
    case = on_gpu(make_case(4, 2, 8, 272, 144))
    p = case.problem
    logits = torch.randn(4, 8, device="cuda")
    eager = flash_dmoe(p.x, logits, p.w13, p.w2, top_k=2)
    compiled = torch.compile(lambda: flash_dmoe(p.x, logits, p.w13, p.w2, top_k=2), fullgraph=True)()
    assert torch.equal(eager, compiled)
