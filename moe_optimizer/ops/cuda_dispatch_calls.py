"""From a problem and a launch geometry to the structs that a compiled call takes.

Works for tensors on any device: the tests hand the structs to the kernels' emulation on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.ops.kernel_arguments import CudaProblem, Fields, experts_fields
from moe_optimizer.ops.launch_geometry.direct import DirectGeometry
from moe_optimizer.ops.launch_geometry.grouped import GroupedGeometry
from moe_optimizer.ops.launch_geometry.routing import RoutingGeometry
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes
from moe_optimizer.ops.launch_geometry.workspace import Layout, direct_layout, grouped_layout


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


def direct_call(problem: CudaProblem, geometry: DirectGeometry) -> KernelCall:
    """Return the call of the direct kernels."""
    layout = direct_layout(sizes_of(problem), has_router=problem.router is not None)
    launch: Fields = {name: getattr(geometry, name) for name in geometry.__slots__}
    return _call(problem, layout, launch)


def grouped_call(
    problem: CudaProblem, geometry: GroupedGeometry, routing: RoutingGeometry, counters: Tensor
) -> KernelCall:
    """Return the call of the grouped path; `counters`: int32, zero, see launch_geometry/workspace.py."""
    layout = grouped_layout(sizes_of(problem), geometry, routing, has_router=problem.router is not None)
    launch: Fields = {
        "mode": int(geometry.mode),
        "tile_tokens": geometry.tile_tokens,
        "num_stages": geometry.num_stages,
        "shared_bytes": geometry.shared_bytes,
        "grid": geometry.grid,
        "route_blocks": routing.blocks,
        "route_shared_bytes": routing.shared_bytes,
        "prepare_blocks": geometry.prepare_blocks,
        "cluster_blocks": geometry.cluster_blocks,
    }
    return _call(problem, layout, launch, counters)


def _call(problem: CudaProblem, layout: Layout, launch: Fields, counters: Tensor | None = None) -> KernelCall:
    buffer = torch.empty(layout.total_bytes, dtype=torch.uint8, device=problem.x.device)
    start = buffer.data_ptr()
    workspace: Fields = {name: 0 if at is None else start + at for name, at in layout.offsets.items()}
    if counters is not None:
        workspace["block_arrivals"] = counters.data_ptr()
    router = None if problem.router is None else problem.router.fields()
    return KernelCall(experts_fields(problem, problem.out), router, workspace, launch, buffer, counters)
