"""Decides whether our kernel computes the attention of decode steps of few requests."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import DisaggregationParams, KvCacheParams, SpeculationParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cuda_kernel import BATCH_INVARIANT, is_batch_invariant, why_not_bf16_on_hopper

OP = "paged_decode"
MAX_REQUESTS = 8
"""Of the kernel (csrc/include/moeopt/paged_decode.cuh), like those that follow."""
HEAD_SIZES = (64, 128)
MAX_QUERIES_PER_KV_HEAD = 16
_RECORD = "benchmarks/records/2026-11-22_h100_decode_step.json"
"""What attention takes of a decode step with vLLM's FlashAttention; ours is in no record."""
_CONNECTOR, _DRAFTS = "--kv-transfer-config", "--speculative-config"


class DecodeAttention(OptimizationPass):
    """Attention of decode steps of up to 8 requests by our kernel in vLLM's FlashAttention backend.

    The worker times both at load, by shape and at several lengths of context, and takes ours up to as many requests as
    it was faster for at each length. Mode auto is off until a record shows that a server gains.
    """

    name = "decode_attention"
    flag = "decode-attention"
    title = "attention of few requests' decode steps by our kernel"
    limits = (
        f"Hopper, BF16, vLLM's FlashAttention backend, steps of one token of each of up to {MAX_REQUESTS} requests, "
        "where each worker measures it faster while it loads; layers with sliding windows, sinks or soft caps stay "
        "vLLM's"
    )
    no_gain = "not run on a GPU yet"

    def why_not(self, ctx: PlanContext) -> str:
        """Needs the kernel, a GPU that it is built for, and heads, cache and steps that it computes."""
        return why_not_bf16_on_hopper(ctx, OP) or _why_not_heads(ctx) or _why_not_steps(ctx)

    def choose(self, ctx: PlanContext) -> Decision:
        """Use it where it is asked for; auto leaves it off."""
        wish, origin = ctx.wish(self.name)
        if wish is not Wish.ON:
            return self.when_off(ctx, f"{self.no_gain}: on by `mode: on` or --enable-{self.flag}")
        return self.decision(
            ctx,
            Status.ON,
            f"up to {MAX_REQUESTS} requests",
            f"asked for by {origin}, {self.no_gain}; each worker checks and times it at load, and keeps it where it is "
            "faster than vLLM's attention at every length",
            Applier.PLUGIN,
            evidence=(_RECORD,),
        )


def _why_not_heads(ctx: PlanContext) -> str:
    """Return what of the model's attention the kernel does not compute, or ""."""
    attention = ctx.model.attention
    if attention.kind not in ("mha", "gqa", "hybrid"):
        return f"{attention.kind} attention has no keys of heads in the cache"
    if attention.head_dim not in HEAD_SIZES:
        return f"needs heads of {' or '.join(map(str, HEAD_SIZES))} elements, found {attention.head_dim}"
    if attention.num_heads > MAX_QUERIES_PER_KV_HEAD * attention.num_kv_heads:
        return (
            f"needs up to {MAX_QUERIES_PER_KV_HEAD} query heads of a key head, found "
            f"{attention.num_heads // attention.num_kv_heads}"
        )
    if attention.num_windowed_layers == attention.num_attention_layers:
        return "every layer has a sliding window"
    return ""


def _why_not_steps(ctx: PlanContext) -> str:
    """Return what of the server's cache or steps does not go with it, or ""."""
    cache = ctx.params(KvCacheParams)
    if cache is not None and cache.kv_bits != 16:
        return f"the KV cache is {cache.dtype}, and the kernel reads BF16"
    connector = "a KV connector may write keys of earlier steps while attention starts"
    if cache is not None and cache.offload_gib is not None:
        return f"KV tiering: {connector}"
    if ctx.params(DisaggregationParams) is not None:
        return f"disaggregation: {connector}"
    if _CONNECTOR in ctx.pinned:
        return f"{_CONNECTOR}: {connector}"
    if ctx.params(SpeculationParams) is not None or _DRAFTS in ctx.pinned:
        return "speculation: a step has several tokens of a request"
    if is_batch_invariant(ctx):
        return f"{BATCH_INVARIANT}: the bits of a request's result depend on the lengths of others"
    return ""
