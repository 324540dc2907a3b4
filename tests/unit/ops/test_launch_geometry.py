"""What a launch asks of the chip and of its own barriers, by arithmetic. Needs no GPU and no compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.ops.cuda_dispatch_calls import direct_parts, grouped_parts
from moe_optimizer.ops.launch_geometry import (
    GeometryError,
    GroupedGeometry,
    MoeSizes,
    direct_geometry,
    grouped_geometry,
)
from moe_optimizer.ops.launch_geometry.direct import UP_BLOCKS, UP_ROWS, WIDE_UP_BLOCKS
from moe_optimizer.ops.launch_geometry.grouped import (
    PAIRED_TILES,
    TILE_TOKENS,
    GemmMode,
    choose_tile_tokens,
    stage_bytes,
)
from moe_optimizer.ops.launch_geometry.hopper import SHARED_BYTES

QWEN3 = MoeSizes(num_tokens=1, top_k=8, num_experts=128, hidden_size=2048, intermediate_size=768, weight_bytes=2)
MIXTRAL = MoeSizes(num_tokens=4, top_k=2, num_experts=8, hidden_size=4096, intermediate_size=14336, weight_bytes=2)
DEEPSEEK = MoeSizes(num_tokens=16, top_k=8, num_experts=256, hidden_size=7168, intermediate_size=2048, weight_bytes=1)

sizes_strategy = st.builds(
    MoeSizes,
    num_tokens=st.integers(1, 16),
    top_k=st.integers(1, 32),
    num_experts=st.integers(1, 1024),
    hidden_size=st.integers(1, 512).map(lambda n: 16 * n),
    intermediate_size=st.integers(1, 512).map(lambda n: 16 * n),
    weight_bytes=st.sampled_from([1, 2]),
)


@given(sizes_strategy)
def test_a_direct_launch_fits_the_chip_for_every_covered_size(sizes):
    geometry = direct_geometry(sizes, num_multiprocessors=132)
    assert geometry.up_shared_bytes <= SHARED_BYTES
    assert geometry.down_shared_bytes <= SHARED_BYTES
    assert geometry.down_grid == min(132, sizes.hidden_size // 16)


def test_the_blocks_of_a_direct_launch_fit_a_multiprocessor_together():
    for weight_bytes, blocks in UP_BLOCKS.items():
        sizes = replace(QWEN3, weight_bytes=weight_bytes, num_tokens=4)
        geometry = direct_geometry(sizes, num_multiprocessors=132)
        assert geometry.up_grid == min(132 * blocks, 4 * 8 * 768 // UP_ROWS[weight_bytes])
        assert blocks * (geometry.up_shared_bytes + 1024) <= 228 * 1024


def test_the_first_direct_launch_takes_wide_steps_where_few_tiles_divide_better_among_fewer_blocks():
    def wide(sizes: MoeSizes) -> bool:
        return direct_geometry(sizes, num_multiprocessors=132).up_wide

    assert wide(QWEN3)  # 768 tiles: 2.9 rounds of 264 blocks, 1.5 of 528
    assert direct_geometry(QWEN3, num_multiprocessors=132).up_grid == 132 * WIDE_UP_BLOCKS
    assert not wide(replace(QWEN3, num_tokens=2))  # 1536: 5.8 rounds and 2.9
    assert not wide(replace(QWEN3, top_k=2, intermediate_size=3584))  # 896: 3.4 and 1.7, as full as each other
    assert not wide(replace(QWEN3, weight_bytes=1))


def test_more_tokens_or_pairs_than_the_tables_hold_are_refused_with_the_number():
    with pytest.raises(GeometryError, match="T: got 65, expected at most 64"):
        direct_geometry(replace(QWEN3, num_tokens=65), num_multiprocessors=132)
    with pytest.raises(GeometryError, match=r"T x k = 64 x 9: got 576, expected at most 512"):
        direct_geometry(replace(QWEN3, num_tokens=64, top_k=9), num_multiprocessors=132)


def test_shared_memory_that_does_not_fit_is_refused_with_every_term_of_the_sum():
    with pytest.raises(
        GeometryError, match=r"\d+ \(routing tables\) \+ 65536 \(sums.*\) .* = \d+ bytes, expected at most 49152"
    ):
        direct_geometry(replace(QWEN3, num_tokens=64), num_multiprocessors=132, shared_limit=48 * 1024)


def test_sizes_that_are_no_multiple_of_16_are_refused():
    with pytest.raises(GeometryError, match="I: got 770, expected a multiple of 16"):
        direct_geometry(replace(QWEN3, intermediate_size=770), num_multiprocessors=132)


@pytest.mark.parametrize("mode", list(GemmMode))
@pytest.mark.parametrize("sizes", [QWEN3, MIXTRAL, DEEPSEEK], ids=["qwen3", "mixtral", "deepseek"])
def test_every_compiled_tile_fits_the_chip(mode, sizes):
    sizes = replace(sizes, weight_bytes=2 if mode == GemmMode.BF16 else 1)
    for tile in TILE_TOKENS[mode]:
        geometry = grouped_geometry(sizes, mode, num_multiprocessors=132, tile_tokens=tile)
        assert geometry.shared_bytes <= SHARED_BYTES
        assert stage_bytes(mode, tile) % 1024 == 0  # the swizzle's period


@pytest.mark.parametrize("mode", [GemmMode.BF16, GemmMode.FP8])
def test_a_pair_takes_an_even_grid_and_the_shared_memory_of_single_blocks(mode):
    sizes = replace(QWEN3, num_tokens=4096, weight_bytes=2 if mode == GemmMode.BF16 else 1)
    for tile in PAIRED_TILES[mode]:
        single, pair = (
            grouped_geometry(sizes, mode, num_multiprocessors=133, tile_tokens=tile, paired=paired)
            for paired in (False, True)
        )
        assert (single.grid, pair.grid) == (133, 132)
        assert (pair.shared_bytes, pair.num_stages) == (single.shared_bytes, single.num_stages)


def test_a_pair_on_one_multiprocessor_is_refused():
    with pytest.raises(GeometryError, match="multiprocessors: got 1, expected 2 for a pair"):
        grouped_geometry(QWEN3, GemmMode.BF16, num_multiprocessors=1, tile_tokens=128, paired=True)


@pytest.mark.parametrize("mode", [GemmMode.BF16, GemmMode.FP8])
def test_a_ring_that_could_deadlock_is_refused(mode):
    sizes = replace(QWEN3, weight_bytes=2 if mode == GemmMode.BF16 else 1)
    with pytest.raises(GeometryError, match=r"ring stages: got 1, expected at least 1 \(release lag\) \+ 1"):
        grouped_geometry(sizes, mode, num_multiprocessors=132, tile_tokens=32, num_stages=1)


@pytest.mark.parametrize(("paired", "stages", "ahead"), [(False, 15, "17"), (True, 8, "18")])
def test_more_work_queued_ahead_than_slots_is_refused(paired, stages, ahead):
    with pytest.raises(GeometryError, match=rf"work tiles queued ahead: got {ahead} \("):
        grouped_geometry(
            QWEN3, GemmMode.BF16, num_multiprocessors=132, tile_tokens=160, num_stages=stages, paired=paired
        )


def test_a_tile_whose_sums_exceed_the_registers_is_refused():
    assert 128 not in TILE_TOKENS[GemmMode.FP8_WEIGHTS]
    with pytest.raises(GeometryError, match="token tile in FP8_WEIGHTS: got 128"):
        grouped_geometry(replace(QWEN3, weight_bytes=1), GemmMode.FP8_WEIGHTS, num_multiprocessors=132, tile_tokens=128)


def test_weights_of_the_wrong_width_are_refused():
    with pytest.raises(GeometryError, match="bytes per weight in FP8: got 2, expected 1"):
        grouped_geometry(QWEN3, GemmMode.FP8, num_multiprocessors=132)


@given(st.integers(1, 8192), st.integers(1, 32), st.integers(1, 1024))
def test_the_tile_table_has_room_for_any_routing(tokens, top_k, experts):
    sizes = MoeSizes(
        num_tokens=tokens, top_k=top_k, num_experts=experts, hidden_size=64, intermediate_size=64, weight_bytes=2
    )
    geometry = grouped_geometry(sizes, GemmMode.BF16, num_multiprocessors=132)
    # The most tiles: as many experts as possible with one pair each, the rest of the pairs in full tiles.
    started = min(experts, sizes.num_pairs)
    worst = started + (sizes.num_pairs - started) // geometry.tile_tokens
    assert geometry.max_tiles(sizes) >= worst
    paired = grouped_geometry(sizes, GemmMode.BF16, num_multiprocessors=132, tile_tokens=128, paired=True)
    assert paired.max_tiles(sizes) >= 2 * (started + (sizes.num_pairs - started) // 256)


def test_the_tile_grows_with_the_tokens_per_expert():
    tiles = [
        choose_tile_tokens(replace(QWEN3, num_tokens=tokens), GemmMode.BF16)
        for tokens in (32, 128, 256, 512, 1024, 8192)
    ]
    assert tiles == [16, 16, 32, 64, 96, 160]


def test_a_block_routes_1024_pairs():
    assert _grouped(replace(QWEN3, num_tokens=128), GemmMode.BF16).route_blocks == 1
    assert _grouped(replace(QWEN3, num_tokens=4096), GemmMode.BF16).route_blocks == 32


def _grouped(sizes: MoeSizes, mode: GemmMode) -> GroupedGeometry:
    return grouped_geometry(sizes, mode, num_multiprocessors=132)


def test_only_fp8_activations_take_room_for_quantised_tokens():
    bf16 = grouped_parts(QWEN3, _grouped(QWEN3, GemmMode.BF16))
    assert bf16["h_quantized"] == 0
    assert bf16["h"] > 0
    fp8_sizes = replace(QWEN3, weight_bytes=1)
    fp8 = grouped_parts(fp8_sizes, _grouped(fp8_sizes, GemmMode.FP8))
    assert fp8["h_quantized"] > 0
    assert fp8["h"] == 0


def test_only_logits_take_room_for_ids_and_weights():
    assert direct_parts(QWEN3) == {"h": 8 * 768 * 2, "topk_ids": 0, "topk_weights": 0}
    assert all(direct_parts(QWEN3, has_router=True).values())
