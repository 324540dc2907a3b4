"""Launches of the grouped path: blocks that route, token tile, ring stages, grid.

Mirrors csrc/include/moeopt/route_pairs.cuh and grouped_gemm_sm90_shape.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from moe_optimizer.ops.launch_geometry.hopper import SHARED_BYTES, check_shared, expect
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes, ceil_div

KERNEL = "grouped_gemm"
THREADS = 384
PRODUCER_THREADS = 128
ROUTE_WARPS = 8
PAIRS_PER_BLOCK = 1024
ROUTE_FIXED_BYTES = (1 + ROUTE_WARPS) * 4
"""The last-block flag and the warps' sums."""
BOX_ROWS = 128
BOXES = 2
PREPARE_WARPS = 8
ALIGNMENT_SLACK = 1024
MAX_PAIRS = 2**31 - 1
QUEUE_SLOTS = 16
"""Slots for work tiles on their way from the weights warp to the other warps of a block."""
QUEUE_BYTES = QUEUE_SLOTS * (16 + 8) + 8
"""Per slot a work tile and a barrier; one barrier that says the math warps have no work left."""
EXACT_COLUMNS = 64
"""FP8: up to so many columns partial sums are added in FP32, in wider tiles by the tensor cores."""
STAGED_TOKENS = 64
"""Tokens that pass through a math warpgroup's output buffer at a time, in BF16."""
SWIZZLE_BYTES = 128
"""Bytes of a weight row per stage: one swizzled row of the tensor copy."""


class GemmMode(IntEnum):
    """What the tensor cores multiply; codes of csrc/include/moeopt/fused_experts.h."""

    BF16 = 0
    FP8_WEIGHTS = 1
    """E4M3 weights, BF16 tokens: weights become BF16 in registers."""
    FP8 = 2
    """E4M3 weights and tokens: x with one scale per token, h with one per token and 128."""


RELEASE_LAG = {GemmMode.BF16: 1, GemmMode.FP8_WEIGHTS: 0, GemmMode.FP8: 1}
"""Stages by which the math warps' release trails: BF16 releases s once s + 1 is issued, FP8 once s + 1 is there."""
TILE_TOKENS = {
    GemmMode.BF16: (16, 32, 64, 96, 128, 160),
    GemmMode.FP8_WEIGHTS: (16, 32, 64),
    GemmMode.FP8: (32, 64, 96, 144),
}
"""Token tiles that are compiled (`CompiledTiles`): up to where sums and partial sums fit the registers."""
PAIRED_TILES = {GemmMode.BF16: (160,), GemmMode.FP8_WEIGHTS: (), GemmMode.FP8: (144,)}
"""Tiles worth pairing: the widest. Two blocks that share the weights read a third less from L2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGeometry:
    """The fields of `GroupedLaunch` in csrc/launch/problem.h."""

    mode: GemmMode
    tile_tokens: int
    cluster_blocks: int
    """2: blocks in pairs, each pair on two token tiles of one expert, every weight read once for both."""
    num_stages: int
    shared_bytes: int
    grid: int
    route_blocks: int
    """1: a single block counts and places in one launch. More: a second launch places, after the counts of all."""
    route_shared_bytes: int
    prepare_blocks: int
    """Blocks that prepare the tokens, beside those that count pairs: a warp per token (FP8) or per 128 elements."""

    def max_tiles(self, sizes: MoeSizes) -> int:
        """Return the token tiles that can arise: all full tiles, and per expert a started one (a started pair)."""
        started = min(sizes.num_experts, sizes.num_pairs)
        return self.cluster_blocks * (sizes.num_pairs // (self.tile_tokens * self.cluster_blocks) + started)


def stage_bytes(mode: GemmMode, tile_tokens: int) -> int:
    """Return the shared memory of one ring stage: weights, tokens, scales."""
    token_bytes = tile_tokens * SWIZZLE_BYTES * (2 if mode == GemmMode.FP8_WEIGHTS else 1)
    # At most 176 floats, in wide FP8 tiles 144 more; in KiB, so that every swizzled tile starts on one.
    scale_bytes = 0 if mode == GemmMode.BF16 else 2048 if mode == GemmMode.FP8 and tile_tokens > EXACT_COLUMNS else 1024
    return BOXES * BOX_ROWS * SWIZZLE_BYTES + token_bytes + scale_bytes


def grouped_geometry(
    sizes: MoeSizes,
    mode: GemmMode,
    *,
    num_multiprocessors: int,
    tile_tokens: int | None = None,
    num_stages: int | None = None,
    paired: bool = False,
) -> GroupedGeometry:
    """Return the launches for `sizes`; the GEMMs have one persistent block per multiprocessor.

    Args:
        sizes: the call.
        mode: what is multiplied; must fit `sizes.weight_bytes`.
        num_multiprocessors: of the device.
        tile_tokens: tokens per tile; None: from the average tokens per expert.
        num_stages: None: as many as fit.
        paired: clusters of two blocks.

    Raises:
        GeometryError: the problem or the choice is outside what is compiled; the message says which number.
    """
    expect(sizes.hidden_size % 16 == 0, KERNEL, "H", sizes.hidden_size, "a multiple of 16")
    expect(sizes.intermediate_size % 16 == 0, KERNEL, "I", sizes.intermediate_size, "a multiple of 16")
    weight_bytes = 2 if mode == GemmMode.BF16 else 1
    expect(
        sizes.weight_bytes == weight_bytes, KERNEL, f"bytes per weight in {mode.name}", sizes.weight_bytes, weight_bytes
    )
    if tile_tokens is None:
        tile_tokens = choose_tile_tokens(sizes, mode)
    expect(tile_tokens in TILE_TOKENS[mode], KERNEL, f"token tile in {mode.name}", tile_tokens, TILE_TOKENS[mode])

    cluster_blocks = 2 if paired else 1
    expect(num_multiprocessors >= cluster_blocks, KERNEL, "multiprocessors", num_multiprocessors, "2 for a pair")

    pairs = sizes.num_pairs
    expect(pairs <= MAX_PAIRS, KERNEL, f"T x k = {sizes.num_tokens} x {sizes.top_k}", pairs, f"at most {MAX_PAIRS}")
    route_shared = check_shared(
        KERNEL,
        {
            f"counts of {sizes.num_experts} experts": sizes.num_experts * 4,
            f"the same for each of {ROUTE_WARPS} warps": ROUTE_WARPS * sizes.num_experts * 2,
            "flag and sums": ROUTE_FIXED_BYTES,
            "alignment": ALIGNMENT_SLACK,
        },
    )
    stage = stage_bytes(mode, tile_tokens)
    # BF16 of 64 rows per token of a part of the tile; in FP8 also 1 / scale of every token.
    staging = 2 * (min(tile_tokens, STAGED_TOKENS) * SWIZZLE_BYTES + (4 * tile_tokens if mode == GemmMode.FP8 else 0))
    fixed = {
        "output staging of 2 warpgroups": staging,
        "work queue": QUEUE_BYTES,
        "alignment": ALIGNMENT_SLACK,
    }
    if num_stages is None:
        num_stages = min(8, (SHARED_BYTES - sum(fixed.values())) // (stage + 16))
    # Math warps that keep stage s until they have s + 1 need that one filled meanwhile, or both sides wait for ever.
    release_lag = RELEASE_LAG[mode]
    expect(
        num_stages >= release_lag + 1, KERNEL, "ring stages", num_stages, f"at least {release_lag} (release lag) + 1"
    )
    # A slot is written again without asking: the weights warp may be two work tiles and a ring of stages ahead of the
    # last warp that reads it; in a pair, a ring of either block.
    ahead = cluster_blocks * num_stages + 2
    expect(
        ahead <= QUEUE_SLOTS,
        KERNEL,
        "work tiles queued ahead",
        f"{ahead} ({cluster_blocks} x {num_stages} ring stages + 2)",
        f"at most {QUEUE_SLOTS} slots",
    )
    shared = check_shared(
        KERNEL,
        {f"{num_stages} stages of {stage}": num_stages * stage, f"{2 * num_stages} barriers": 16 * num_stages, **fixed},
    )
    return GroupedGeometry(
        mode=mode,
        tile_tokens=tile_tokens,
        cluster_blocks=cluster_blocks,
        num_stages=num_stages,
        shared_bytes=shared,
        grid=num_multiprocessors // cluster_blocks * cluster_blocks,
        route_blocks=max(1, ceil_div(pairs, PAIRS_PER_BLOCK)),
        route_shared_bytes=route_shared,
        prepare_blocks=min(_prepare_tasks(sizes, mode), 16 * num_multiprocessors),
    )


def _prepare_tasks(sizes: MoeSizes, mode: GemmMode) -> int:
    if mode == GemmMode.BF16:
        return 0
    per_token = 1 if mode == GemmMode.FP8 else ceil_div(sizes.hidden_size, 128)
    return ceil_div(sizes.num_tokens * per_token, PREPARE_WARPS)


def choose_tile_tokens(sizes: MoeSizes, mode: GemmMode) -> int:
    """Return the smallest compiled tile of at least 1.5 times the average tokens per expert.

    1.5: routing is uneven, and an expert that needs a second tile reads its weights again (from L2). Chosen by
    arithmetic; to be replaced by measurements.
    """
    wanted = 1.5 * sizes.num_pairs / max(1, sizes.num_experts)
    tiles = TILE_TOKENS[mode]
    return next((tile for tile in tiles if tile >= wanted), tiles[-1])
