"""Chooses the requests and tokens of one step."""

from __future__ import annotations

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.pass_params import DualBatchOverlapParams, FlashDmoeParams, SchedulerParams
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.api_servers import API_SERVERS_FLAG, added_api_servers
from moe_optimizer.plan_context.cache_dtype import cache_bits, cache_dtype
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.decode_step import full_length, held_at_once, least_step_us

_MODE_FACTORS = {"throughput": 2.0, "balanced": 1.0, "interactivity": 0.5}
"""Times vLLM's own default: it doubles it in throughput mode itself; half of it (chosen) keeps a long prompt
from holding up the running requests."""
_REQUESTS_FLAG = "--max-num-seqs"
_TOKENS_FLAG = "--max-num-batched-tokens"
_MODE_FLAG = "--performance-mode"
_FEWEST_TOKENS = 1024
_BATCHED_BACKENDS = ("deepep_low_latency", "nixl_ep")
_BATCHED_TOKENS = 256
"""vLLM's own default where experts are exchanged through these: their buffers hold so many tokens of every rank for
each expert, and with thousands they do not fit."""
_CACHE_SHARE = 1 / 8
"""Chosen: larger steps may take at most this share of the cache that the smallest step would leave."""


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
        tokens, sequences = _vllm_defaults(ctx)
        # In this mode vLLM doubles what it chooses by itself.
        factor = 2 if ctx.pinned.value(_MODE_FLAG) == "throughput" else 1
        tokens = ctx.pinned.count(_TOKENS_FLAG) or max(factor * tokens, _unread_prompt(ctx))
        sequences = ctx.pinned.count(_REQUESTS_FLAG) or min(factor * sequences, tokens)
        params = SchedulerParams(max_num_seqs=sequences, max_num_batched_tokens=tokens)
        return self.decision(ctx, Status.OFF, "vLLM's defaults", reason, Applier.NONE, params=params)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the sizes of one step."""
        sequences, why, warnings = _requests(ctx)
        tokens, reason, rejected = _batched_tokens(ctx, sequences)
        mode = _mode(ctx)
        arguments = [_REQUESTS_FLAG, str(sequences), _TOKENS_FLAG, str(tokens)]
        if mode != "balanced":
            arguments += [_MODE_FLAG, mode]
        api_servers = added_api_servers(ctx)
        if api_servers:
            arguments += [API_SERVERS_FLAG, str(api_servers)]
        return self.decision(
            ctx,
            Status.ON,
            f"{sequences} requests, {tokens} tokens a step",
            f"{sequences} requests {why}; {reason}; performance mode {mode}{_front_end(api_servers)}",
            Applier.FLAGS,
            evidence=_floor(ctx, sequences, tokens),
            rejected=rejected,
            vllm_args=ServeArguments(*arguments),
            params=SchedulerParams(max_num_seqs=sequences, max_num_batched_tokens=tokens),
            warnings=warnings,
        )


def _front_end(api_servers: int) -> str:
    why = "vLLM's own number would be busy for more than half of a decode step"
    return f"; {api_servers} API servers, because {why}" if api_servers else ""


def _mode(ctx: PlanContext) -> str:
    return ctx.pinned.value(_MODE_FLAG) or ctx.profile.performance


def _requests(ctx: PlanContext) -> tuple[int, str, tuple[str, ...]]:
    """Return the requests of a step, where they come from, and warnings.

    Raises:
        InputError: the user's own numbers contradict each other.
    """
    tokens, given = ctx.pinned.count(_TOKENS_FLAG), ctx.pinned.count(_REQUESTS_FLAG)
    if given is not None:
        if tokens is not None and tokens < given:
            raise InputError(
                f"{_TOKENS_FLAG} {tokens} and {_REQUESTS_FLAG} {given} after -- contradict each other: every request "
                "needs a token of a step"
            )
        return given, "given after --", ()
    batch = ctx.workload.batch_size
    if tokens is None or batch <= tokens:
        of_clients = ctx.batch_is_of_clients and batch < ctx.clients
        return batch, f"its share of {ctx.clients} clients" if of_clients else "from the batch size", ()
    why = f"because a step of {tokens} tokens holds no more"
    return tokens, why, (f"{tokens} requests at once instead of {batch}, {why}",)


def _unread_prompt(ctx: PlanContext) -> int:
    """Return the tokens of the longest prompt where vLLM may not read it in parts, else 0."""
    if ctx.pinned.value("--enable-chunked-prefill") != "false":
        return 0
    return ctx.workload.max_model_len or ctx.model.max_model_len or 0


def _batched_tokens(ctx: PlanContext, sequences: int) -> tuple[int, str, dict[str, str]]:
    """Return the tokens of a step, why, and the larger sizes that were passed over."""
    pinned = ctx.pinned.count(_TOKENS_FLAG)
    if pinned is not None:
        return pinned, "tokens given after --", {}
    least = max(ctx.step_tokens(sequences), _unread_prompt(ctx))
    asked = ctx.profile.passes.scheduler.max_num_batched_tokens
    if asked is not None:
        return max(asked, least), f"tokens from {ctx.profile_origin}", {}
    # A mode that is not known here is refused by vLLM itself.
    most = round(_vllm_defaults(ctx)[0] * _MODE_FACTORS.get(_mode(ctx), 1.0))
    fewest = max(min(_FEWEST_TOKENS, most), least)
    smallest_leaves = _cache_bytes(ctx, fewest, sequences)
    rejected: dict[str, str] = {}
    tokens, ours = most, _ours_up_to(ctx)
    while tokens // 2 >= fewest and tokens // 2 <= ours < tokens:
        rejected[f"{tokens} tokens"] = f"vLLM's kernels would compute the experts of steps above {ours}"
        tokens //= 2
    why = f" (our expert kernels were measured faster up to {ours})" if rejected else ""
    while tokens > fewest:
        leaves = _cache_bytes(ctx, tokens, sequences)
        if smallest_leaves and leaves >= (1 - _CACHE_SHARE) * smallest_leaves:
            break
        share = 1 - leaves / smallest_leaves if smallest_leaves else 1.0
        rejected[f"{tokens} tokens"] = f"would take {share:.0%} of the cache"
        tokens //= 2
    tokens = max(tokens, fewest)
    if tokens == _unread_prompt(ctx):
        return tokens, f"{tokens} tokens, because --no-enable-chunked-prefill lets no prompt be read in parts", rejected
    if _exchanged_in_batches(ctx):
        return tokens, f"{tokens} tokens, because the buffers of the expert exchange hold so many of every rank", {}
    return tokens, f"{tokens} tokens{why} take at most an eighth of the cache", rejected


def _ours_up_to(ctx: PlanContext) -> int:
    """Return the most tokens of which our CUDA kernels compute the experts; 0 where they do not, or where the tokens of
    several replicas come together.
    """
    ours = ctx.params(FlashDmoeParams)
    if ours is None or not ours.dispatch or ctx.parallelism.data_parallel_size > 1:
        return 0
    return min(ranges[-1].up_to for ranges in ours.dispatch.values())


def _cache_bytes(ctx: PlanContext, tokens: int, sequences: int) -> int:
    return ctx.memory(**ctx.split_terms(), max_num_batched_tokens=tokens, max_num_seqs=sequences).kv_cache_bytes


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


def _exchanged_in_batches(ctx: PlanContext) -> bool:
    """Whether data parallel replicas exchange tokens through buffers of a fixed size for each expert."""
    if ctx.parallelism.data_parallel_size < 2 or not ctx.parallelism.expert_parallel:
        return False
    planned = ctx.params(DualBatchOverlapParams)
    backend = ctx.pinned.value("--all2all-backend") or (planned and planned.all2all_backend)
    return backend in _BATCHED_BACKENDS


def _vllm_defaults(ctx: PlanContext) -> tuple[int, int]:
    """Return vLLM's own tokens and requests of a step for its API server, by device memory."""
    if ctx.device == "cpu":
        processes = ctx.parallelism.tensor_parallel_size
        return 2048 * processes, 128 * processes
    memory = ctx.gpu.memory.value
    if _exchanged_in_batches(ctx):
        return _BATCHED_TOKENS, 1024 if memory >= 70 * 2**30 and "a100" not in ctx.gpu.name.lower() else 256
    if memory >= 160 * 2**30:
        return 16_384, 1024
    if memory >= 70 * 2**30 and "a100" not in ctx.gpu.name.lower():
        return 8192, 1024
    return 2048, 256
