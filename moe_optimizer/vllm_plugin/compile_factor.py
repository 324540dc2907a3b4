"""Keeps compiled graphs with our parts in them apart from those of stock vLLM in its compile cache.

vLLM caches compiled models on disk under a key made of its configuration and environment variables. On the CPU the MoE
layer is part of the graph, but neither the class that computes it nor a counter in its router is part of the key.
Without a factor of ours a worker could load the graph of stock vLLM, and our kernel would silently not run; stock vLLM
could load ours. What else of a pass is in the graph is a part of the factor, too: which dense layers call our op is
measured at load.
"""

from __future__ import annotations

from moe_optimizer import __version__
from moe_optimizer.vllm_plugin.session import current_session

FACTOR = "MOE_OPTIMIZER_EXPERTS"
"""Key of the factor in vLLM's table of variables. No such environment variable is read."""


def add_compile_factor() -> str:
    """Add the factor to vLLM's table; return "" or why that cannot be done."""
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
    parts = [f"{name} {session.graph_parts.get(name, '')}".strip() for name in applied]
    return f"moe-optimizer {__version__}: {', '.join(parts)}" if parts else None
