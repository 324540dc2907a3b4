"""Tells to which cores vLLM's CPU build binds the first worker of a plan: what the speed of its kernels depends on."""

from __future__ import annotations

from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cpu_cores import BINDING, core_lists, core_numbers

_AUTO, _NONE = "auto", "nobind"


def worker_cores(ctx: PlanContext) -> tuple[int, ...]:
    """Return the cores of a worker; other workers have as many, or one less."""
    cpu = ctx.cpu
    if ctx.num_servers > 1:
        return core_numbers(core_lists(cpu.core_ids, ctx.num_servers)[0])
    binding = ctx.decided["parallelism"].env.get(BINDING, ctx.software.core_binding)
    if binding == _NONE:
        return cpu.core_ids
    if binding != _AUTO:
        return core_numbers(binding.partition("|")[0]) or cpu.core_ids
    return _bound_by_vllm(ctx)


def worker_threads(ctx: PlanContext) -> int:
    """Return how many threads a worker computes with: as it says itself, else as vLLM will bind it."""
    return ctx.request.worker_threads or max(1, len(worker_cores(ctx)))


def _bound_by_vllm(ctx: PlanContext) -> tuple[int, ...]:
    """Return the cores of vLLM's automatic choice: worker N gets the physical cores of NUMA node N, and each leaves
    one to the scheduler if there are enough.
    """
    workers = ctx.parallelism.tensor_parallel_size
    nodes = ctx.cpu.physical_cores or (ctx.cpu.core_ids,)
    reserved = workers if ctx.software.reserved_cores is None else ctx.software.reserved_cores
    if sum(map(len, nodes[:workers])) <= reserved:
        return nodes[0]
    # Where they do not divide, the last workers leave one more.
    of_first = reserved // workers
    return nodes[0][: len(nodes[0]) - of_first] or nodes[0]
