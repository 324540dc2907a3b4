"""Says which sizes the steps of a server may have, by machine, profile and vLLM arguments."""

from __future__ import annotations

from moe_optimizer.costs.step_size import StepRule
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.pass_params import DualBatchOverlapParams
from moe_optimizer.plan_context.context import PlanContext

REQUESTS_FLAG = "--max-num-seqs"
TOKENS_FLAG = "--max-num-batched-tokens"
MODE_FLAG = "--performance-mode"
_MODE_FACTORS = {"throughput": 2.0, "balanced": 1.0, "interactivity": 0.5}
"""Times vLLM's own default: it doubles it in throughput mode itself; half of it (chosen) keeps a long prompt
from holding up the running requests."""
_BATCHED_BACKENDS = ("deepep_low_latency", "nixl_ep")
_BATCHED_TOKENS = 256
"""vLLM's own default where experts are exchanged through these: their buffers hold so many tokens of every rank for
each expert, and with thousands they do not fit."""


def step_rule(ctx: PlanContext) -> StepRule:
    """Return the sizes that the scheduler pass may choose; the one that vLLM takes where the pass is off.

    On the CPU it follows from the processes, so only after the parallelism pass.
    """
    given = ctx.pinned.count(TOKENS_FLAG)
    if given is None and ctx.wish("scheduler")[0] is Wish.OFF:
        given, _ = sizes_without_plan(ctx)
    # A mode that is not known here is refused by vLLM itself.
    factor = _MODE_FACTORS.get(performance_mode(ctx), 1.0)
    in_batches = _backend(ctx) in _BATCHED_BACKENDS
    return StepRule(
        most=round(_vllm_defaults(ctx)[0] * factor),
        most_in_batches=round(_BATCHED_TOKENS * factor) if in_batches else None,
        given=given,
        asked=ctx.profile.passes.scheduler.max_num_batched_tokens,
        unread_prompt=_unread_prompt(ctx),
    )


def performance_mode(ctx: PlanContext) -> str:
    """Return vLLM's performance mode."""
    return ctx.pinned.value(MODE_FLAG) or ctx.profile.performance


def sizes_without_plan(ctx: PlanContext) -> tuple[int, int]:
    """Return the tokens and requests of a step where vLLM chooses what the user's arguments leave open."""
    tokens, requests = _vllm_defaults(ctx)
    split = ctx.parallelism if "parallelism" in ctx.decided else None
    if split and split.data_parallel_size > 1 and split.expert_parallel and _backend(ctx) in _BATCHED_BACKENDS:
        tokens = _BATCHED_TOKENS
    # In this mode vLLM doubles what it chooses by itself.
    factor = 2 if ctx.pinned.value(MODE_FLAG) == "throughput" else 1
    tokens = ctx.pinned.count(TOKENS_FLAG) or max(factor * tokens, _unread_prompt(ctx))
    return tokens, ctx.pinned.count(REQUESTS_FLAG) or min(factor * requests, tokens)


def _unread_prompt(ctx: PlanContext) -> int:
    """Return the tokens of the longest prompt where vLLM may not read it in parts, else 0."""
    if ctx.pinned.value("--enable-chunked-prefill") != "false":
        return 0
    return ctx.workload.max_model_len or ctx.model.max_model_len or 0


def _backend(ctx: PlanContext) -> str | None:
    """Return what experts are exchanged through between copies, if it is said or will be."""
    planned, given = ctx.params(DualBatchOverlapParams), ctx.pinned.value("--all2all-backend")
    if given is not None or planned is not None:
        return given or (planned.all2all_backend if planned else None)
    asked = "dual_batch_overlap" not in ctx.decided and ctx.wish("dual_batch_overlap")[0] is Wish.ON
    return ctx.section("dual_batch_overlap").all2all_backend if asked else None


def _vllm_defaults(ctx: PlanContext) -> tuple[int, int]:
    """Return vLLM's own tokens and requests of a step for its API server, by device memory."""
    if ctx.device == "cpu":
        processes = ctx.parallelism.tensor_parallel_size
        return 2048 * processes, 128 * processes
    memory = ctx.gpu.memory.value
    if memory >= 160 * 2**30:
        return 16_384, 1024
    if memory >= 70 * 2**30 and "a100" not in ctx.gpu.name.lower():
        return 8192, 1024
    return 2048, 256
