"""From a problem and a launch geometry to the three integer lists that a compiled call takes.

Works for tensors on any device: the tests hand the lists to the kernels' emulation on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.ops.cuda_dispatch_problem import CudaProblem
from moe_optimizer.ops.launch_geometry.direct import DirectGeometry
from moe_optimizer.ops.launch_geometry.grouped import GroupedGeometry
from moe_optimizer.ops.launch_geometry.routing import RoutingGeometry
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes
from moe_optimizer.ops.launch_geometry.workspace import Layout, direct_layout, grouped_layout

_GROUPED_ORDER_BEFORE_COUNTER = (
    "block_counts", "pair_rank", "expert_offsets", "sorted_token", "pair_position", "tiles", "num_tiles", "tasks_taken",
)  # fmt: skip
_GROUPED_ORDER_AFTER_COUNTER = (
    "h", "y", "tokens", "token_scale", "h_quantized", "h_scale", "topk_ids", "topk_weights",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Arguments of one compiled call."""

    values: list[int]
    workspace: list[int]
    geometry: list[int]
    buffer: Tensor
    """Keeps the workspace alive; its contents before the call do not matter."""
    counters: Tensor | None = None
    """Keeps the counters alive."""


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


def direct_call(problem: CudaProblem, geometry: DirectGeometry) -> KernelCall:
    """Return the call of the direct kernels."""
    layout = direct_layout(sizes_of(problem), has_router=problem.router is not None)
    buffer = _buffer(layout, problem)
    workspace = [_part(buffer, layout, name) for name in ("h", "topk_ids", "topk_weights")]
    launch = [
        geometry.up_grid,
        geometry.up_shared_bytes,
        geometry.down_grid,
        geometry.down_shared_bytes,
        int(geometry.up_wide),
    ]
    return KernelCall(problem.values(), workspace, launch, buffer)


def grouped_call(
    problem: CudaProblem, geometry: GroupedGeometry, routing: RoutingGeometry, counters: Tensor
) -> KernelCall:
    """Return the call of the grouped path; `counters`: int32, zero, see launch_geometry/workspace.py."""
    layout = grouped_layout(sizes_of(problem), geometry, routing, has_router=problem.router is not None)
    buffer = _buffer(layout, problem)
    workspace = [_part(buffer, layout, name) for name in _GROUPED_ORDER_BEFORE_COUNTER]
    workspace.append(counters.data_ptr())
    workspace += [_part(buffer, layout, name) for name in _GROUPED_ORDER_AFTER_COUNTER]
    launch = [
        int(geometry.mode),
        geometry.tile_tokens,
        geometry.num_stages,
        geometry.shared_bytes,
        geometry.grid,
        routing.blocks,
        routing.shared_bytes,
        geometry.prepare_blocks,
        geometry.cluster_blocks,
    ]
    return KernelCall(problem.values(), workspace, launch, buffer, counters)


def _buffer(layout: Layout, problem: CudaProblem) -> Tensor:
    return torch.empty(layout.total_bytes, dtype=torch.uint8, device=problem.x.device)


def _part(buffer: Tensor, layout: Layout, name: str) -> int:
    offset = layout.offsets[name]
    return 0 if offset is None else buffer.data_ptr() + offset
