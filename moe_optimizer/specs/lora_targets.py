"""Tells which modules LoRA adapters may change, from the names that a server limits them to."""

from __future__ import annotations

from collections.abc import Sequence


def reach_experts(target_modules: Sequence[str] | None) -> bool:
    """Return whether vLLM gives the routed experts of a MoE layer LoRA weights.

    It wraps a module whose name, or the last part of it, is among the target modules, and a layer's experts also for
    the name of one of their matrices ("experts.0.gate_proj"). Its models call them "experts", or by a name that ends
    so. Shared experts are linears, which no kernel of ours computes.

    Args:
        target_modules: of vLLM's --lora-target-modules; None: every module.
    """
    if target_modules is None:
        return True
    parts = {part for name in target_modules for part in name.split(".")}
    return any(part.endswith("experts") for part in parts - {"shared_experts"})
