"""Launch of the direct kernels, for small batches.

Mirrors csrc/include/moeopt/direct_experts.cuh and direct_routing.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.ops.launch_geometry.hopper import SHARED_BYTES, check_shared, expect
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes, ceil_div

KERNEL = "direct_experts"
TOKENS = 64
"""Bits of an expert's mask of tokens."""
PAIRS = 512
UP_WARPS = 8
DOWN_WARPS = 16
UP_BLOCKS = {2: 4, 1: 2}
"""Blocks per multiprocessor of the first launch by bytes of a weight."""
WIDE_UP_BLOCKS = 2
"""The same in wide steps, which are compiled for BF16."""
ROWS = 16
"""Rows of the output that a block of the second launch owns."""
UP_ROWS = {2: 8, 1: 16}
"""Gate rows of a tile of the first launch, and as many ups, by bytes of a weight."""
ROUTING_BYTES = (PAIRS * 4 + PAIRS * 3 * 2 + (PAIRS + 2) * 2 + 3 * 4 + 16 * 4 + 15) // 16 * 16
SCRATCH_PER_EXPERT = 12
UP_SUM_BYTES = UP_WARPS * 2 * 128 * 4
DOWN_SUM_BYTES_PER_TOKEN = DOWN_WARPS * ROWS * 4
ALIGNMENT_SLACK = 1024
"""Shared memory lost when its base is rounded up to 1024 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectGeometry:
    """Both launches: the fields of `DirectLaunch` in csrc/launch/problem.h."""

    up_grid: int
    up_shared_bytes: int
    down_grid: int
    down_shared_bytes: int
    up_wide: bool
    """The first launch reads 256 bytes of a weight row per step, not 128."""


def direct_geometry(sizes: MoeSizes, *, num_multiprocessors: int, shared_limit: int = SHARED_BYTES) -> DirectGeometry:
    """Return the launches for `sizes`; raise GeometryError, with the number, where the kernels do not cover them."""
    expect(sizes.num_tokens <= TOKENS, KERNEL, "T", sizes.num_tokens, f"at most {TOKENS}")
    pairs = sizes.num_pairs
    expect(pairs <= PAIRS, KERNEL, f"T x k = {sizes.num_tokens} x {sizes.top_k}", pairs, f"at most {PAIRS}")
    expect(sizes.hidden_size % 16 == 0, KERNEL, "H", sizes.hidden_size, "a multiple of 16")
    expect(sizes.intermediate_size % 16 == 0, KERNEL, "I", sizes.intermediate_size, "a multiple of 16")

    def shared(sum_bytes: int) -> int:
        scratch = SCRATCH_PER_EXPERT * sizes.num_experts
        parts = {
            "routing tables": ROUTING_BYTES,
            "sums or routing scratch": max(sum_bytes, scratch),
            "alignment": ALIGNMENT_SLACK,
        }
        return check_shared(KERNEL, parts, shared_limit)

    tiles = pairs * (sizes.intermediate_size // UP_ROWS[sizes.weight_bytes])
    up_wide = sizes.weight_bytes == 2 and _divides_better(
        tiles, num_multiprocessors * WIDE_UP_BLOCKS, num_multiprocessors * UP_BLOCKS[2]
    )
    up_blocks = WIDE_UP_BLOCKS if up_wide else UP_BLOCKS[sizes.weight_bytes]
    return DirectGeometry(
        up_grid=min(num_multiprocessors * up_blocks, tiles),
        up_shared_bytes=shared(UP_SUM_BYTES),
        down_grid=min(num_multiprocessors, sizes.hidden_size // ROWS),
        down_shared_bytes=shared(DOWN_SUM_BYTES_PER_TOKEN * sizes.num_tokens),
        up_wide=up_wide,
    )


def _divides_better(tiles: int, few_blocks: int, many_blocks: int) -> bool:
    """Return whether `tiles` fill the rounds of few blocks better, where many have less than two rounds of them.

    In more rounds the blocks drift apart, and many keep the memory busier.
    """

    def filled(blocks: int) -> float:
        return tiles / (ceil_div(tiles, blocks) * blocks)

    return tiles < 2 * many_blocks and filled(few_blocks) > filled(many_blocks)
