"""What a launch asks of the chip and of its own barriers, by arithmetic (csrc/launch/geometry.h). Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.costs.memory import GIB, MemoryRequest, activation_bytes
from moe_optimizer.ops.cuda_variants import (
    DIRECT_PAIRS,
    DIRECT_TOKENS,
    MODES_OF_WEIGHT_BITS,
    PAIRED_TILES,
    TILE_TOKENS,
    DirectVariant,
    GemmMode,
    GroupedVariant,
    MoeSizes,
    choose_tile_tokens,
)
from moe_optimizer.ops.kernel_arguments import CudaProblem, Router
from tests.builders import qwen3_30b_a3b
from tests.kernel_emulator import Emulator

SHARED_BYTES = 227 * 1024
"""What a block may have."""

WEIGHT_BITS = {mode: bits for bits, modes in MODES_OF_WEIGHT_BITS.items() for mode in modes} | {
    GemmMode.INT4_WEIGHTS: 4
}
FOUR_BITS = (GemmMode.MXFP4_WEIGHTS, GemmMode.INT4_WEIGHTS, GemmMode.MXFP4)

QWEN3 = MoeSizes(num_tokens=1, top_k=8, num_experts=128, hidden_size=2048, intermediate_size=768, weight_bits=16)
MIXTRAL = MoeSizes(num_tokens=4, top_k=2, num_experts=8, hidden_size=4096, intermediate_size=14336, weight_bits=16)
DEEPSEEK = MoeSizes(num_tokens=16, top_k=8, num_experts=256, hidden_size=7168, intermediate_size=2048, weight_bits=8)

sizes_strategy = st.builds(
    MoeSizes,
    num_tokens=st.integers(1, 16),
    top_k=st.integers(1, 32),
    num_experts=st.integers(1, 1024),
    hidden_size=st.integers(1, 512).map(lambda n: 16 * n),
    intermediate_size=st.integers(1, 512).map(lambda n: 16 * n),
    weight_bits=st.sampled_from([8, 16]),
) | st.builds(
    MoeSizes,
    num_tokens=st.integers(1, 16),
    top_k=st.integers(1, 32),
    num_experts=st.integers(1, 1024),
    hidden_size=st.integers(1, 256).map(lambda n: 32 * n),
    intermediate_size=st.integers(1, 256).map(lambda n: 32 * n),
    weight_bits=st.just(4),
)

any_size = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def of_mode(sizes: MoeSizes, mode: GemmMode) -> MoeSizes:
    """The sizes with weights that the mode reads."""
    return replace(sizes, weight_bits=WEIGHT_BITS[mode], int4=mode == GemmMode.INT4_WEIGHTS)


def problem_of(sizes: MoeSizes, router: Router | None = None) -> CudaProblem:
    """A call of these sizes without memory."""
    t, k, e, h, i = sizes.num_tokens, sizes.top_k, sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    weight = {16: torch.bfloat16, 8: torch.float8_e4m3fn, 4: torch.uint8}[sizes.weight_bits]
    packed = sizes.weight_bits == 4
    stored = 2 if packed else 1  # weights in an element
    # INT4 is told by the address of its scales.
    scale = torch.empty(1, 1, 1, dtype=torch.bfloat16) if sizes.int4 else torch.empty(1, 1, 1, device="meta").byte()
    return CudaProblem(
        x=torch.empty(t, h, dtype=torch.bfloat16, device="meta"),
        w13=torch.empty(e, 2 * i, h // stored, dtype=weight, device="meta"),
        w2=torch.empty(e, h, i // stored, dtype=weight, device="meta"),
        w13_scale=scale.expand(e, 2 * i, h // 32) if packed else None,
        w2_scale=scale.expand(e, h, i // 32) if packed else None,
        out=torch.empty(t, h, dtype=torch.bfloat16, device="meta"),
        topk_ids=torch.empty(t, k, dtype=torch.int32, device="meta"),
        router=router,
    )


def direct(emulator: Emulator, sizes: MoeSizes, blocks: int = 132) -> dict[str, Any]:
    """The launches of the direct kernels."""
    return emulator.layout(problem_of(sizes), DirectVariant(), blocks)["launch"]


def grouped(emulator: Emulator, sizes: MoeSizes, mode: GemmMode, *options: Any, blocks: int = 132, **more: Any) -> Any:
    """The launches of the grouped kernels; options of the variant."""
    return emulator.layout(problem_of(sizes), GroupedVariant(mode, *options, **more), blocks)["launch"]


def test_token_tiles_and_limits_are_the_compiled_ones(emulator: Emulator):
    assert [list(TILE_TOKENS[mode]) for mode in GemmMode] == emulator.module.tiles
    assert emulator.module.direct_limits == (DIRECT_TOKENS, DIRECT_PAIRS)


@any_size
@given(sizes_strategy)
def test_a_direct_launch_fits_the_chip_for_every_covered_size(emulator: Emulator, sizes):
    launch = direct(emulator, sizes)
    assert launch["up_shared_bytes"] <= SHARED_BYTES
    assert launch["down_shared_bytes"] <= SHARED_BYTES
    assert launch["down_grid"] == min(132, sizes.hidden_size // 16)


@pytest.mark.parametrize(("weight_bits", "blocks", "rows"), [(16, 4, 8), (8, 2, 16), (4, 2, 16)])
def test_the_blocks_of_a_direct_launch_fit_a_multiprocessor_together(emulator: Emulator, weight_bits, blocks, rows):
    launch = direct(emulator, replace(QWEN3, weight_bits=weight_bits, num_tokens=4))
    assert launch["up_grid"] == min(132 * blocks, 4 * 8 * 768 // rows)
    assert blocks * (launch["up_shared_bytes"] + 1024) <= 228 * 1024


def test_the_first_direct_launch_takes_wide_steps_where_few_tiles_divide_better_among_fewer_blocks(emulator: Emulator):
    def wide(sizes: MoeSizes) -> bool:
        return direct(emulator, sizes)["up_wide"]

    assert wide(QWEN3)  # 768 tiles: 2.9 rounds of 264 blocks, 1.5 of 528
    assert direct(emulator, QWEN3)["up_grid"] == 132 * 2
    assert not wide(replace(QWEN3, num_tokens=2))  # 1536: 5.8 rounds and 2.9
    assert not wide(replace(QWEN3, top_k=2, intermediate_size=3584))  # 896: 3.4 and 1.7, as full as each other
    assert not wide(replace(QWEN3, weight_bits=8))


def test_more_tokens_or_pairs_than_the_tables_hold_are_refused_with_the_number(emulator: Emulator):
    with pytest.raises(ValueError, match=r"T:.*65,.* 64"):
        direct(emulator, replace(QWEN3, num_tokens=65))
    with pytest.raises(ValueError, match=r"T x k:.*576,.* 512"):
        direct(emulator, replace(QWEN3, num_tokens=64, top_k=9))


def test_sizes_that_are_no_multiple_of_16_are_refused(emulator: Emulator):
    with pytest.raises(ValueError, match=r"I:.*770,.* 16"):
        direct(emulator, replace(QWEN3, intermediate_size=770))


def test_mxfp4_sizes_that_are_no_multiple_of_its_groups_are_refused(emulator: Emulator):
    with pytest.raises(ValueError, match=r"I:.*752,.* 32"):
        direct(emulator, replace(QWEN3, weight_bits=4, intermediate_size=752))


@pytest.mark.parametrize("mode", list(GemmMode))
@pytest.mark.parametrize("sizes", [QWEN3, MIXTRAL, DEEPSEEK], ids=["qwen3", "mixtral", "deepseek"])
def test_every_compiled_tile_fits_the_chip(emulator: Emulator, mode, sizes):
    sizes = of_mode(sizes, mode)
    for tile in TILE_TOKENS[mode]:
        fewest = 1 if mode in FOUR_BITS else 2  # of its widest tile, two stages fit
        launch, longer = (grouped(emulator, sizes, mode, tile, stages) for stages in (fewest, fewest + 1))
        assert grouped(emulator, sizes, mode, tile)["shared_bytes"] <= SHARED_BYTES
        stage_bytes = longer["shared_bytes"] - launch["shared_bytes"] - 16  # a stage has two barriers
        # The swizzle's period. A shorter ring may leave room for scales beside it, which makes its stages smaller.
        assert stage_bytes % 1024 == 0 or launch["scale_bytes"] > longer["scale_bytes"]


@pytest.mark.parametrize("mode", [GemmMode.BF16, GemmMode.FP8])
def test_a_pair_takes_an_even_grid_and_the_shared_memory_of_single_blocks(emulator: Emulator, mode):
    sizes = of_mode(replace(QWEN3, num_tokens=4096), mode)
    for tile in PAIRED_TILES[mode]:
        single, pair = (grouped(emulator, sizes, mode, tile, paired=paired, blocks=133) for paired in (False, True))
        assert (single["grid"], pair["grid"]) == (133, 132)
        assert (pair["shared_bytes"], pair["num_stages"]) == (single["shared_bytes"], single["num_stages"])


def test_a_pair_on_one_multiprocessor_is_refused(emulator: Emulator):
    with pytest.raises(ValueError, match=r"multiprocessors:.*1,.* 2"):
        grouped(emulator, QWEN3, GemmMode.BF16, 128, paired=True, blocks=1)


@pytest.mark.parametrize("mode", [GemmMode.BF16, GemmMode.FP8])
def test_a_ring_that_could_deadlock_is_refused(emulator: Emulator, mode):
    sizes = of_mode(QWEN3, mode)
    with pytest.raises(ValueError, match=r"ring stages:.*1,.* 2"):
        grouped(emulator, sizes, mode, 64, 1)


@pytest.mark.parametrize(("paired", "stages", "ahead"), [(False, 15, 17), (True, 8, 18)])
def test_more_work_queued_ahead_than_slots_is_refused(emulator: Emulator, paired, stages, ahead):
    with pytest.raises(ValueError, match=f"queued ahead:.*{ahead},.* 16"):
        grouped(emulator, QWEN3, GemmMode.BF16, 160, stages, paired)


def test_a_ring_larger_than_shared_memory_is_refused_with_its_bytes(emulator: Emulator):
    with pytest.raises(ValueError, match=r"shared memory:.*\d+,.* 232448"):
        grouped(emulator, QWEN3, GemmMode.BF16, 160, 12)


def test_a_tile_whose_sums_exceed_the_registers_is_refused(emulator: Emulator):
    assert 128 not in TILE_TOKENS[GemmMode.FP8_WEIGHTS]
    with pytest.raises(ValueError, match=r"token tile:.*128,.*mode 1"):
        grouped(emulator, replace(QWEN3, weight_bits=8), GemmMode.FP8_WEIGHTS, 128)


def test_weights_of_the_wrong_width_are_refused(emulator: Emulator):
    with pytest.raises(ValueError, match=r"bits per weight:.*16,.* 8"):
        grouped(emulator, QWEN3, GemmMode.FP8)


@any_size
@given(st.integers(1, 8192), st.integers(1, 32), st.integers(1, 1024))
def test_the_tile_table_has_room_for_any_routing(emulator: Emulator, tokens, top_k, experts):
    sizes = MoeSizes(
        num_tokens=tokens, top_k=top_k, num_experts=experts, hidden_size=64, intermediate_size=64, weight_bits=16
    )
    # The most tiles: as many experts as possible with one pair each, the rest of the pairs in full tiles.
    started = min(experts, sizes.num_pairs)
    for tile, together in ((32, 1), (128, 2)):
        variant = GroupedVariant(GemmMode.BF16, tile, paired=together == 2)
        parts = emulator.layout(problem_of(sizes), variant, 132, buffer=256)["workspace"]
        worst = together * (started + (sizes.num_pairs - started) // (tile * together))
        assert parts["num_tiles"] - parts["tiles"] >= 16 * worst


def test_the_tile_grows_with_the_tokens_per_expert():
    tiles = [
        choose_tile_tokens(replace(QWEN3, num_tokens=tokens), GemmMode.BF16)
        for tokens in (32, 128, 256, 512, 1024, 8192)
    ]
    assert tiles == [16, 16, 32, 64, 96, 160]


def test_a_block_routes_1024_pairs(emulator: Emulator):
    for tokens, blocks in ((128, 1), (4096, 32)):
        assert grouped(emulator, replace(QWEN3, num_tokens=tokens), GemmMode.BF16)["route_blocks"] == blocks


def test_only_fp8_activations_take_room_for_quantised_tokens(emulator: Emulator):
    def parts(mode: GemmMode) -> dict[str, int]:
        problem = problem_of(of_mode(QWEN3, mode))
        return emulator.layout(problem, GroupedVariant(mode), 132, buffer=256)["workspace"]

    assert parts(GemmMode.BF16)["h_quantized"] == 0 < parts(GemmMode.BF16)["h"]
    for mode in (GemmMode.FP8, GemmMode.MXFP4):
        assert parts(mode)["h"] == 0 < parts(mode)["h_quantized"]


def test_three_stages_of_the_widest_tile_in_e4m3_fit_with_four_bits(emulator: Emulator):
    assert grouped(emulator, of_mode(QWEN3, GemmMode.MXFP4), GemmMode.MXFP4, 128)["num_stages"] == 3


GPT_OSS = MoeSizes(num_tokens=16, top_k=4, num_experts=128, hidden_size=2880, intermediate_size=2880, weight_bits=4)


# Buffers of the scales of 256 rows: K / 32 bytes of MXFP4, 2 per group of INT4 (here of 32).
@pytest.mark.parametrize(
    ("sizes", "mode", "tile", "stages", "scale_bytes"),
    [
        (QWEN3, GemmMode.MXFP4_WEIGHTS, 16, 4, 2 * 256 * 64),
        (QWEN3, GemmMode.MXFP4_WEIGHTS, 32, 3, 2 * 256 * 64),
        (QWEN3, GemmMode.MXFP4_WEIGHTS, 64, 3, 0),  # in the stages, as are those of wider tiles
        (GPT_OSS, GemmMode.MXFP4_WEIGHTS, 16, 4, 2 * 256 * 90),
        (GPT_OSS, GemmMode.MXFP4_WEIGHTS, 32, 3, 2 * 256 * 90),
        (DEEPSEEK, GemmMode.MXFP4_WEIGHTS, 16, 5, 0),  # two buffers would leave two stages
        (QWEN3, GemmMode.INT4_WEIGHTS, 16, 3, 2 * 256 * 128),
        (QWEN3, GemmMode.INT4_WEIGHTS, 64, 2, 2 * 256 * 128),
        (QWEN3, GemmMode.INT4_WEIGHTS, 128, 2, 0),
        (GPT_OSS, GemmMode.INT4_WEIGHTS, 16, 3, 2 * 256 * 180),
        (GPT_OSS, GemmMode.INT4_WEIGHTS, 32, 3, 256 * 180),  # a single buffer
        (GPT_OSS, GemmMode.INT4_WEIGHTS, 64, 2, 256 * 180),
        (QWEN3, GemmMode.MXFP4, 64, 3, 0),  # E4M3: always in the stages
    ],
)
def test_the_scales_of_tiles_lie_beside_the_ring_where_three_stages_are_left(
    emulator: Emulator, sizes, mode, tile, stages, scale_bytes
):
    launch = grouped(emulator, of_mode(sizes, mode), mode, tile)
    assert (launch["num_stages"], launch["scale_bytes"]) == (stages, scale_bytes)


def test_a_ring_of_as_many_stages_as_asked_for_comes_before_scales_beside_it(emulator: Emulator):
    sizes = of_mode(QWEN3, GemmMode.MXFP4_WEIGHTS)
    found = [grouped(emulator, sizes, GemmMode.MXFP4_WEIGHTS, 16, stages)["scale_bytes"] for stages in (1, 4, 5)]
    assert found == [32768, 32768, 0]


def test_only_logits_take_room_for_ids_and_weights(emulator: Emulator):
    router = Router(logits=torch.zeros(1, 128), top_k=8)
    without, with_logits = (emulator.layout(problem_of(QWEN3, each), DirectVariant(), 132) for each in (None, router))
    assert without["bytes"] == 8 * 768 * 2
    assert with_logits["bytes"] > without["bytes"]


# Sizes of the parts where they do not follow from the next one's address alone: the emulation checks that nobody reads
# past them; here, that they are aligned and apart.
@pytest.mark.parametrize("router", [None, Router(logits=torch.zeros(1, 128), top_k=8)], ids=["ids", "logits"])
@pytest.mark.parametrize("mode", list(GemmMode))
def test_workspace_parts_are_aligned_and_apart(emulator: Emulator, mode, router):
    sizes = of_mode(replace(QWEN3, num_tokens=5), mode)
    layout = emulator.layout(problem_of(sizes, router), GroupedVariant(mode), 132, buffer=4096)
    starts = sorted(address for address in layout["workspace"].values() if address)
    assert all(address % 256 == 0 for address in starts)
    assert len(starts) == len(set(starts))
    assert starts[0] == 4096
    assert starts[-1] < 4096 + layout["bytes"]


@pytest.mark.parametrize("mode", [GemmMode.BF16, GemmMode.FP8_WEIGHTS])
def test_the_memory_plan_counts_the_buffers_of_one_forward(emulator: Emulator, mode: GemmMode):
    sizes = of_mode(replace(QWEN3, num_tokens=8192), mode)
    laid_out = emulator.layout(problem_of(sizes), GroupedVariant(mode), 132)["bytes"]
    request = MemoryRequest(
        model=qwen3_30b_a3b(), device_bytes=80 * GIB, num_devices=1, gpu_memory_utilization=0.9,
        max_num_batched_tokens=8192, max_num_seqs=1, max_model_len=None,
    )  # fmt: skip
    counted = activation_bytes(replace(request, kernel_tokens=8192)) - activation_bytes(request)
    assert 0.3 * GIB < laid_out < 0.45 * GIB
    assert counted == pytest.approx(laid_out, rel=0.1)
