"""Decides whether our kernel computes the attention of decode steps of few requests."""

from __future__ import annotations

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import DisaggregationParams, KvCacheParams, SpeculationParams
from moe_optimizer.plan_context.context import PlanContext

OP = "paged_decode"
MAX_REQUESTS = 8
"""Of the kernel (csrc/include/moeopt/paged_decode.cuh), like those that follow."""
HEAD_SIZES = (64, 128)
MAX_QUERIES_PER_KV_HEAD = 16
_HOPPER = (9, 0)
_RECORD = "benchmarks/records/2026-11-22_h100_decode_step.json"
"""What attention takes of a decode step with vLLM's FlashAttention; ours is in no record."""
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT=1"
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
        kernels = ctx.software.kernels
        if ctx.device == "cpu":
            return "the kernel runs on GPUs only"
        if not kernels.built:
            return f"kernel not built: {kernels.reason}"
        if OP not in kernels.cuda_ops:
            why = f": {kernels.cuda_why_not}" if kernels.cuda_why_not else ""
            return f"{OP} has no CUDA kernel in this build{why}"
        if ctx.gpu.compute_capability != _HOPPER:
            major, minor = ctx.gpu.compute_capability
            return f"needs compute capability 9.0 (Hopper), found {major}.{minor}"
        if ctx.dtype != "bfloat16":
            return f"needs bfloat16, found {ctx.dtype}"
        return _why_not_heads(ctx) or _why_not_steps(ctx)

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
    if _BATCH_INVARIANT in ctx.software.kernel_environment.split():
        return f"{_BATCH_INVARIANT}: the bits of a request's result depend on the lengths of others"
    return ""
