"""Chooses the requests and tokens of one step."""

from __future__ import annotations

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.layouts.constants import FRONT_END_BUSY
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.pass_params import FlashDmoeParams, SchedulerParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.api_servers import API_SERVERS_FLAG, added_api_servers
from moe_optimizer.plan_context.cache_dtype import cache_bits, cache_dtype
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.decode_step import full_length, held_at_once, least_step_us
from moe_optimizer.plan_context.step_rule import (
    MODE_FLAG,
    REQUESTS_FLAG,
    TOKENS_FLAG,
    performance_mode,
    sizes_without_plan,
    step_rule,
)


class Scheduler(OptimizationPass):
    """max-num-seqs from the batch size, max-num-batched-tokens from memory, and vLLM's performance mode.

    A step of T tokens needs activation memory for T tokens, which the cache then lacks. T is the largest of the
    tried sizes that takes at most an eighth of the cache. vLLM does not start with fewer tokens a step than requests,
    nor, where prompts may not be read in parts, with fewer than the longest prompt has.
    """

    name = "scheduler"
    flag = "scheduler"
    title = "requests and tokens in one step, from batch size and memory"
    limits = "activation memory is modelled"
    no_gain = "its sizes decide how requests wait for each other, and the model is of one step"

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return vLLM's own defaults, as the memory plan needs to know them."""
        tokens, sequences = sizes_without_plan(ctx)
        params = SchedulerParams(max_num_seqs=sequences, max_num_batched_tokens=tokens)
        return self.decision(ctx, Status.OFF, "vLLM's defaults", reason, Applier.NONE, params=params)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the sizes of one step."""
        sequences, why, warnings = _requests(ctx)
        tokens, reason, rejected = _batched_tokens(ctx, sequences)
        mode = performance_mode(ctx)
        arguments = [REQUESTS_FLAG, str(sequences), TOKENS_FLAG, str(tokens)]
        if mode != "balanced":
            arguments += [MODE_FLAG, mode]
        api_servers = added_api_servers(ctx)
        if api_servers:
            arguments += [API_SERVERS_FLAG, str(api_servers)]
        return self.decision(
            ctx,
            Status.ON,
            f"{sequences} requests, {tokens} tokens a step",
            f"{sequences} requests {why}; {reason}; performance mode {mode}{_front_end(ctx, api_servers)}",
            Applier.FLAGS,
            evidence=_floor(ctx, sequences, tokens),
            rejected=rejected,
            vllm_args=ServeArguments(*arguments),
            params=SchedulerParams(max_num_seqs=sequences, max_num_batched_tokens=tokens),
            warnings=warnings,
        )


def _front_end(ctx: PlanContext, api_servers: int) -> str:
    if not api_servers or ctx.layout_choice is None:
        return ""
    own_share = ctx.layout_choice.own_front_end_share or 0.0
    why = f"vLLM's own number would be busy for more than {FRONT_END_BUSY:.0%} of a decode step"
    if own_share <= FRONT_END_BUSY:
        why = "with vLLM's own number the limits are not kept"
    return f"; {api_servers} API servers, because {why}"


def _requests(ctx: PlanContext) -> tuple[int, str, tuple[str, ...]]:
    """Return the requests of a step, where they come from, and warnings.

    Raises:
        InputError: the user's own numbers contradict each other.
    """
    tokens, given = ctx.pinned.count(TOKENS_FLAG), ctx.pinned.count(REQUESTS_FLAG)
    if given is not None:
        if tokens is not None and tokens < given:
            raise InputError(
                f"{TOKENS_FLAG} {tokens} and {REQUESTS_FLAG} {given} after -- contradict each other: every request "
                "needs a token of a step"
            )
        return given, "given after --", ()
    batch = ctx.workload.batch_size
    if tokens is None or batch <= tokens:
        of_clients = ctx.batch_is_of_clients and batch < ctx.clients
        return batch, f"its share of {ctx.clients} clients" if of_clients else "from the batch size", ()
    why = f"because a step of {tokens} tokens holds no more"
    return tokens, why, (f"{tokens} requests at once instead of {batch}, {why}",)


def _batched_tokens(ctx: PlanContext, sequences: int) -> tuple[int, str, dict[str, str]]:
    """Return the tokens of a step, why, and the larger sizes that were passed over."""
    rule, ours = step_rule(ctx), _ours_up_to(ctx)
    request = ctx.memory_request(**ctx.split_terms(), max_num_seqs=sequences)
    size = rule.choose(request, decoding=ctx.step_tokens(sequences), ours_up_to=ours)
    if rule.given is not None:
        return size.tokens, "tokens given after --", {}
    if rule.asked is not None:
        return size.tokens, f"tokens from {ctx.profile_origin}", {}
    beyond = f"vLLM's kernels would compute the experts of steps above {ours}"
    rejected = {f"{tokens} tokens": beyond for tokens in size.beyond_ours}
    rejected |= {
        f"{tokens} tokens": f"would take {share:.0%} of the cache" for tokens, share in size.cache_shares.items()
    }
    if size.tokens == rule.unread_prompt:
        why = "because --no-enable-chunked-prefill lets no prompt be read in parts"
        return size.tokens, f"{size.tokens} tokens, {why}", rejected
    if rule.in_batches(request):
        why = "because the buffers of the expert exchange hold so many of every rank"
        return size.tokens, f"{size.tokens} tokens, {why}", {}
    why = f" (our expert kernels were measured faster up to {ours})" if size.beyond_ours else ""
    return size.tokens, f"{size.tokens} tokens{why} take at most an eighth of the cache", rejected


def _ours_up_to(ctx: PlanContext) -> int:
    """Return the most tokens of which our CUDA kernels compute the experts; 0 where they do not, or where the tokens of
    several replicas come together.
    """
    ours = ctx.params(FlashDmoeParams)
    if ours is None or not ours.dispatch or ctx.parallelism.data_parallel_size > 1:
        return 0
    return min(ranges[-1].up_to for ranges in ours.dispatch.values())


def _floor(ctx: PlanContext, sequences: int, tokens: int) -> tuple[str, ...]:
    """Return what the hardware allows at best: the time of one decode step of as many requests as the cache holds, and
    tokens a second from it. Nothing on the CPU, whose rates nobody knows, nor over several machines, which work on
    several steps at once.
    """
    if ctx.device == "cpu" or ctx.parallelism.pipeline_parallel_size > 1:
        return ()
    bits = cache_bits(ctx, cache_dtype(ctx))
    memory = ctx.split_terms() | {"max_num_batched_tokens": tokens, "max_num_seqs": sequences, "kv_bits": bits}
    requests = min(sequences, max(1, held_at_once(ctx, **memory)))
    expert_bits, linear_bits = ctx.converted_bits()
    try:
        step = least_step_us(ctx, requests, kv_bits=bits, expert_bits=expert_bits, linear_bits=linear_bits)
    except UnsupportedError as error:
        return (f"no floor is known: {error}",)
    copies = ctx.parallelism.data_parallel_size
    each = f" in each of {copies} copies" if copies > 1 else ""
    return (
        f"a decode step of {requests} requests at {full_length(ctx)} tokens{each} takes at least "
        f"{step.value / 1000:.1f} ms, so at most {copies * requests / step.value * 1e6:,.0f} tokens/s "
        f"({step.source.value}: {step.ref})",
    )
