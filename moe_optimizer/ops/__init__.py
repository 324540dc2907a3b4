"""The operations of a Mixture-of-Experts layer, compiled where they can be, in plain torch where not.

Importing this package imports no torch; using a name of it does.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_optimizer.ops._load import best_isa, kernels_available
    from moe_optimizer.ops.flash_dmoe import flash_dmoe
    from moe_optimizer.ops.fused_experts import fused_experts, why_reference
    from moe_optimizer.ops.huge_pages import use_huge_pages
    from moe_optimizer.ops.sparse_experts import sparse_experts

__all__ = [
    "best_isa",
    "flash_dmoe",
    "fused_experts",
    "kernels_available",
    "sparse_experts",
    "use_huge_pages",
    "why_reference",
]

_HOME = {
    "best_isa": "moe_optimizer.ops._load",
    "flash_dmoe": "moe_optimizer.ops.flash_dmoe",
    "fused_experts": "moe_optimizer.ops.fused_experts",
    "kernels_available": "moe_optimizer.ops._load",
    "sparse_experts": "moe_optimizer.ops.sparse_experts",
    "use_huge_pages": "moe_optimizer.ops.huge_pages",
    "why_reference": "moe_optimizer.ops.fused_experts",
}


class _OpsPackage(ModuleType):
    """The package itself. An op and its module share a name; the attribute is the op, whichever is imported first."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule sets it as attribute of its package: not where that would hide the op.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _OpsPackage
