"""Decides whether vLLM offloads cold cache blocks to host memory, and to how much of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_optimizer.costs.memory import GIB
from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Status, Wish
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.plan_context.context import PlanContext

_HOST_SHARE = 1 / 2
"""Chosen: offloaded blocks lie in page-locked memory, which loading weights and everything else on the host lack."""
_FLAG = "--kv-offloading-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOffload:
    """Whether blocks are offloaded, to how much memory, and why or why not."""

    gib: int | None
    """Of one engine, all its GPUs together; None: no offload."""
    reason: str
    vllm_args: ServeArguments = NO_ARGUMENTS
    """None also where the connector between the servers of disaggregation brings it."""
    warnings: tuple[str, ...] = ()


def decide_kv_offload(ctx: PlanContext, kv_bits: int) -> KvOffload:
    """Return the offload: as much memory as the cache of all GPUs of an engine has, at most half of the host's.

    The user's own size goes before it.

    Args:
        ctx: after the scheduler and graph_capture passes, which the memory plan needs.
        kv_bits: bits of one cache element.

    Raises:
        InputError: the user's own size is not a positive number.
    """
    size = ctx.pinned.value(_FLAG)
    if size is not None:
        given = ServeArguments(_FLAG, size)
        return KvOffload(gib=_given_gib(size), reason="cold blocks go to host memory", vllm_args=given)
    if ctx.wish("kv_cache")[0] is Wish.OFF:
        return KvOffload(gib=None, reason="kv_cache is off")
    wish, origin = ctx.wish("kv_cache.tiering")
    if wish is not Wish.ON:
        why = (
            f"switched off by {origin}"
            if wish is Wish.OFF
            else "no measurement shows a gain; --enable-kv-tiering asks for it"
        )
        return KvOffload(gib=None, reason=why)
    reason = _why_not(ctx)
    gib, sized = (0, "") if reason else _size(ctx, kv_bits)
    if not reason and gib < 1:
        reason = sized
    if reason:
        return KvOffload(gib=None, reason=reason, warnings=(f"kv tiering ({origin}): {reason}",))
    backend, warnings = _backend(ctx)
    if ctx.hardware.cpu is None:
        spare = gib * _engines(ctx)
        warnings += (f"kv tiering ({origin}): the host of {ctx.gpu.key} is not known; it needs {spare} GiB to spare",)
    arguments = ServeArguments(_FLAG, str(gib), "--kv-offloading-backend", backend)
    if _disaggregated(ctx):
        # vLLM would put the flag's connector in the place of the one between the servers. Theirs names both.
        arguments = NO_ARGUMENTS
    return KvOffload(gib=gib, reason=f"cold blocks go to host memory ({backend}): {sized}", vllm_args=arguments,
                    warnings=warnings)  # fmt: skip


def _given_gib(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise InputError(f"{_FLAG}: got {text!r:.80}, expected a positive number of GiB")
    return math.ceil(size)


def _why_not(ctx: PlanContext) -> str:
    attention = ctx.model.attention
    if ctx.device == "cpu":
        return "vLLM moves cache blocks between GPU and host, and its CPU build has them in host memory already"
    if ctx.pinned.value("--enable-prefix-caching") == "false":
        return "only blocks of the prefix cache are kept, and --no-enable-prefix-caching is given after --"
    if "--kv-transfer-config" in ctx.pinned:
        return "it takes vLLM's one KV connector, and --kv-transfer-config is given after --"
    if attention.kind in ("hybrid", "none") or attention.num_windowed_layers:
        return "the model's layers keep caches of different kinds, with which it was not tried"
    return ""


def _size(ctx: PlanContext, kv_bits: int) -> tuple[int, str]:
    """Return the GiB of host memory of an engine and how they come about."""
    cache = ctx.memory(**ctx.memory_terms(kv_bits)).kv_cache_bytes * ctx.parallelism.tensor_parallel_size
    if ctx.hardware.cpu is None:
        return cache // GIB, "as large as the cache on the GPUs"
    most = int(ctx.hardware.cpu.memory.value * _HOST_SHARE) // _engines(ctx)
    if cache <= most:
        return cache // GIB, "as large as the cache on the GPUs"
    return most // GIB, f"half of the host's memory, {most / cache:.0%} of the cache on the GPUs"


def _engines(ctx: PlanContext) -> int:
    """Return how many engines share the host's memory, each with a part of its own."""
    return ctx.parallelism.data_parallel_size * ctx.num_servers


def _disaggregated(ctx: PlanContext) -> bool:
    return ctx.decided["disaggregation"].status is Status.ON


def _backend(ctx: PlanContext) -> tuple[str, tuple[str, ...]]:
    if ctx.section("kv_cache").tiering_backend == "native":
        return "native", ()
    if _disaggregated(ctx):
        return "native", (f"tiering_backend lmcache ({ctx.profile_origin}): was not tried beside disaggregation; "
                          "native is used",)  # fmt: skip
    if not ctx.software.lmcache:
        return "native", (f"tiering_backend lmcache ({ctx.profile_origin}): LMCache is not installed; native is used",)
    return "lmcache", ("kv tiering: LMCache needs its server running on this host; the launcher does not start it",)
