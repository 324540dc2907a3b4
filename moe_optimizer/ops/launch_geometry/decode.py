"""Launch of the small-batch kernel: ring stages, chunk sizes, tasks, arrival counts.

Mirrors csrc/include/moeopt/flash_dmoe_decode.cuh and decode_routing.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.ops.launch_geometry.hopper import HOPPER, ChipLimits, expect
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes, ceil_div

KERNEL = "flash_dmoe_decode"
MAX_PAIRS = 512
MATH_WARPS = 8
PRODUCER_WARPS = 4
THREADS = (MATH_WARPS + PRODUCER_WARPS) * 32
TILE_ROWS = 32
STEP_BYTES = 64
STEPS_PER_WARP = 2
CHUNK_BYTES = MATH_WARPS * STEPS_PER_WARP * STEP_BYTES
ROW_PITCH = CHUNK_BYTES + 64
STAGE_BYTES = TILE_ROWS * ROW_PITCH
ROUTING_BYTES = MAX_PAIRS * 4 * 5 + (MAX_PAIRS + 1) * 4 + 3 * 4
DIRECT_TOKENS = 8
DIRECT_PAIRS = DIRECT_TOKENS * 32
DIRECT_UP_WARPS = 8
DIRECT_DOWN_WARPS = 16
DIRECT_UP_BLOCKS = {2: 3, 1: 2}
"""Blocks per multiprocessor by bytes of a weight."""
DIRECT_ROUTING_BYTES = DIRECT_PAIRS * 4 * (5 + DIRECT_TOKENS) + 16
DIRECT_SUM_BYTES = 8192
ALIGNMENT_SLACK = 1024
"""Shared memory lost when its base is rounded up to 1024 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGeometry:
    """One launch of the kernel, as the launcher takes it."""

    column_blocks: int
    """8-token column blocks of a slot: 1 or 2."""
    num_stages: int
    w13_chunk_bytes: int
    w2_chunk_bytes: int
    shared_bytes: int
    grid: int
    direct: bool
    """The two kernels without a ring (at most 8 tokens) instead of the one with it."""
    up_tiles: int
    """Arrivals per slot that open its GEMM2: I / 16."""
    down_tiles: int
    full_arrivals: int
    """Arrivals that open a full barrier: one per producer warp, with its bytes."""
    empty_arrivals: int
    """Arrivals that open an empty barrier: one per math warp."""
    transaction_bytes: int
    """Most bytes one stage can expect."""

    @property
    def bytes_in_flight(self) -> int:
        """Weight bytes one block can have outstanding: what must cover latency times bandwidth."""
        return self.num_stages * self.transaction_bytes


def decode_geometry(
    sizes: MoeSizes,
    *,
    num_multiprocessors: int,
    has_router: bool = False,
    num_global_experts: int | None = None,
    num_stages: int | None = None,
    direct: bool = False,
    limits: ChipLimits = HOPPER,
) -> DecodeGeometry:
    """Return the launch for `sizes`, one block per multiprocessor.

    Args:
        sizes: the call.
        num_multiprocessors: of the device; the grid is one resident block on each.
        has_router: router logits instead of top-k ids come in; needs scratch per expert.
        num_global_experts: columns of the logits; None: as many as local experts.
        num_stages: ring stages; None: as many as fit.
        direct: the two kernels without a ring instead of the one with it.
        limits: of the chip.

    Raises:
        GeometryError: the problem is outside what the kernel covers; the message says which number.
    """
    pairs = sizes.num_pairs
    expect(pairs <= MAX_PAIRS, KERNEL, f"T x k = {sizes.num_tokens} x {sizes.top_k}", pairs, f"at most {MAX_PAIRS}")
    expect(sizes.hidden_size % 16 == 0, KERNEL, "H", sizes.hidden_size, "a multiple of 16")
    expect(sizes.intermediate_size % 16 == 0, KERNEL, "I", sizes.intermediate_size, "a multiple of 16")
    if direct:
        num_global = sizes.num_experts if num_global_experts is None else num_global_experts
        return _direct_geometry(sizes, num_multiprocessors, num_global if has_router else 0, limits=limits)
    column_blocks = 1 if sizes.num_tokens <= 8 else 2
    reduction = MATH_WARPS * 2 * column_blocks * 128 * 4
    fixed = {
        "sums of 8 warps": reduction,
        "routing tables": ROUTING_BYTES,
        "alignment": ALIGNMENT_SLACK,
    }
    if num_stages is None:
        num_stages = (limits.shared_bytes_per_block - sum(fixed.values())) // (STAGE_BYTES + 16)
    expect(num_stages >= 2, KERNEL, "ring stages", num_stages, "at least 2")
    ring = num_stages * STAGE_BYTES
    shared = limits.check_shared(
        KERNEL, {f"{num_stages} stages": ring, f"{2 * num_stages} barriers": 16 * num_stages, **fixed}
    )
    if has_router:
        num_global = sizes.num_experts if num_global_experts is None else num_global_experts
        scratch = THREADS // 32 * num_global * 8
        expect(scratch <= ring, KERNEL, f"router scratch of {num_global} experts in the ring", scratch, f"<= {ring}")
    transaction = TILE_ROWS * CHUNK_BYTES
    expect(
        transaction <= limits.max_transaction_bytes,
        KERNEL,
        f"bytes of a stage: {TILE_ROWS} rows x {CHUNK_BYTES}",
        transaction,
        f"at most {limits.max_transaction_bytes}",
    )
    return DecodeGeometry(
        column_blocks=column_blocks,
        num_stages=num_stages,
        w13_chunk_bytes=_chunk_bytes(sizes.hidden_size * sizes.weight_bytes),
        w2_chunk_bytes=_chunk_bytes(sizes.intermediate_size * sizes.weight_bytes),
        shared_bytes=shared,
        grid=num_multiprocessors,
        direct=False,
        up_tiles=sizes.intermediate_size // 16,
        down_tiles=ceil_div(sizes.hidden_size, TILE_ROWS),
        full_arrivals=PRODUCER_WARPS,
        empty_arrivals=MATH_WARPS,
        transaction_bytes=transaction,
    )


def _direct_geometry(
    sizes: MoeSizes, num_multiprocessors: int, router_experts: int, *, limits: ChipLimits
) -> DecodeGeometry:
    """The kernel of csrc/include/moeopt/direct_decode.cuh; `router_experts`: columns of the logits, 0 without them."""
    expect(sizes.num_tokens <= DIRECT_TOKENS, KERNEL, "T without a ring", sizes.num_tokens, f"at most {DIRECT_TOKENS}")
    expect(sizes.num_pairs <= DIRECT_PAIRS, KERNEL, "T x k without a ring", sizes.num_pairs, f"at most {DIRECT_PAIRS}")
    shared = limits.check_shared(
        KERNEL,
        {
            "routing tables": DIRECT_ROUTING_BYTES,
            "sums or scratch": max(DIRECT_SUM_BYTES, DIRECT_DOWN_WARPS * router_experts * 8),
            "alignment": ALIGNMENT_SLACK,
        },
    )
    return DecodeGeometry(
        column_blocks=1,
        num_stages=0,
        w13_chunk_bytes=_chunk_bytes(sizes.hidden_size * sizes.weight_bytes),
        w2_chunk_bytes=_chunk_bytes(sizes.intermediate_size * sizes.weight_bytes),
        shared_bytes=shared,
        grid=min(
            num_multiprocessors * DIRECT_UP_BLOCKS[sizes.weight_bytes],
            sizes.num_pairs * (sizes.intermediate_size // 16),
        ),
        direct=True,
        up_tiles=sizes.intermediate_size // 16,
        down_tiles=ceil_div(sizes.hidden_size, TILE_ROWS),
        full_arrivals=0,
        empty_arrivals=0,
        transaction_bytes=0,
    )


def _chunk_bytes(row_bytes: int) -> int:
    """Equal chunks of a weight row, each a multiple of 64 bytes and at most CHUNK_BYTES.

    1536 bytes become 2 x 768 rather than 1024 + 512: the warps stay evenly loaded.
    """
    chunks = ceil_div(row_bytes, CHUNK_BYTES)
    return ceil_div(ceil_div(row_bytes, chunks), STEP_BYTES) * STEP_BYTES
