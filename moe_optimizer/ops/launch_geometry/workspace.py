"""Device memory that one call needs besides its tensors: names, sizes, and where they lie in one buffer.

The caller allocates the buffer, so a call inside a CUDA graph allocates nothing by itself. What the buffer holds
before the call does not matter. The counters are another matter: zero before the first call, and left zero by every
call that finishes; two calls that may run at the same time must not share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.ops.launch_geometry.decode import MAX_PAIRS, TILE_ROWS, DecodeGeometry
from moe_optimizer.ops.launch_geometry.grouped import GemmMode, GroupedGeometry
from moe_optimizer.ops.launch_geometry.hopper import expect
from moe_optimizer.ops.launch_geometry.routing import RoutingGeometry
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes, ceil_div

ALIGNMENT = 256

COUNTERS = {"slot_arrivals": MAX_PAIRS, "tile_arrivals": 1022, "block_arrivals": 1, "route_arrivals": 1}
"""Zeroed int32 counters by name, in order. tile_arrivals covers H up to 32,704."""


def counter_offset(name: str) -> int:
    """Return the index of the first int32 of the counter `name`."""
    names = list(COUNTERS)
    return sum(COUNTERS[other] for other in names[: names.index(name)])


def num_counters() -> int:
    """Return the int32 elements of one set of counters."""
    return sum(COUNTERS.values())


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each named part lies in the buffer: byte offsets, or None for a part this call does not use."""

    offsets: dict[str, int | None]
    total_bytes: int


def decode_layout(sizes: MoeSizes, geometry: DecodeGeometry) -> Layout:
    """Return the workspace of the small-batch kernel: h in BF16, y in FP32, a row per pair."""
    expect(
        geometry.down_tiles <= COUNTERS["tile_arrivals"],
        "flash_dmoe_decode",
        f"tiles of {TILE_ROWS} rows in H = {sizes.hidden_size}",
        geometry.down_tiles,
        f"at most {COUNTERS['tile_arrivals']}",
    )
    pairs = sizes.num_pairs
    return _pack({"h": pairs * sizes.intermediate_size * 2, "y": pairs * sizes.hidden_size * 4})


def grouped_layout(
    sizes: MoeSizes, geometry: GroupedGeometry, routing: RoutingGeometry, *, has_router: bool = False
) -> Layout:
    """Return the workspace of the grouped path, in the order of `GroupedWorkspace` in csrc/launch/arguments.h."""
    pairs, tokens, hidden, width = sizes.num_pairs, sizes.num_tokens, sizes.hidden_size, sizes.intermediate_size
    fp8 = geometry.mode == GemmMode.FP8
    token_bytes = {GemmMode.BF16: 0, GemmMode.FP8_WEIGHTS: 2, GemmMode.FP8: 1}[geometry.mode]
    return _pack(
        {
            "block_counts": routing.blocks * sizes.num_experts * 4,
            "pair_rank": pairs * 4,
            "expert_offsets": (sizes.num_experts + 1) * 4,
            "sorted_pair": pairs * 4,
            "pair_position": pairs * 4,
            "tiles": geometry.max_tiles * 16,
            "num_tiles": 4,
            "h": pairs * width * 2,
            "y": pairs * hidden * 2,
            "tokens": tokens * hidden * token_bytes,
            "token_scale": tokens * ceil_div(hidden, 128) * 4 * fp8,
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
