"""Launch of the kernels that sort token-expert pairs by expert.

Mirrors csrc/include/moeopt/route_pairs.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.ops.launch_geometry.hopper import check_shared, expect
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes, ceil_div

KERNEL = "route_pairs"
THREADS = 256
PAIRS_PER_BLOCK = 1024
WARPS = THREADS // 32
FIXED_SHARED_BYTES = (1 + WARPS) * 4
"""The last-block flag and the warps' sums."""
MAX_PAIRS = 2**31 - 1
ALIGNMENT_SLACK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingGeometry:
    """One sort."""

    blocks: int
    """1: a single block counts and places in one launch. More: a second launch places, after the counts of all."""
    shared_bytes: int


def routing_geometry(sizes: MoeSizes) -> RoutingGeometry:
    """Return the launch for `sizes`; raise GeometryError where 32-bit pair numbers do not reach."""
    pairs = sizes.num_pairs
    expect(pairs <= MAX_PAIRS, KERNEL, f"T x k = {sizes.num_tokens} x {sizes.top_k}", pairs, f"at most {MAX_PAIRS}")
    blocks = max(1, ceil_div(pairs, PAIRS_PER_BLOCK))
    shared = check_shared(
        KERNEL,
        {
            f"counts of {sizes.num_experts} experts": sizes.num_experts * 4,
            f"the same for each of {WARPS} warps": WARPS * sizes.num_experts * 2,
            "flag and sums": FIXED_SHARED_BYTES,
            "alignment": ALIGNMENT_SLACK,
        },
    )
    return RoutingGeometry(blocks=blocks, shared_bytes=shared)
