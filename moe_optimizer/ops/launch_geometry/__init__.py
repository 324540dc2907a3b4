"""Protocols of the CUDA kernels, computed and checked without a GPU.

Each module mirrors one kernel header of csrc/include/moeopt: it chooses tile shapes, stages and grid from
the problem's sizes, and checks what the hardware and the kernel's barriers demand. The launchers take these numbers as
they are; the compiled constants they rest on are compared in the tests.
"""

from __future__ import annotations

from moe_optimizer.ops.launch_geometry.direct import DirectGeometry, direct_geometry
from moe_optimizer.ops.launch_geometry.grouped import GemmMode, GroupedGeometry, grouped_geometry
from moe_optimizer.ops.launch_geometry.hopper import GeometryError
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes

__all__ = [
    "DirectGeometry",
    "GemmMode",
    "GeometryError",
    "GroupedGeometry",
    "MoeSizes",
    "direct_geometry",
    "grouped_geometry",
]
