"""From a problem and a launch geometry to the structs and the device memory of a compiled call.

Kernels allocate nothing. What the workspace holds before the call does not matter. The counters are zero before the
first call, and every call that finishes leaves them zero; two calls that may run at the same time must not share them.

Works for tensors on any device: the tests hand the structs to the kernels' emulation on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.ops.kernel_arguments import CudaProblem, Fields, experts_fields
from moe_optimizer.ops.launch_geometry.direct import DirectGeometry
from moe_optimizer.ops.launch_geometry.grouped import GemmMode, GroupedGeometry
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes, ceil_div

ALIGNMENT = 256
COUNTERS = 1
"""Zeroed int32 counters of one set: the arrivals of the blocks that count pairs."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Arguments of one compiled call: structs of csrc/launch/problem.h."""

    experts: Fields
    router: Fields | None
    workspace: Fields
    launch: Fields
    buffer: Tensor
    """Keeps the workspace alive; its contents before the call do not matter."""
    counters: Tensor | None = None
    """Keeps the counters alive."""

    @property
    def structs(self) -> tuple[Fields, Fields | None, Fields, Fields]:
        """The arguments in the order of the compiled function."""
        return self.experts, self.router, self.workspace, self.launch

    def part(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return the first `count` elements of a part of the workspace."""
        start = int(self.workspace[name]) - self.buffer.data_ptr()
        return self.buffer[start : start + count * dtype.itemsize].view(dtype)


def sizes_of(problem: CudaProblem) -> MoeSizes:
    """Return the sizes of a problem."""
    return MoeSizes(
        num_tokens=problem.x.shape[0],
        top_k=problem.top_k,
        num_experts=problem.w13.shape[0],
        hidden_size=problem.x.shape[1],
        intermediate_size=problem.w2.shape[2],
        weight_bytes=problem.w13.element_size(),
    )


def direct_parts(sizes: MoeSizes, *, has_router: bool = False) -> dict[str, int]:
    """Return the bytes of every part of `DirectWorkspace` in csrc/launch/problem.h."""
    pairs = sizes.num_pairs
    routed = pairs * 4 * has_router
    return {"h": pairs * sizes.intermediate_size * 2, "topk_ids": routed, "topk_weights": routed}


def grouped_parts(sizes: MoeSizes, geometry: GroupedGeometry, *, has_router: bool = False) -> dict[str, int]:
    """Return the bytes of every part of `GroupedWorkspace` in csrc/launch/problem.h but the counters."""
    pairs, tokens, hidden, width = sizes.num_pairs, sizes.num_tokens, sizes.hidden_size, sizes.intermediate_size
    fp8 = geometry.mode == GemmMode.FP8
    token_bytes = {GemmMode.BF16: 0, GemmMode.FP8_WEIGHTS: 2, GemmMode.FP8: 1}[geometry.mode]
    return {
        "block_counts": geometry.route_blocks * sizes.num_experts * 4,
        "pair_rank": pairs * 4,
        "expert_offsets": (sizes.num_experts + 1) * 4,
        "sorted_token": pairs * 4,
        "pair_position": pairs * 4,
        "tiles": geometry.max_tiles(sizes) * 16,
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


def direct_call(problem: CudaProblem, geometry: DirectGeometry) -> KernelCall:
    """Return the call of the direct kernels."""
    return _call(problem, geometry, direct_parts(sizes_of(problem), has_router=problem.router is not None))


def grouped_call(problem: CudaProblem, geometry: GroupedGeometry, counters: Tensor) -> KernelCall:
    """Return the call of the grouped path; `counters`: int32 [COUNTERS]."""
    parts = grouped_parts(sizes_of(problem), geometry, has_router=problem.router is not None)
    call = _call(problem, geometry, parts, counters)
    call.workspace["block_arrivals"] = counters.data_ptr()
    return call


def _call(
    problem: CudaProblem, geometry: DirectGeometry | GroupedGeometry, parts: dict[str, int],
    counters: Tensor | None = None,
) -> KernelCall:  # fmt: skip
    """Lay the parts out in one buffer; a part without bytes is null."""
    ends = [0]
    for size in parts.values():
        ends.append(ends[-1] + ceil_div(size, ALIGNMENT) * ALIGNMENT)
    buffer = torch.empty(ends[-1], dtype=torch.uint8, device=problem.x.device)
    start = buffer.data_ptr()
    workspace: Fields = {name: start + at if parts[name] else 0 for name, at in zip(parts, ends, strict=False)}
    launch: Fields = {name: getattr(geometry, name) for name in geometry.__slots__}
    router = None if problem.router is None else problem.router.fields()
    return KernelCall(experts_fields(problem, problem.out), router, workspace, launch, buffer, counters)
