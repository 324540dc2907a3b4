"""Spreads a model over several machines: as replicas, or as one server with pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.plan_context.context import PlanContext

_TRIED_TOKENS = 2048
"""Tokens of a step with which it is asked whether a machine holds the model; the scheduler pass decides them later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossNodes:
    """How several machines share the work."""

    pipeline_parallel_size: int
    """Machines that hold successive layers of one server; 1: a machine holds all layers."""
    replicas: int
    """Servers, each on machines of its own, that know nothing of each other."""
    reason: str
    """"" on one machine."""
    rejected: dict[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def vllm_args(self) -> ServeArguments:
        """Flags for one server over all machines; vLLM reaches the others through Ray."""
        if self.pipeline_parallel_size == 1:
            return NO_ARGUMENTS
        size = str(self.pipeline_parallel_size)
        return ServeArguments("--pipeline-parallel-size", size, "--distributed-executor-backend", "ray")


def across_nodes(ctx: PlanContext, tensor_parallel: int, data_parallel: int, expert_parallel: bool) -> AcrossNodes:
    """Return replicas where one machine holds the model, else one server whose layers the machines share.

    Raises:
        UnsupportedError: a pipeline is asked for or needed together with data parallel copies, or of more machines
            than there are layers.
    """
    nodes, wished = ctx.request.num_nodes, ctx.profile.passes.parallelism.across_nodes
    origin = ctx.profile_origin
    if ctx.request.one_server:
        wished, origin = "pipeline", "--render ray"
    if nodes == 1:
        return AcrossNodes(pipeline_parallel_size=1, replicas=1, reason="", rejected={})
    holds = ctx.memory(
        num_devices=tensor_parallel,
        data_parallel_size=data_parallel,
        expert_parallel=expert_parallel,
        max_num_batched_tokens=_TRIED_TOKENS,
    ).fits
    if wished == "replicas" or (wished == "auto" and holds):
        why = f"one machine holds the model, so each of {nodes} serves by itself and nothing travels between them"
        if not holds:
            why = f"each of {nodes} machines serves by itself, as {origin} asks"
        rejected = {"one server over all machines": "every token would wait for the network between them"}
        return AcrossNodes(pipeline_parallel_size=1, replicas=nodes, reason=why, rejected=rejected)
    if data_parallel > 1:
        raise UnsupportedError(
            f"one server over {nodes} machines: data parallel copies ({data_parallel}) are planned on one machine only",
            hint="leave data parallelism out, or plan for one machine with more memory",
        )
    if nodes > ctx.model.num_layers:
        raise UnsupportedError(f"--nodes {nodes}: the model has {ctx.model.num_layers} layers to divide")
    why = "one machine does not hold the model" if not holds else f"as {origin} asks"
    return AcrossNodes(
        pipeline_parallel_size=nodes,
        replicas=1,
        reason=f"{why}: its layers are divided over {nodes} machines, and only activations travel between them",
        rejected={f"TP={tensor_parallel * nodes}": "every layer would wait for the network between the machines"},
        warnings=("one server on several machines was not run with this version: try it before it is relied on",),
    )
