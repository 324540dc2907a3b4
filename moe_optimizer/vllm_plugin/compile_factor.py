"""Keeps compiled graphs with our parts in them apart from stock ones in vLLM's compile cache.

vLLM caches compiled models on disk under a key made of its configuration and its environment variables. On CPU
the MoE layer is part of the graph, but neither the class that computes it nor a counter in its router is part of the
key: with and without the plugin it is the same. Loading the graph that a stock server left would make our kernel
silently not run, and a stock server could load ours. vLLM 0.32's CPU build happens to fail when it loads such a file
and compiles again; a version that loads it must find another key.
"""

from __future__ import annotations

from moe_optimizer import __version__
from moe_optimizer.vllm_plugin.session import current_session

FACTOR = "MOE_OPTIMIZER_EXPERTS"
"""Key of the factor in vLLM's table of variables. No such environment variable is read."""


def add_compile_factor() -> str:
    """Add the factor to vLLM's table. Returns "" or why that cannot be done."""
    from vllm import envs

    variables = getattr(envs, "environment_variables", None)
    if not isinstance(variables, dict) or not callable(getattr(envs, "compile_factors", None)):
        return "vllm.envs has no table of compile factors"
    variables[FACTOR] = _factor
    if FACTOR not in envs.compile_factors():
        del variables[FACTOR]
        return "vllm.envs.compile_factors does not read its table"
    return ""


def _factor() -> str | None:
    session = current_session()
    if session is None:
        return None
    applied = sorted(name for name, entry in session.proof.passes.items() if entry.applied)
    return f"moe-optimizer {__version__}: {', '.join(applied)}" if applied else None
