"""Sizes the key/value cache: element type, memory, and the longest sequence it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from moe_optimizer.costs.memory import GIB, sequence_kv_bytes
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.passes.kv_cache.kv_offload import decide_kv_offload
from moe_optimizer.plan.decision import UNJUDGED, Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import KvCacheParams
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.plan_context.cache_dtype import FP8_WORDS, cache_bits, cache_dtype, fp8_asked, why_not_fp8
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.decode_step import full_length, held_at_once
from moe_optimizer.specs.quantity import Quantity, Source

_LENGTH_MARGIN = 0.9
"""Chosen: the activation and workspace terms are estimates of about a tenth of the budget."""
_LENGTH_STEP = 128
"""vLLM's largest usual cache block, in tokens."""


class KvCache(OptimizationPass):
    """FP8 cache elements where they are asked for, and the sequence length that the cache really holds.

    An FP8 cache holds twice the tokens and changes the output slightly; no quality gate has judged it in this
    version, so only the aggressive profile or a flag asks for it. Blocks that no request uses any more can be offloaded
    to host memory (the setting `tiering`), where a profile or a flag asks for it. Whatever the wish, the pass works out
    how long a sequence may be, and on the CPU build how much memory the cache takes, for the planner.
    """

    name = "kv_cache"
    flag = "kv-cache"
    title = "FP8 key/value cache"
    limits = "latent (MLA), hybrid and sliding-window caches keep their type"
    no_gain = "how much of the cache is used again depends on the traffic"
    setting_flags: ClassVar[Mapping[str, tuple[str, str]]] = {
        "kv-tiering": ("tiering", "keep cold cache blocks in host memory")
    }

    def why_not(self, ctx: PlanContext) -> str:
        """FP8 needs an attention kind and a device that take it."""
        return why_not_fp8(ctx) if fp8_asked(ctx) else ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return the model's own type, or the user's own argument's, with the sizes the planner needs."""
        return self._sized(ctx, Status.OFF, cache_dtype(ctx), reason)

    def refused(self, ctx: PlanContext, reason: str) -> Decision:
        """Return the model's own type when FP8 was asked for by name and cannot be."""
        if ctx.wish(self.name)[0] is not Wish.ON:
            return self.when_off(ctx, f"FP8 asked for by {ctx.profile_origin}, but {reason}")
        return self._sized(ctx, Status.REFUSED, cache_dtype(ctx), reason)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the cache's type."""
        pinned = ctx.pinned.value("--kv-cache-dtype")
        if pinned is not None:
            status = Status.ON if pinned != "auto" else Status.OFF
            return self._sized(ctx, status, pinned, f"--kv-cache-dtype {pinned} is given after --")
        if not fp8_asked(ctx):
            return self.when_off(ctx, f"{ctx.profile_origin} keeps the model's own type")
        reason = f"FP8 elements hold twice the tokens; the output changes slightly, and {UNJUDGED}"
        return self._sized(ctx, Status.ON, cache_dtype(ctx), reason)

    def why_setting_off(self, decision: Decision, setting: str) -> str:
        """Tiering is there when it has a size."""
        assert setting == "tiering", setting
        return "" if decision.params_as(KvCacheParams).offload_gib is not None else decision.rejected["tiering"]

    def unmet(self, decision: Decision) -> str:
        """With offloading the pass is on also where FP8, which was asked for too, cannot be."""
        return decision.rejected.get("FP8") or super().unmet(decision)

    def _sized(self, ctx: PlanContext, status: Status, dtype: str, reason: str) -> Decision:
        bits = cache_bits(ctx, dtype)
        wanted, length = _lengths(ctx, bits)
        cache_gib = _host_cache_gib(ctx, bits, length) if ctx.device == "cpu" else None
        offload = decide_kv_offload(ctx, bits)
        rejected = {} if offload.gib is not None else {"tiering": offload.reason}
        warnings = offload.warnings
        fp8 = status is Status.ON and dtype in FP8_WORDS
        value = f"{dtype if dtype != 'auto' else ctx.dtype} cache"
        arguments = ServeArguments("--kv-cache-dtype", dtype) if status is Status.ON else NO_ARGUMENTS
        if offload.gib is not None:
            value, reason = f"{value}, {offload.gib} GiB in host memory", f"{reason}; {offload.reason}"
            arguments += offload.vllm_args
            if status is Status.REFUSED and not ctx.is_required(self.name):
                # Offloading is carried out all the same, and must be seen working.
                status, rejected = Status.ON, {"FP8": why_not_fp8(ctx)}
                warnings += (f"kv_cache ({ctx.wish(self.name)[1]}): no FP8: {rejected['FP8']}",)
            # The user's own size counts even where the pass is switched off, and leaves it off.
            elif status is Status.OFF and ctx.wish(self.name)[0] is not Wish.OFF:
                status = Status.ON
        return self.decision(
            ctx,
            status,
            value,
            reason,
            Applier.FLAGS if arguments or offload.gib is not None else Applier.NONE,
            evidence=_held_at_once(ctx, bits),
            rejected=rejected,
            gain=_fp8_gain(ctx) if fp8 else None,
            vllm_args=arguments,
            params=KvCacheParams(
                dtype=dtype,
                kv_bits=bits,
                wanted_model_len=wanted,
                max_model_len=length,
                host_cache_gib=cache_gib,
                offload_gib=offload.gib,
            ),
            warnings=warnings,
        )


def _lengths(ctx: PlanContext, bits: int) -> tuple[int | None, int | None]:
    """Return the longest sequence that is wished for, and of it what fits; None: unknown, left to vLLM."""
    request = ctx.memory_request(**ctx.memory_terms(bits))
    wanted = ctx.workload.max_model_len or ctx.model.max_model_len or None
    room = _room(ctx, bits)
    if wanted is None or sequence_kv_bytes(request, wanted) <= room:
        return wanted, wanted
    low, high = 0, wanted  # [low, high): low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if sequence_kv_bytes(request, middle) <= room:
            low = middle
        else:
            high = middle
    # vLLM does not start when the length misses the cache by a token, and the room is an estimate.
    length = int(low * _LENGTH_MARGIN)
    return wanted, max(1, length - length % _LENGTH_STEP or length)


def _room(ctx: PlanContext, bits: int) -> int:
    """Return the cache bytes of one device; on the CPU build in whole GiB, as it takes them."""
    available = ctx.memory(**ctx.memory_terms(bits)).kv_cache_bytes
    return available // GIB * GIB if ctx.device == "cpu" else available


def _host_cache_gib(ctx: PlanContext, bits: int, length: int | None) -> int:
    """Return the GiB of cache of one CPU worker: what the workload needs, in whole GiB, at most what is there.

    Host memory is shared with everything else on the machine, so the cache does not take all that is left.
    """
    request = ctx.memory_request(**ctx.memory_terms(bits))
    tokens = ctx.workload.input_tokens + ctx.workload.output_tokens
    if length is not None:
        tokens = min(tokens, length)
    needed = max(
        ctx.workload.batch_size * sequence_kv_bytes(request, tokens), sequence_kv_bytes(request, length or tokens)
    )
    return max(1, min(math.ceil(needed / GIB), _room(ctx, bits) // GIB))


def _held_at_once(ctx: PlanContext, bits: int) -> tuple[str, ...]:
    held, asked = held_at_once(ctx, **ctx.memory_terms(bits)), ctx.scheduler.max_num_seqs
    if not held or held >= asked:
        return ()
    return (f"the cache holds {held} requests of {full_length(ctx)} tokens at once; of {asked} the others wait",)


def _fp8_gain(ctx: PlanContext) -> Gain:
    before = 32 if ctx.dtype == "float32" else 16
    return Gain(
        metric="tokens the cache holds per byte",
        ratio=Quantity(before / 8, "ratio", Source.MODELLED, f"{before} bits / 8 bits an element, scales left out"),
    )
