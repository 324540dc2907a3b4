"""Finds the element type of the key/value cache, for the pass that decides it and those before it."""

from __future__ import annotations

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.context import PlanContext

FP8_WORDS = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's names of types with 8 bits an element."""
_FLAG = "--kv-cache-dtype"
_CPU_ISA = {"avx512bw", "amx_bf16"}
"""Instruction sets of a CPU, one of which vLLM asks for before it keeps an FP8 cache."""


def cache_dtype(ctx: PlanContext) -> str:
    """Return vLLM's name of the type: the user's own, "fp8" where it is asked for and possible, else "auto"."""
    given = ctx.pinned.value(_FLAG)
    if given is not None:
        return given
    off = ctx.wish("kv_cache")[0] is Wish.OFF
    return "fp8" if not off and fp8_asked(ctx) and not why_not_fp8(ctx) else "auto"


def cache_bits(ctx: PlanContext, dtype: str) -> int:
    """Return the bits of one cache element of vLLM's cache type `dtype`."""
    if dtype in ("auto", ctx.dtype):
        return 32 if ctx.dtype == "float32" else 16
    return 8 if dtype in FP8_WORDS else 16


def fp8_asked(ctx: PlanContext) -> bool:
    """Return whether a profile or a flag asks for FP8; the user's own type goes before both."""
    if _FLAG in ctx.pinned:
        return False
    # In a profile `on` still follows the section's dtype.
    return ctx.profile.passes.kv_cache.dtype == "fp8" or ctx.is_asked_by_flag("kv_cache")


def why_not_fp8(ctx: PlanContext) -> str:
    """Return why the model's attention or the device has no FP8 cache, or ""."""
    attention = ctx.model.attention
    if attention.kind not in ("mha", "gqa"):
        return f"{attention.kind} attention keeps its own cache type here"
    if attention.num_windowed_layers:
        return "sliding-window attention keeps its own cache type here"
    if ctx.device == "cuda" and not ctx.gpu.supports("fp8"):
        major, minor = ctx.gpu.compute_capability
        return f"needs FP8 matrix units (sm_89 or later), found sm_{major}{minor}"
    if ctx.device == "cpu" and not _CPU_ISA & set(ctx.cpu.isa):
        return "vLLM's CPU build needs AVX-512 or AMX for it"
    return ""
