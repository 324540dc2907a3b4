"""Scales of four-bit weights beside the ring (TileScales) and in its stages: the same bits, whichever way they came."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops.cuda_variants import GemmMode, GroupedVariant
from moe_optimizer.ops.kernel_arguments import CudaProblem
from tests.kernel_emulator import Case, Emulator, assert_close, guarded, make_case, with_poisoned_output

TILES = {GemmMode.MXFP4_WEIGHTS: (16, 32), GemmMode.INT4_WEIGHTS: (16, 64)}
"""The narrowest and the widest tile of each mode with room for scales beside its ring."""
ROWS: dict[str, dict[str, Any]] = {"silu": {}, "swigluoai": {"activation": "swigluoai", "bias": True}}


def mode_of(formats: dict[str, Any]) -> GemmMode:
    """The mode with BF16 products that reads weights of this format."""
    return GemmMode.INT4_WEIGHTS if "int4" in formats else GemmMode.MXFP4_WEIGHTS


def off_16(tensor: Tensor) -> Tensor:
    """A copy that starts 4 bytes before a multiple of 16, which no bulk copy can read; 4 bytes before a page's end."""
    data = tensor.contiguous().view(torch.uint8).flatten()
    padded = guarded(torch.cat([data, torch.full((4,), 255, dtype=torch.uint8)]))
    return padded[:-4].view(tensor.dtype).view(tensor.shape)


def in_stages(case: Case) -> CudaProblem:
    """The same call with scales that only the copies stage by stage can read."""
    problem = with_poisoned_output(case)
    assert problem.w13_scale is not None
    assert problem.w2_scale is not None
    return replace(problem, w13_scale=off_16(problem.w13_scale), w2_scale=off_16(problem.w2_scale))


def scale_bytes(emulator: Emulator, problem: CudaProblem, mode: GemmMode, tile: int) -> int:
    """What the buffers beside the ring take."""
    return emulator.layout(problem, GroupedVariant(mode, tile), 2)["launch"]["scale_bytes"]


# Sizes: rows that end inside a box and a row tile; an odd number of groups per row; K that ends in either half of a
# stage. A block has several tiles of either launch, so buffers are used again.
SIZES: list[tuple[dict[str, Any], int, int]] = [
    ({"mxfp4": True}, 288, 160), ({"mxfp4": True}, 1056, 96), ({"mxfp4": True}, 544, 416),
    ({"int4": 32, "zero_points": True}, 288, 416), ({"int4": 64}, 320, 192),
    ({"int4": 64, "zero_points": True}, 576, 320), ({"int4": 128}, 640, 384),
]  # fmt: skip
# Of each size both tiles and both activations; of each format of weights all four pairs of them.
CASES = [(*size, tile, list(ROWS)[(at + tile) % 2]) for at, size in enumerate(SIZES) for tile in (0, 1)]


@pytest.mark.parametrize(("formats", "hidden", "width", "width_of_tile", "activation"), CASES, ids=str)
def test_scales_beside_the_ring_and_in_its_stages_give_the_same_bits(
    emulator: Emulator, formats, hidden, width, width_of_tile, activation
):
    case = make_case(24, 2, 3, hidden, width, **formats, **ROWS[activation])
    mode = mode_of(formats)
    tile = TILES[mode][width_of_tile]
    assert scale_bytes(emulator, case.problem, mode, tile) > 0
    beside = emulator.grouped(case.problem, mode, tile_tokens=tile).clone()
    assert_close(case, beside)
    stages = in_stages(case)
    assert scale_bytes(emulator, stages, mode, tile) == 0
    assert torch.equal(beside, emulator.grouped(stages, mode, tile_tokens=tile, seed=3))


@pytest.mark.parametrize("formats", [{"mxfp4": True}, {"int4": 32, "zero_points": True}], ids=str)
def test_one_block_with_many_tiles_and_the_smallest_rings_ends_with_the_same_bits(emulator: Emulator, formats):
    # One step of K in the down launch: the weights' warp could be further ahead than there are buffers.
    case = make_case(40, 2, 5, 544, 256, **formats)
    mode = mode_of(formats)
    want = emulator.grouped(in_stages(case), mode, tile_tokens=16, blocks=1).clone()
    for stages in (1, 2, None):
        problem = with_poisoned_output(case)
        got = emulator.grouped(problem, mode, tile_tokens=16, blocks=1, num_stages=stages, seed=stages or 9)
        assert torch.equal(want, got)


# A buffer of 256 rows x 90 groups, of which two do not fit beside enough stages.
@pytest.mark.parametrize(("tile", "zero_points"), [(16, True), (32, False)])
def test_a_single_buffer_is_taken_by_one_tile_after_the_other(emulator: Emulator, tile, zero_points):
    case = make_case(20, 2, 2, 2880, 160, int4=32, zero_points=zero_points)
    mode = GemmMode.INT4_WEIGHTS
    assert scale_bytes(emulator, case.problem, mode, tile) == 256 * 90 * (3 if zero_points else 2)
    want = emulator.grouped(in_stages(case), mode, tile_tokens=tile, blocks=1).clone()
    assert_close(case, want)
    for seed in (1, 2, 3):
        assert torch.equal(
            want, emulator.grouped(with_poisoned_output(case), mode, tile_tokens=tile, blocks=1, seed=seed)
        )
