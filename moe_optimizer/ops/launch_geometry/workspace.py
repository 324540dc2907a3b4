"""Device memory that one call needs besides its tensors: names, sizes, and where they lie in one buffer.

The caller allocates the buffer, so a call inside a CUDA graph allocates nothing by itself. What the buffer holds
before the call does not matter. The counters are another matter: zero before the first call, and left zero by every
call that finishes; two calls that may run at the same time must not share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.ops.launch_geometry.grouped import GemmMode, GroupedGeometry
from moe_optimizer.ops.launch_geometry.routing import RoutingGeometry
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes, ceil_div

ALIGNMENT = 256

COUNTERS = 1
"""Zeroed int32 counters of one set: the arrivals of the blocks that count pairs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each named part lies in the buffer: byte offsets, or None for a part this call does not use."""

    offsets: dict[str, int | None]
    total_bytes: int


def direct_layout(sizes: MoeSizes, *, has_router: bool = False) -> Layout:
    """Return the workspace of the direct kernels, the fields of `DirectWorkspace` in csrc/launch/problem.h."""
    pairs = sizes.num_pairs
    routed = pairs * 4 * has_router
    return _pack({"h": pairs * sizes.intermediate_size * 2, "topk_ids": routed, "topk_weights": routed})


def grouped_layout(
    sizes: MoeSizes, geometry: GroupedGeometry, routing: RoutingGeometry, *, has_router: bool = False
) -> Layout:
    """Return the workspace of the grouped path, the fields of `GroupedWorkspace` in csrc/launch/problem.h
    but the counters.
    """
    pairs, tokens, hidden, width = sizes.num_pairs, sizes.num_tokens, sizes.hidden_size, sizes.intermediate_size
    fp8 = geometry.mode == GemmMode.FP8
    token_bytes = {GemmMode.BF16: 0, GemmMode.FP8_WEIGHTS: 2, GemmMode.FP8: 1}[geometry.mode]
    return _pack(
        {
            "block_counts": routing.blocks * sizes.num_experts * 4,
            "pair_rank": pairs * 4,
            "expert_offsets": (sizes.num_experts + 1) * 4,
            "sorted_token": pairs * 4,
            "pair_position": pairs * 4,
            "tiles": geometry.max_tiles * 16,
            "num_tiles": 4,
            "tile_counters": 8,
            "h": pairs * width * 2 * (not fp8),
            "y": pairs * hidden * 2,
            "tokens": tokens * hidden * token_bytes,
            "token_scale": tokens * 4 * fp8,
            "h_quantized": pairs * width * fp8,
            "h_scale": pairs * ceil_div(width, 128) * 4 * fp8,
            "topk_ids": pairs * 4 * has_router,
            "topk_weights": pairs * 4 * has_router,
        }
    )


def _pack(parts: dict[str, int]) -> Layout:
    offsets: dict[str, int | None] = {}
    end = 0
    for name, size in parts.items():
        offsets[name] = end if size else None
        end += ceil_div(size, ALIGNMENT) * ALIGNMENT
    return Layout(offsets, end)
