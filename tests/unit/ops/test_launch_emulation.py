"""The CUDA kernels' source, run thread by thread on the CPU (tests/unit/ops/emulation), against plain torch.

What this shows: indices, masks, barriers, arrival counts, fragment layouts as this package understands them, no read
past a tensor's end (an unreadable page lies there), no use of memory nobody wrote (it holds NaN), no dependence on
the order of blocks and warps (it is random). What it cannot show: that the hardware's instructions mean what the
emulation says, races inside a warp's memory accesses, and speed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.ops.cuda_variants import PAIRED_TILES, TILE_TOKENS, DirectVariant, GemmMode
from moe_optimizer.ops.four_bit_codes import rows_on_lines
from moe_optimizer.ops.mxfp4 import E2M1_VALUES
from tests.kernel_emulator import Case, Emulator, assert_close, make_case, with_poisoned_output

# E4M3 tokens have 4 significant bits: a relative error of up to 2**-4 per element, about 2.6e-2 on average, twice.
FP8_TOKENS_BOUND = 0.06


# Sizes: one token; K not a multiple of a step (272 = 4.25 x 64); I and H no multiple of a block; slots of one expert;
# one matrix wide at a time.
@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(1, 64, 32), (3, 272, 48), (40, 144, 80), (2, 1040, 48), (2, 80, 528)], ids=str
)
@pytest.mark.parametrize("fp8", [None, "block", "channel"])
def test_direct_matches_the_reference_whoever_runs_first(emulator: Emulator, tokens, hidden, width, fp8):
    case = make_case(tokens, 2, 4, hidden, width, fp8=fp8)
    one = emulator.direct(case.problem, blocks=1).clone()
    assert_close(case, one)
    assert torch.equal(one, emulator.direct(with_poisoned_output(case), seed=7))


@pytest.mark.parametrize("hidden", [64, 272, 1040, 2064])
def test_direct_in_wide_steps_matches_the_reference(emulator: Emulator, hidden):
    # 12 tiles on 2 multiprocessors: 1.5 rounds in narrow steps. K ends inside a step, and leaves warps without one.
    case = make_case(1, 2, 4, hidden, 48)
    assert emulator.layout(case.problem, DirectVariant(), 2)["launch"]["up_wide"]
    assert_close(case, emulator.direct(case.problem, blocks=2))


def test_direct_with_as_many_tokens_and_pairs_as_its_tables_hold(emulator: Emulator):
    case = make_case(64, 8, 9, 32, 32)
    assert_close(case, emulator.direct(case.problem))


@pytest.mark.parametrize("tokens", [5, 9])
def test_direct_with_more_experts_than_threads(emulator: Emulator, tokens):
    # 5: few enough pairs for one warp to make the work list; 9: the whole block makes it.
    case = make_case(tokens, 4, 700, 32, 16)
    assert_close(case, emulator.direct(case.problem))


def test_direct_with_biases_a_map_and_the_clamped_activation(emulator: Emulator):
    ids = torch.tensor([[0, -1], [5, 3], [-1, -1], [4, 4]])
    expert_map = torch.tensor([-1, 1, -1, 0, 2, 3])
    case = make_case(
        4, 2, 4, 144, 48, ids=ids, expert_map=expert_map, activation="swigluoai", bias=True, int64_ids=True
    )
    out = emulator.direct(case.problem)
    assert_close(case, out)
    assert not out[0].any()
    assert not out[2].any()


def test_direct_writes_zeros_when_nothing_is_routed_here(emulator: Emulator):
    case = make_case(3, 2, 4, 80, 48, ids=torch.full((3, 2), -1))
    assert not emulator.direct(case.problem).any()


def test_direct_with_tokens_that_name_an_expert_several_times(emulator: Emulator):
    # A slot holds a token once: 3 slots of one expert, then (token 8 names it once more than the rest) a fourth.
    ids = torch.full((9, 4), 2)
    ids[:8, 3] = 1
    case = make_case(9, 4, 4, 80, 48, ids=ids)
    assert_close(case, emulator.direct(case.problem))


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 32), (4, 8), (8, 4), (8, 3)])
@pytest.mark.parametrize("experts", [1, 3, 40])
def test_direct_with_few_pairs_any_of_them_skipped_or_repeated(emulator: Emulator, tokens, top_k, experts):
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    case = make_case(tokens, top_k, experts, 32, 16, ids=ids)
    assert_close(case, emulator.direct(case.problem))


@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.BF16])
def test_grouped_bf16_matches_the_reference(emulator: Emulator, tile):
    # More tokens per expert than a tile, so that an expert has several; K and rows end inside a box.
    case = make_case(tile + 12, 2, 3, 144, 80)
    assert_close(case, emulator.grouped(case.problem, GemmMode.BF16, tile_tokens=tile, blocks=2))


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("fp8", ["block", "channel"])
def test_grouped_fp8_weights_match_the_reference(emulator: Emulator, tile, fp8):
    case = make_case(24, 2, 3, 208, 144, fp8=fp8)
    assert_close(case, emulator.grouped(case.problem, GemmMode.FP8_WEIGHTS, tile_tokens=tile))


# Sizes: one group along K; parts of 128 and of 256; exponents of a row that start at any of four bytes (33 groups);
# one matrix wide at a time.
@pytest.mark.parametrize(
    ("tokens", "hidden", "width"), [(1, 64, 32), (3, 288, 96), (40, 160, 128), (2, 1056, 96), (2, 96, 544)], ids=str
)
def test_direct_mxfp4_matches_the_reference_whoever_runs_first(emulator: Emulator, tokens, hidden, width):
    case = make_case(tokens, 2, 4, hidden, width, mxfp4=True)
    one = emulator.direct(case.problem, blocks=1).clone()
    assert_close(case, one)
    assert torch.equal(one, emulator.direct(with_poisoned_output(case), seed=7))


@pytest.mark.parametrize(("hidden", "width"), [(32, 32), (288, 160), (512, 96), (96, 1056)], ids=str)
@pytest.mark.parametrize("tile", [16, 64])
def test_grouped_mxfp4_weights_match_the_reference(emulator: Emulator, tile, hidden, width):
    case = make_case(24, 2, 3, hidden, width, mxfp4=True)
    assert_close(case, emulator.grouped(case.problem, GemmMode.MXFP4_WEIGHTS, tile_tokens=tile))


@pytest.mark.parametrize("count", [1, 64, 65, 96, 97, 112, 113, 128])
def test_grouped_mxfp4_tiles_of_any_fill_match_the_reference(emulator: Emulator, count):
    # Each of the widths that a tile can be multiplied in.
    case = make_case(count, 1, 1, 96, 64, mxfp4=True)
    assert_close(case, emulator.grouped(case.problem, GemmMode.MXFP4_WEIGHTS, tile_tokens=128, blocks=1))


def test_grouped_mxfp4_with_the_smallest_rings_ends(emulator: Emulator):
    case = make_case(20, 2, 3, 544, 288, mxfp4=True)
    full = emulator.grouped(case.problem, GemmMode.MXFP4_WEIGHTS, tile_tokens=16).clone()
    for stages in (1, 2):
        small = emulator.grouped(
            with_poisoned_output(case), GemmMode.MXFP4_WEIGHTS, tile_tokens=16, num_stages=stages, seed=stages
        )
        assert torch.equal(full, small)


# Sizes: one group along K; half a stage and more; exponents of a row that start at any of four bytes (33 groups).
@pytest.mark.parametrize(("hidden", "width"), [(32, 32), (288, 160), (512, 96), (96, 1056)], ids=str)
@pytest.mark.parametrize("tile", [64, 128])
def test_grouped_mxfp4_in_e4m3_stays_within_the_rounding_of_the_tokens(emulator: Emulator, tile, hidden, width):
    case = make_case(70, 2, 3, hidden, width, mxfp4=True)
    want = case.reference().float()
    out = emulator.grouped(case.problem, GemmMode.MXFP4, tile_tokens=tile).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


@pytest.mark.parametrize(
    ("tile", "count"), [(64, 1), (64, 33), (96, 48), (96, 49), (128, 64), (128, 65), (128, 97), (128, 113), (128, 128)]
)
def test_grouped_mxfp4_in_e4m3_is_right_in_tiles_of_any_fill(emulator: Emulator, tile, count):
    # Each of the widths that a tile can be multiplied in; three groups of 128 along K, both ways.
    case = make_case(count, 1, 1, 288, 288, mxfp4=True)
    want = case.reference().float()
    out = emulator.grouped(case.problem, GemmMode.MXFP4, tile_tokens=tile, blocks=1).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


def test_grouped_mxfp4_in_e4m3_with_the_smallest_ring_ends(emulator: Emulator):
    case = make_case(20, 2, 3, 544, 288, mxfp4=True)
    full = emulator.grouped(case.problem, GemmMode.MXFP4, tile_tokens=64).clone()
    small = emulator.grouped(with_poisoned_output(case), GemmMode.MXFP4, tile_tokens=64, num_stages=1, seed=5)
    assert torch.equal(full, small)


def test_mxfp4_in_e4m3_with_biases_the_clamped_activation_and_a_map(emulator: Emulator):
    ids = torch.randint(-1, 6, (20, 2), generator=torch.Generator().manual_seed(3))
    case = make_case(
        20, 2, 4, 160, 224, mxfp4=True, ids=ids, expert_map=torch.tensor([-1, 1, -1, 0, 2, 3]),
        activation="swigluoai", bias=True,
    )  # fmt: skip
    want = case.reference().float()
    out = emulator.grouped(case.problem, GemmMode.MXFP4, tile_tokens=64).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


def test_rows_that_begin_on_lines_of_memory_give_the_bits_of_rows_that_lie_together(emulator: Emulator):
    case = make_case(9, 4, 8, 480, 480, mxfp4=True, activation="swigluoai", bias=True)
    p = case.problem
    apart = replace(case, problem=replace(p, w13=rows_on_lines(p.w13), w2=rows_on_lines(p.w2)))
    assert (apart.problem.w13.stride(1), apart.problem.w2.stride(1)) == (256, 256)
    for held, together in zip(_both_mxfp4(emulator, apart), _both_mxfp4(emulator, case), strict=True):
        assert torch.equal(held, together)


@pytest.mark.parametrize("codes", [0x76543210, 0xFEDCBA98, 0x89ABCDEF, 0x01234567])
@pytest.mark.parametrize("largest", [0, 6, 7, 120, 254])
def test_every_code_of_mxfp4_is_exact_in_e4m3_down_to_14_binades_below_its_rows_largest_scale(
    emulator: Emulator, codes, largest
):
    signed = [sign * value for sign in (1, -1) for value in E2M1_VALUES]
    for exponent in range(largest + 1):
        want = [signed[codes >> 4 * i & 15] * 2.0 ** (exponent - 127) for i in range(8)]
        got = emulator.module.mxfp4_values_in_e4m3(codes, exponent, largest)
        if exponent >= largest - 14:
            assert got == want
        else:
            quantum = 2.0 ** (largest - 127 - 15)
            assert all(abs(a - b) <= quantum / 2 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("below", [0, 11, 14, 15, 40])
def test_groups_far_below_their_rows_largest_scale_add_what_e4m3_holds(emulator: Emulator, below):
    # Every second group of w13 and w2 that much smaller, in whatever order: alone in its half of a row it still counts.
    case = make_case(9, 1, 1, 256, 256, mxfp4=True)
    p = case.problem
    assert p.w13_scale is not None
    assert p.w2_scale is not None
    p.w13_scale.fill_(123)
    p.w2_scale.fill_(123)
    p.w13_scale[..., 1::2] -= below
    p.w2_scale[..., ::2] -= below
    want = case.reference().float()
    out = emulator.grouped(p, GemmMode.MXFP4, tile_tokens=64).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


def test_a_scale_that_is_no_number_shows_in_its_row_alone_in_e4m3(emulator: Emulator):
    case = make_case(3, 2, 2, 64, 96, mxfp4=True)
    assert case.problem.w2_scale is not None
    case.problem.w2_scale[:, 1::2] = 255
    out = emulator.grouped(case.problem, GemmMode.MXFP4, tile_tokens=64)
    assert not out[:, 1::2].isfinite().any()
    assert out[:, ::2].isfinite().all()


def _both_mxfp4(emulator: Emulator, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of the direct and of the grouped kernels."""
    direct = emulator.direct(with_poisoned_output(case)).clone()
    return direct, emulator.grouped(with_poisoned_output(case), GemmMode.MXFP4_WEIGHTS, tile_tokens=16)


def test_mxfp4_with_biases_the_clamped_activation_and_a_map(emulator: Emulator):
    ids = torch.randint(-1, 6, (20, 2), generator=torch.Generator().manual_seed(3))
    expert_map = torch.tensor([-1, 1, -1, 0, 2, 3])
    case = make_case(
        20, 2, 4, 96, 160, mxfp4=True, ids=ids, expert_map=expert_map, activation="swigluoai", bias=True,
        int64_ids=True,
    )  # fmt: skip
    for out in _both_mxfp4(emulator, case):
        assert_close(case, out)


# gpt-oss: 2880 = 45 x 64 = 22.5 x 128, 1440 on each of two GPUs; top-4 of 32, biases, the clamped activation.
@pytest.mark.parametrize(("hidden", "width"), [(192, 192), (192, 96), (160, 224)], ids=str)
@pytest.mark.parametrize("tokens", [1, 9])
def test_mxfp4_of_gpt_oss_whatever_its_sizes_are_multiples_of(emulator: Emulator, tokens, hidden, width):
    case = make_case(tokens, 4, 32, hidden, width, mxfp4=True, activation="swigluoai", bias=True)
    direct, grouped = _both_mxfp4(emulator, case)
    assert_close(case, direct)
    assert_close(case, grouped)


@pytest.mark.parametrize("codes", [0x76543210, 0xFEDCBA98, 0x89ABCDEF, 0x01234567])
def test_every_code_of_mxfp4_becomes_its_value_at_every_scale(emulator: Emulator, codes):
    signed = [sign * value for sign in (1, -1) for value in E2M1_VALUES]
    for exponent in range(256):
        want = [signed[codes >> 4 * i & 15] * 2.0 ** (exponent - 127) for i in range(8)]
        got = emulator.module.mxfp4_values(codes, exponent)
        if exponent > 160:  # more than BF16 holds, or not a number
            assert not any(map(math.isfinite, got))
        elif exponent >= 27:
            assert got == want
        else:  # less than BF16 holds: at most half of its least number is lost
            assert all(abs(a - b) <= 2.0**-102 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("exponent", [40, 94, 127, 160])
def test_every_code_of_mxfp4_is_exact_at_scales_large_and_small(emulator: Emulator, exponent):
    # Token k is the unit vector k; gate 24 (silu is the identity there), up row r the code r % 16, down the identity:
    # out[k, r] = 24 x up row r, and 24 = 3 x 2^3 leaves any code exact in BF16.
    size = 32
    case = make_case(size, 1, 1, size, size, mxfp4=True)
    p = case.problem
    p.x.copy_(torch.eye(size))
    codes, rows = torch.arange(2 * size) % 16, torch.arange(size)
    codes[:size] = 5
    p.w13.copy_((codes | codes << 4).to(torch.uint8).view(1, -1, 1).expand_as(p.w13))
    p.w2.zero_()
    p.w2[0, rows, rows // 2] = torch.where(rows % 2 == 0, 0x02, 0x20).to(torch.uint8)
    assert p.w13_scale is not None
    assert p.w2_scale is not None
    assert p.topk_weights is not None
    p.w13_scale[:, :size] = 130
    p.w13_scale[:, size:] = exponent
    p.w2_scale.fill_(127)
    p.topk_weights.fill_(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(2) * torch.tensor([1.0, -1.0]).repeat_interleave(8)
    want = 24 * torch.ldexp(values[codes[size:]], torch.tensor(exponent - 127)).expand(size, size)
    for out in _both_mxfp4(emulator, case):
        assert torch.equal(out.float(), want)


@pytest.mark.parametrize("exponent", [161, 254, 255])
def test_scales_beyond_bf16_and_no_number_show_in_their_row_alone(emulator: Emulator, exponent):
    # Three groups along K of w2: the row before is read with the exponents that follow it.
    case = make_case(3, 2, 2, 64, 96, mxfp4=True)
    assert case.problem.w2_scale is not None
    case.problem.w2_scale[:, 1::2] = exponent
    for out in _both_mxfp4(emulator, case):
        assert not out[:, 1::2].isfinite().any()
        assert out[:, ::2].isfinite().all()


@pytest.mark.parametrize("fp8", ["block", "channel"])
@pytest.mark.parametrize("tile", TILE_TOKENS[GemmMode.FP8])
def test_grouped_fp8_tokens_stay_within_their_rounding(emulator: Emulator, fp8, tile):
    case = make_case(tile + 12, 2, 3, 208, 144, fp8=fp8)
    want = case.reference().float()
    out = emulator.grouped(case.problem, GemmMode.FP8, tile_tokens=tile).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


@pytest.mark.parametrize("count", [1, 48, 49, 64, 65, 80, 81, 96, 97, 144])
@pytest.mark.parametrize("tile", [96, 144])
def test_grouped_fp8_tiles_of_any_fill_stay_within_their_rounding(emulator: Emulator, tile, count):
    # Each of the widths that a tile can be multiplied in; three groups of 128 along K, both ways.
    case = make_case(count, 1, 1, 272, 272, fp8="block")
    want = case.reference().float()
    out = emulator.grouped(case.problem, GemmMode.FP8, tile_tokens=tile, blocks=1).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


@pytest.mark.parametrize("count", [40, 90])
def test_a_block_of_weights_with_a_scale_of_zero_adds_nothing(emulator: Emulator, count):
    # Narrow tiles add in FP32, wide ones go from one scale to the next by their ratio.
    case = make_case(count, 1, 1, 272, 272, fp8="block")
    for scale in (case.problem.w13_scale, case.problem.w2_scale):
        assert scale is not None
        scale[0, 1, 1] = 0
        scale[0, 2, 0] = 0
    want = case.reference().float()
    out = emulator.grouped(case.problem, GemmMode.FP8, tile_tokens=96, blocks=1).float()
    assert (out - want).norm() <= FP8_TOKENS_BOUND * want.norm()


@pytest.mark.parametrize(
    ("mode", "tile"), [(mode, tile) for mode, tiles in PAIRED_TILES.items() for tile in tiles], ids=str
)
def test_paired_blocks_give_the_bits_of_single_ones(emulator: Emulator, mode, tile):
    # Expert 0 has two pairs of tiles, expert 1 one token (an empty tile beside it), expert 2 nothing, expert 3 a pair.
    ids = torch.full((2 * tile + 9, 2), -1)
    ids[:, 0] = 0
    ids[3, 1] = 1
    ids[5 : 5 + tile // 2, 1] = 3
    case = make_case(len(ids), 2, 4, 144, 80, ids=ids, fp8="block" if mode == GemmMode.FP8 else None)
    single = emulator.grouped(case.problem, mode, tile_tokens=tile, blocks=1).clone()
    for blocks, seed in ((2, 1), (5, 2)):  # of five multiprocessors, four are used
        problem = with_poisoned_output(case)
        out = emulator.grouped(problem, mode, tile_tokens=tile, paired=True, blocks=blocks, seed=seed)
        assert torch.equal(single, out)


@pytest.mark.parametrize("stages", [2, 3])
def test_paired_blocks_with_small_rings_end(emulator: Emulator, stages):
    case = make_case(150, 2, 3, 272, 80)
    out = emulator.grouped(
        case.problem, GemmMode.BF16, tile_tokens=128, paired=True, num_stages=stages, blocks=4, seed=stages
    )
    assert_close(case, out)


@pytest.mark.parametrize("tile", [16, 64, 160])
def test_grouped_with_biases_the_clamped_activation_and_a_map(emulator: Emulator, tile):
    # 20 tokens: the larger tiles take their path for half-empty tiles.
    ids = torch.randint(-1, 6, (20, 2), generator=torch.Generator().manual_seed(3))
    expert_map = torch.tensor([-1, 1, -1, 0, 2, 3])
    case = make_case(
        20, 2, 4, 80, 144, ids=ids, expert_map=expert_map, activation="swigluoai", bias=True, int64_ids=True
    )
    assert_close(case, emulator.grouped(case.problem, GemmMode.BF16, tile_tokens=tile))


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_grouped_with_small_rings_ends(emulator: Emulator, stages):
    case = make_case(20, 2, 3, 272, 208)
    assert_close(case, emulator.grouped(case.problem, GemmMode.BF16, tile_tokens=16, num_stages=stages))


@pytest.mark.parametrize(("paired", "tile"), [(False, 16), (True, 160)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_more_short_tasks_than_places_for_them_are_all_done_once(emulator: Emulator, paired, tile, seed):
    # Gate+up: one step of K per task, 3 row tiles of 20 experts on two blocks or one pair.
    case = make_case(30, 2, 20, 64, 272, seed=seed)
    out = emulator.grouped(
        with_poisoned_output(case), GemmMode.BF16, blocks=2, tile_tokens=tile, paired=paired, seed=seed
    )
    assert_close(case, out)


@pytest.mark.parametrize("tile", [32, 144])
def test_grouped_fp8_with_the_smallest_ring_ends(emulator: Emulator, tile):
    case = make_case(tile + 3, 1, 2, 272, 144, fp8="block")
    full = emulator.grouped(case.problem, GemmMode.FP8, tile_tokens=tile).clone()
    assert torch.equal(full, emulator.grouped(with_poisoned_output(case), GemmMode.FP8, tile_tokens=tile, num_stages=2))


@pytest.mark.parametrize("hidden", [16, 2048, 2064])  # less than one reading of a row, one, and more
def test_tokens_of_any_length_are_rounded_to_fp8_by_their_own_scale(emulator: Emulator, hidden):
    case = make_case(9, 1, 1, hidden, 144, fp8="channel")
    # Token t is 2^(4 t - 16) times as large: one scale for all would lose the small ones.
    case.problem.x.mul_(2.0 ** (4 * torch.arange(9).unsqueeze(1) - 16))
    case.problem.x[3] = 0
    want = case.reference().float()
    out = emulator.grouped(case.problem, GemmMode.FP8, tile_tokens=32).float()
    assert not out[3].any()
    for row in range(9):
        assert (out[row] - want[row]).norm() <= 2 * FP8_TOKENS_BOUND * want[row].norm()


def test_grouped_does_not_depend_on_who_runs_first(emulator: Emulator):
    case = make_case(30, 2, 3, 144, 80)
    outs = []
    for seed in range(4):
        problem = with_poisoned_output(case)
        outs.append(emulator.grouped(problem, GemmMode.BF16, tile_tokens=16, blocks=1 + seed, seed=seed + 1))
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_identity_weights_reveal_a_wrong_permutation(emulator: Emulator):
    # gate 20 (silu is the identity there), up = x, down = a scaled identity per expert: out[t] = sum_j w_j c_j x[t].
    hidden = width = 64
    case = make_case(24, 2, 4, hidden, width, seed=5)
    p = case.problem
    p.x.copy_(torch.randint(-8, 9, p.x.shape))
    p.x[:, 0] = 1
    p.w13.zero_()
    p.w13[:, :width, 0] = 20
    p.w13[:, width:] = torch.eye(width).bfloat16()
    p.w2.copy_(torch.eye(hidden) * torch.tensor([1.0, 2.0, 4.0, 8.0])[:, None, None] / 16)
    assert p.topk_ids is not None
    assert p.topk_weights is not None
    p.topk_weights.copy_(torch.randint(1, 3, p.topk_weights.shape))
    factor = (torch.tensor([1.0, 2.0, 4.0, 8.0])[p.topk_ids.long()] * p.topk_weights).sum(1, keepdim=True)
    want = p.x.float() * 20 / 16 * factor
    for out in (
        emulator.grouped(with_poisoned_output(case), GemmMode.BF16, tile_tokens=16),
        emulator.direct(with_poisoned_output(case)),
    ):
        assert torch.allclose(out.float(), want, rtol=2**-7, atol=0)


def test_a_token_of_zeros_is_quantised_to_zeros_not_to_nan(emulator: Emulator):
    case = make_case(4, 2, 3, 208, 144, fp8="block")
    case.problem.x[1] = 0
    out = emulator.grouped(case.problem, GemmMode.FP8, tile_tokens=32)
    assert not out[1].any()
    assert out.isfinite().all()


def test_nan_in_the_weights_reaches_the_output(emulator: Emulator):
    for fp8, mode in ((None, GemmMode.BF16), ("channel", GemmMode.FP8_WEIGHTS)):
        case = make_case(3, 2, 2, 80, 48, fp8=fp8)
        case.problem.w2[1, 5, 7] = float("nan")
        for out in (
            emulator.direct(case.problem).clone(),
            emulator.grouped(case.problem, mode, tile_tokens=16),
        ):
            nan = out.isnan()
            assert nan[:, 5].all(), "every token goes to both experts"
            assert nan.sum() == 3


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 6),
    hidden=st.integers(1, 12).map(lambda n: 16 * n),
    width=st.integers(1, 12).map(lambda n: 16 * n),
    weights=st.sampled_from([None, "block", "channel", "mxfp4"]),
    seed=st.integers(1, 10**6),
    data=st.data(),
)
def test_any_covered_shape_and_routing_matches_the_reference(
    emulator: Emulator, tokens, experts, hidden, width, weights, seed, data
):
    mxfp4, fp8 = weights == "mxfp4", None if weights == "mxfp4" else weights
    if mxfp4:
        hidden, width = 2 * hidden, 2 * width
    top_k = data.draw(st.integers(1, 3))
    ids = torch.randint(-1, experts, (tokens, top_k), generator=torch.Generator().manual_seed(seed))
    case = make_case(tokens, top_k, experts, hidden, width, fp8=fp8, mxfp4=mxfp4, ids=ids, seed=seed)
    assert_close(case, emulator.direct(case.problem, blocks=data.draw(st.integers(1, 3)), seed=seed))
    mode = GemmMode.MXFP4_WEIGHTS if mxfp4 else GemmMode.BF16 if fp8 is None else GemmMode.FP8_WEIGHTS
    problem = with_poisoned_output(case)
    assert_close(case, emulator.grouped(problem, mode, blocks=data.draw(st.integers(1, 3)), seed=seed))
