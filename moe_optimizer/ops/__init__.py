"""The operations of a Mixture-of-Experts layer, compiled where they can be, in plain torch where not.

Importing this package imports no torch; using a name of it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_optimizer.ops._load import best_isa, kernels_available
    from moe_optimizer.ops.fused_experts import fused_experts, why_reference

__all__ = ["best_isa", "fused_experts", "kernels_available", "why_reference"]

_HOME = {
    "best_isa": "moe_optimizer.ops._load",
    "fused_experts": "moe_optimizer.ops.fused_experts",
    "kernels_available": "moe_optimizer.ops._load",
    "why_reference": "moe_optimizer.ops.fused_experts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    # A submodule of the same name is bound here by its import; the function takes its place for good.
    globals()[name] = value
    return value
