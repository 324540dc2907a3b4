"""The CUDA kernels of INT4 weights on a GPU: right, deterministic, capturable. Timing lives in benchmarks/ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_optimizer.ops import cuda_dispatch, fused_experts
from moe_optimizer.ops.cuda_variants import TILE_TOKENS, DirectVariant, GemmMode, GroupedVariant
from moe_optimizer.ops.int4 import Int4Weight
from moe_optimizer.ops.kernel_arguments import Router
from moe_optimizer.ops.topk_router import topk_router
from tests.gpu.test_cuda_kernels import assert_a_graph_follows_its_inputs, on_gpu, run
from tests.kernel_emulator import Case, assert_close, make_case

pytestmark = pytest.mark.gpu

DIRECT = DirectVariant()
GROUPED = GroupedVariant(GemmMode.INT4_WEIGHTS)
VARIANTS = pytest.mark.parametrize("variant", [DIRECT, GROUPED], ids=str)
ZERO_POINTS = pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero points"])


# 90 and 45 groups along K, as in gpt-oss: scales and zero points start at any place of a word.
@ZERO_POINTS
@pytest.mark.parametrize(
    ("group", "tokens", "hidden", "width"),
    [(32, 1, 2048, 768), (64, 1, 2048, 768), (128, 1, 2048, 768), (32, 7, 288, 224), (32, 64, 2880, 2880),
     (64, 16, 2880, 2880), (128, 64, 4096, 1536), (64, 16, 1088, 192)],
)  # fmt: skip
def test_direct_matches_the_reference_with_the_same_bits_every_time(group, tokens, hidden, width, zero_points):
    case = on_gpu(make_case(tokens, 4, 8, hidden, width, int4=group, zero_points=zero_points))
    first = run(case.problem, DIRECT).clone()
    assert_close(case, first)
    for _ in range(10):
        assert torch.equal(first, run(case.problem, DIRECT))


@ZERO_POINTS
@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.INT4_WEIGHTS])
@pytest.mark.parametrize(
    ("group", "tokens", "hidden", "width"),
    [(32, 5, 2048, 768), (128, 5, 2048, 768), (32, 300, 288, 224), (64, 40, 2880, 576), (128, 700, 1152, 384)],
)
def test_grouped_matches_the_reference(group, tokens, hidden, width, tile, zero_points):
    case = on_gpu(make_case(tokens, 2, 5, hidden, width, int4=group, zero_points=zero_points))
    assert_close(case, run(case.problem, GroupedVariant(GemmMode.INT4_WEIGHTS, tile)))


@VARIANTS
@pytest.mark.parametrize("zero", [0, 7, 8, 15])
def test_every_code_less_its_zero_point_is_exact(variant, zero):
    # Gate 16 (silu is the identity there), up row r the code r % 16, down the identity: out[t, r] = 16 (code - zero).
    size = 128
    problem: Any = on_gpu(make_case(size, 1, 1, size, size, int4=32, zero_points=True)).problem
    problem = replace(
        problem, x=problem.x[:16], topk_weights=problem.topk_weights[:16], topk_ids=problem.topk_ids[:16],
        out=problem.out[:16],
    )  # fmt: skip
    rows = torch.arange(size, device="cuda")
    problem.x.copy_(torch.eye(size, device="cuda")[::8])  # one of each 8 columns, of all groups
    codes = (rows % 16).to(torch.uint8)
    problem.w13[0, :size] = 0x11
    problem.w13[0, size:] = (codes | codes << 4).unsqueeze(1)
    problem.w13_scale.fill_(1)
    problem.w13_scale[0, :size] = 16
    problem.w13_zero[0, :size] = 0
    problem.w13_zero[0, size:] = zero
    problem.w2.zero_()
    problem.w2[0, rows, rows // 2] = torch.where(rows % 2 == 0, 0x01, 0x10).to(torch.uint8)
    problem.w2_scale.fill_(1)
    problem.w2_zero.zero_()
    problem.topk_weights.fill_(1)
    want = 16 * (codes.float() - zero).expand(16, -1)
    assert torch.equal(run(problem, variant).float(), want)


@VARIANTS
def test_a_scale_that_is_no_number_shows_in_its_row_alone(variant):
    problem = on_gpu(make_case(9, 2, 3, 64, 96, int4=32, zero_points=True)).problem
    assert problem.w2_scale is not None
    problem.w2_scale[:, 1::2] = float("nan")
    out = run(problem, variant)
    assert not out[:, 1::2].isfinite().any()
    assert out[:, ::2].isfinite().all()


@VARIANTS
def test_biases_clamped_activation_map_and_skipped_ids(variant):
    ids = torch.randint(-1, 6, (12, 2), generator=torch.Generator().manual_seed(3))
    expert_map = torch.tensor([-1, 1, -1, 0, 2, 3])
    case = on_gpu(
        make_case(12, 2, 4, 288, 160, int4=32, zero_points=True, ids=ids, expert_map=expert_map,
                  activation="swigluoai", bias=True, int64_ids=True)
    )  # fmt: skip
    assert_close(case, run(case.problem, variant))


@pytest.mark.parametrize(("tokens", "variant"), [(4, DIRECT), (64, DIRECT), (64, GROUPED), (2000, GROUPED)], ids=str)
def test_expert_parallel_ranks_add_up_to_the_whole_layer(tokens, variant):
    whole = on_gpu(make_case(tokens, 4, 16, 512, 256, int4=64, zero_points=True))
    problem, total = whole.problem, torch.zeros_like(whole.problem.x, dtype=torch.float32)
    for rank in range(4):
        mine = slice(4 * rank, 4 * rank + 4)
        expert_map = torch.full((16,), -1, dtype=torch.int32, device="cuda")
        expert_map[mine] = torch.arange(4, dtype=torch.int32, device="cuda")
        assert problem.w13_scale is not None
        assert problem.w2_scale is not None
        assert problem.w13_zero is not None
        assert problem.w2_zero is not None
        local = replace(
            problem, w13=problem.w13[mine], w2=problem.w2[mine], w13_scale=problem.w13_scale[mine],
            w2_scale=problem.w2_scale[mine], w13_zero=problem.w13_zero[mine], w2_zero=problem.w2_zero[mine],
            expert_map=expert_map, out=torch.empty_like(problem.x),
        )  # fmt: skip
        out = run(local, variant)
        assert_close(Case(local), out)
        total += out.float()
    assert_close(whole, total)


@VARIANTS
def test_rows_around_the_output_stay_as_they_were(variant):
    case = on_gpu(make_case(9, 2, 4, 288, 160, int4=32))
    guard = torch.full((9 + 2, 288 + 16), 7.0, dtype=torch.bfloat16, device="cuda")
    run(replace(case.problem, out=guard[1:-1, :288]), variant)
    assert_close(case, guard[1:-1, :288])
    guard[1:-1, :288] = 7.0
    assert (guard == 7.0).all()


@ZERO_POINTS
@VARIANTS
def test_a_captured_graph_follows_its_inputs(variant, zero_points):
    case = on_gpu(make_case(8, 4, 16, 512, 256, int4=128, zero_points=zero_points))
    assert_a_graph_follows_its_inputs(case, variant)


@pytest.mark.parametrize("tokens", [3, 200])
def test_from_logits_equals_from_the_ids_that_torch_chooses(tokens):
    case = on_gpu(make_case(tokens, 4, 32, 288, 160, int4=32, zero_points=True))
    logits = torch.randn(tokens, 32, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
    weights, ids = topk_router(logits, top_k=4)
    chosen = Case(replace(case.problem, topk_weights=weights.contiguous(), topk_ids=ids.contiguous()))
    routed = replace(case.problem, router=Router(logits=logits, top_k=4), topk_ids=None, topk_weights=None)
    assert_close(chosen, run(routed, DIRECT if tokens <= 64 else GROUPED))


def test_the_weights_of_a_large_model_are_reached_to_their_end():
    # 256 experts of 7168 x 2048 as in DeepSeek-V3, of which only the last are routed to: offsets beyond 2^31 bytes.
    ids = torch.randint(250, 256, (16, 4), generator=torch.Generator().manual_seed(1))
    experts, hidden, width, group = 256, 7168, 2048, 128
    g = torch.Generator(device="cuda").manual_seed(1)
    small = on_gpu(make_case(16, 4, 6, hidden, width, int4=group, zero_points=True, ids=ids - 250))
    problem = small.problem

    def among_all(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        whole = torch.empty((experts, *tensor.shape[1:]), dtype=tensor.dtype, device="cuda")
        (whole if tensor.dtype == torch.uint8 else whole.view(torch.int16)).random_(0, 16, generator=g)
        whole[250:] = tensor
        return whole

    large = replace(
        problem, w13=among_all(problem.w13), w2=among_all(problem.w2), w13_scale=among_all(problem.w13_scale),
        w2_scale=among_all(problem.w2_scale), w13_zero=among_all(problem.w13_zero),
        w2_zero=among_all(problem.w2_zero), topk_ids=ids.int().cuda(), out=torch.empty_like(problem.out),
    )  # fmt: skip
    for variant in (DIRECT, GROUPED):
        assert torch.equal(run(problem, variant), run(large, variant))


@ZERO_POINTS
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_fused_experts_takes_int4_weights_and_picks_a_kernel(tokens, zero_points, monkeypatch):
    case = on_gpu(make_case(tokens, 2, 8, 2048, 768, int4=128, zero_points=zero_points))
    p: Any = case.problem
    ran = []
    monkeypatch.setattr(cuda_dispatch, "run", lambda *a, _run=cuda_dispatch.run: (ran.append(1), _run(*a))[1])
    w13, w2 = Int4Weight(p.w13, p.w13_scale, p.w13_zero), Int4Weight(p.w2, p.w2_scale, p.w2_zero)
    assert_close(case, fused_experts(p.x, w13, w2, p.topk_weights, p.topk_ids))
    assert ran
    arguments = (p.x, *w13, *w2, p.topk_weights, p.topk_ids, None, None, None, "silu")
    torch.library.opcheck(torch.ops.moe_optimizer.int4_experts.default, arguments)


@VARIANTS
def test_scales_in_fp16_are_refused_by_name(variant):
    problem = on_gpu(make_case(9, 2, 3, 64, 96, int4=32)).problem
    assert problem.w13_scale is not None
    assert problem.w2_scale is not None
    half = replace(problem, w13_scale=problem.w13_scale.half(), w2_scale=problem.w2_scale.half())
    assert "w13_scale torch.float16" in (cuda_dispatch.why_not(half, variant) or "")
    assert cuda_dispatch.why_not(problem, variant) is None
