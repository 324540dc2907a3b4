"""What a launch asks of the chip and of its own barriers, by arithmetic. Needs no GPU and no compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.ops.launch_geometry import (
    HOPPER,
    GeometryError,
    GroupedGeometry,
    MoeSizes,
    decode_geometry,
    grouped_geometry,
    routing_geometry,
)
from moe_optimizer.ops.launch_geometry.decode import CHUNK_BYTES, DIRECT_UP_BLOCKS, MATH_WARPS, STEP_BYTES
from moe_optimizer.ops.launch_geometry.grouped import TILE_TOKENS, GemmMode, choose_tile_tokens
from moe_optimizer.ops.launch_geometry.workspace import (
    ALIGNMENT,
    counter_offset,
    decode_layout,
    grouped_layout,
    num_counters,
)

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
def test_a_decode_launch_fits_the_chip_for_every_covered_size(sizes):
    geometry = decode_geometry(sizes, num_multiprocessors=132)
    assert geometry.shared_bytes <= HOPPER.shared_bytes_per_block
    assert geometry.num_stages >= 4
    assert geometry.transaction_bytes <= HOPPER.max_transaction_bytes


def test_the_blocks_of_a_direct_launch_fit_a_multiprocessor_together():
    for weight_bytes, blocks in DIRECT_UP_BLOCKS.items():
        geometry = decode_geometry(replace(QWEN3, weight_bytes=weight_bytes), num_multiprocessors=132, direct=True)
        assert geometry.grid == min(132 * blocks, 8 * 48)
        assert blocks * (geometry.shared_bytes + 1024) <= 228 * 1024


def test_nine_tokens_are_too_many_for_a_direct_launch():
    with pytest.raises(GeometryError, match="T without a ring: got 9, expected at most 8"):
        decode_geometry(replace(QWEN3, num_tokens=9), num_multiprocessors=132, direct=True)


@given(sizes_strategy)
def test_decode_chunks_cover_a_weight_row_and_the_warps_cover_a_chunk(sizes):
    geometry = decode_geometry(sizes, num_multiprocessors=132)
    for row, chunk in (
        (sizes.hidden_size * sizes.weight_bytes, geometry.w13_chunk_bytes),
        (sizes.intermediate_size * sizes.weight_bytes, geometry.w2_chunk_bytes),
    ):
        assert chunk % STEP_BYTES == 0
        assert 0 < chunk <= CHUNK_BYTES == MATH_WARPS * 2 * STEP_BYTES
        last = row - (-(-row // chunk) - 1) * chunk
        assert 0 < last <= chunk
        assert last % 16 == 0, "a bulk copy moves multiples of 16 bytes"


def test_a_decode_ring_holds_the_whole_of_w2_at_one_token():
    geometry = decode_geometry(QWEN3, num_multiprocessors=132)
    w2_bytes = QWEN3.top_k * QWEN3.hidden_size * QWEN3.intermediate_size * 2
    assert 132 * geometry.bytes_in_flight >= w2_bytes


def test_more_pairs_than_the_tables_hold_are_refused_with_the_product():
    with pytest.raises(GeometryError, match=r"T x k = 65 x 8: got 520, expected at most 512"):
        decode_geometry(replace(QWEN3, num_tokens=65), num_multiprocessors=132)


def test_too_many_stages_are_refused_with_every_term_of_the_sum():
    with pytest.raises(
        GeometryError, match=r"348160 \(10 stages\) \+ 160 \(20 barriers\) .* = \d+ bytes, expected at most 232448"
    ):
        decode_geometry(QWEN3, num_multiprocessors=132, num_stages=10)


def test_sizes_that_are_no_multiple_of_16_are_refused():
    with pytest.raises(GeometryError, match="I: got 770, expected a multiple of 16"):
        decode_geometry(replace(QWEN3, intermediate_size=770), num_multiprocessors=132)


@pytest.mark.parametrize("mode", list(GemmMode))
@pytest.mark.parametrize("sizes", [QWEN3, MIXTRAL, DEEPSEEK], ids=["qwen3", "mixtral", "deepseek"])
def test_every_compiled_tile_fits_the_chip(mode, sizes):
    sizes = replace(sizes, weight_bytes=2 if mode == GemmMode.BF16 else 1)
    for tile in TILE_TOKENS[mode]:
        geometry = grouped_geometry(sizes, mode, num_multiprocessors=132, tile_tokens=tile)
        assert geometry.shared_bytes <= HOPPER.shared_bytes_per_block
        assert geometry.stage_bytes % 1024 == 0
        assert geometry.transaction_bytes == (16384 if tile == 256 else 32768)
        assert (geometry.full_arrivals, geometry.empty_arrivals) == (129, 8)


def test_a_ring_that_could_deadlock_is_refused():
    with pytest.raises(
        GeometryError, match=r"ring stages: got 2, expected at least 1 \(signal lag\) \+ 1 \(release lag\) \+ 1"
    ):
        grouped_geometry(QWEN3, GemmMode.BF16, num_multiprocessors=132, tile_tokens=16, num_stages=2)


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
    assert geometry.max_tiles >= worst


def test_the_tile_grows_with_the_tokens_per_expert():
    tiles = [
        choose_tile_tokens(replace(QWEN3, num_tokens=tokens), GemmMode.BF16)
        for tokens in (32, 128, 256, 512, 1024, 8192)
    ]
    assert tiles == [16, 16, 32, 64, 128, 256]


def test_one_block_routes_in_one_launch_and_more_in_two():
    assert routing_geometry(replace(QWEN3, num_tokens=128)).launches == 1
    large = routing_geometry(replace(QWEN3, num_tokens=4096))
    assert (large.launches, large.blocks) == (2, 32)


def _grouped(sizes: MoeSizes, mode: GemmMode) -> GroupedGeometry:
    return grouped_geometry(sizes, mode, num_multiprocessors=132)


@pytest.mark.parametrize("mode", list(GemmMode))
def test_workspace_parts_are_aligned_and_do_not_overlap(mode):
    sizes = replace(DEEPSEEK, num_tokens=300, weight_bytes=2 if mode == GemmMode.BF16 else 1)
    layout = grouped_layout(sizes, _grouped(sizes, mode), routing_geometry(sizes), has_router=True)
    starts = [offset for offset in layout.offsets.values() if offset is not None]
    assert starts == sorted(set(starts))
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert layout.total_bytes > starts[-1]


def test_only_fp8_activations_take_room_for_quantised_tokens():
    bf16 = grouped_layout(QWEN3, _grouped(QWEN3, GemmMode.BF16), routing_geometry(QWEN3))
    assert bf16.offsets["h_quantized"] is None
    fp8_sizes = replace(QWEN3, weight_bytes=1)
    fp8 = grouped_layout(fp8_sizes, _grouped(fp8_sizes, GemmMode.FP8), routing_geometry(fp8_sizes))
    assert fp8.offsets["h_quantized"] is not None


def test_a_hidden_size_past_the_arrival_counters_is_refused():
    sizes = replace(QWEN3, hidden_size=32768)
    with pytest.raises(GeometryError, match="tiles of 32 rows in H = 32768: got 1024, expected at most 1022"):
        decode_layout(sizes, decode_geometry(sizes, num_multiprocessors=132))


def test_counters_do_not_overlap():
    assert counter_offset("slot_arrivals") == 0
    assert counter_offset("tile_arrivals") == 512
    assert counter_offset("route_arrivals") == num_counters() - 1
