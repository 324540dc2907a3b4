"""The operations of a Mixture-of-Experts layer, and attention over pages: compiled where they can be, else plain torch.

Importing this package imports no torch; using a name of it does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_optimizer.ops._load import best_isa as best_isa
    from moe_optimizer.ops._load import kernels_available as kernels_available
    from moe_optimizer.ops.flash_dmoe import flash_dmoe as flash_dmoe
    from moe_optimizer.ops.fused_experts import fused_experts as fused_experts
    from moe_optimizer.ops.fused_experts import why_reference as why_reference
    from moe_optimizer.ops.gate_topk import gate_topk as gate_topk
    from moe_optimizer.ops.huge_pages import use_huge_pages as use_huge_pages
    from moe_optimizer.ops.paged_attention import paged_attention as paged_attention
    from moe_optimizer.ops.skinny_gemm import skinny_gemm as skinny_gemm
    from moe_optimizer.ops.sparse_experts import sparse_experts as sparse_experts

_HOME = {
    "best_isa": "_load",
    "flash_dmoe": "flash_dmoe",
    "fused_experts": "fused_experts",
    "gate_topk": "gate_topk",
    "kernels_available": "_load",
    "paged_attention": "paged_attention",
    "skinny_gemm": "skinny_gemm",
    "sparse_experts": "sparse_experts",
    "use_huge_pages": "huge_pages",
    "why_reference": "fused_experts",
}


class _OpsPackage(ModuleType):
    """The package itself. An op and its module share a name; the attribute is the op, whichever is imported first."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule sets it as attribute of its package: not where that would hide the op.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _OpsPackage
