"""The memory under all decisions, and the error where it is not enough."""

from __future__ import annotations

import dataclasses
import math

from moe_optimizer.errors import DoesNotFitError
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan_context.context import PlanContext

_GIB = 2**30


def memory_under_decisions(context: PlanContext) -> MemoryPlan:
    """Return the memory of the fullest device under all decisions."""
    cache = context.decided["kv_cache"].params
    shortest = context.workload.input_tokens + context.workload.output_tokens
    terms = context.memory_terms(cache["kv_bits"])
    memory = context.memory(**terms, max_model_len=min(shortest, cache["wanted_model_len"] or shortest))
    if context.device == "cuda":
        return memory
    size = cache["host_cache_gib"] * _GIB
    if size > memory.kv_cache_bytes:
        # The CPU build takes whole GiB of cache, so less than one is none.
        return dataclasses.replace(memory, fits=False)
    unneeded = memory.kv_cache_bytes - size
    lost_tokens = math.ceil(unneeded / memory.kv_bytes_per_token) if memory.kv_bytes_per_token else 0
    return dataclasses.replace(memory, kv_cache_bytes=size, kv_tokens=max(0, memory.kv_tokens - lost_tokens))


def require_fit(context: PlanContext, memory: MemoryPlan) -> None:
    """Raise DoesNotFitError, with how many devices would do, unless `memory` fits."""
    if memory.fits:
        return
    device = context.gpu.name if context.device == "cuda" else "this machine"
    size = context.tensor_parallel_size
    machines = f"{context.num_nodes} machines of " if context.num_nodes > 1 else ""
    where = f"{machines}{size} x {device}" if context.device == "cuda" else device
    used = memory.weight_bytes + memory.activation_bytes + memory.workspace_bytes
    message = (
        f"{context.model.name} does not fit {where}: each needs {_gb(memory.weight_bytes)} of weights and "
        f"{_gb(used - memory.weight_bytes)} to work in, and may use {_gb(memory.budget_bytes)} of "
        f"{_gb(memory.total_bytes)}"
    )
    raise DoesNotFitError(message, hint=_fit_hint(context, size))


def _fit_hint(context: PlanContext, size: int) -> str:
    if context.device == "cpu":
        return "use a smaller model or a machine with more memory"
    terms = context.memory_terms(context.decided["kv_cache"].params["kv_bits"]) | {"num_devices": 1}
    stored = context.memory(**terms).min_devices
    needs = {
        f"as stored ({context.model.quant_method or context.dtype})": stored,
        "in BF16": context.memory(**terms, expert_bits=16, linear_bits=16).min_devices,
        "in FP8": context.memory(**terms, expert_bits=8, linear_bits=8).min_devices,
    }
    words = ", ".join(f"{count if count is not None else 'more than 64'} {how}" for how, count in needs.items())
    there = context.hardware.num_gpus
    if stored is not None and size < stored <= there:
        return f"GPUs of this kind needed: {words}; {there} are there: use --gpus {stored}"
    return f"GPUs of this kind needed: {words}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
