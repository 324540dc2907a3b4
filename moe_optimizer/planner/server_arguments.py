"""Puts together the arguments and environment that vLLM is started with."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.request import PlanRequest

DRAIN_TIMEOUT_S = 30
"""Chosen: how long vLLM may finish the requests at hand after a stop was asked for. vLLM's own default aborts them;
every supported version takes the flag."""


def own_arguments(request: PlanRequest, context: PlanContext) -> ServeArguments:
    """Return the arguments that no pass owns."""
    arguments = ["--host", request.host, "--port", str(request.port)]
    embedded = request.engine == "embedded"
    if embedded:
        # No pass decides for this engine; it drains by itself.
        arguments += ["--max-num-seqs", str(context.workload.batch_size)]
    else:
        arguments += ["--shutdown-timeout", str(DRAIN_TIMEOUT_S)]
    if request.trust_remote_code:
        arguments.append("--trust-remote-code")
    # The embedded engine takes the dtype that the processor multiplies in.
    if request.dtype is not None or (context.device == "cpu" and not embedded):
        arguments += ["--dtype", context.dtype]
    length = context.kv_cache.max_model_len
    if length is not None and length != context.model.max_model_len:
        arguments += ["--max-model-len", str(length)]
    if context.device == "cuda":
        arguments += ["--gpu-memory-utilization", f"{context.profile.gpu_memory_utilization:.2f}"]
    return ServeArguments(*arguments)


def serve_arguments(own: ServeArguments, decisions: tuple[Decision, ...], user: ServeArguments) -> ServeArguments:
    """Return all arguments after the model: ours and every decision's, less what the user gives, then the user's."""
    return sum((decision.vllm_args for decision in decisions), start=own).overridden_by(user)


def plain_arguments(own: ServeArguments, context: PlanContext, user: ServeArguments) -> ServeArguments:
    """Return what plain vLLM would be given: the same server on the same devices, and nothing tuned."""
    planned = own + context.decided["parallelism"].vllm_args
    tuned = ["--gpu-memory-utilization"]
    if context.parallelism.data_parallel_size == 1:
        tuned.append("--enable-expert-parallel")
    return planned.without(*tuned).overridden_by(user)


def serve_environment(context: PlanContext) -> dict[str, str]:
    """Return the variables that vLLM is started with beside its own environment."""
    environment: dict[str, str] = {}
    if context.device == "cpu" and context.request.engine == "vllm":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(context.kv_cache.host_cache_gib)
    for decision in context.decided.values():
        environment |= decision.env
    return environment
