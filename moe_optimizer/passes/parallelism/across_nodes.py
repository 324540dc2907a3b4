"""Spreads a model over several machines: as whole servers, as copies of one server, or as its pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.plan.pass_params import DisaggregationParams, ParallelismParams
from moe_optimizer.plan_context.context import PlanContext


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossNodes:
    """How several machines share the work."""

    split: ParallelismParams
    reason: str = ""
    """"" on one machine."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


_NOT_RUN = "one server on several machines was not run with this version: try it before it is relied on"
_ONE_HOST = "one server through Ray was run on one host alone, two nodes of a GPU: try it before it is relied on"


def machines_of_copies(ctx: PlanContext) -> int:
    """Return over how many machines the chosen layout spreads the data parallel copies of a server."""
    return 1 if ctx.layout is None else -(-ctx.layout.devices_of_stage // max(1, ctx.num_gpus))


def across_nodes(ctx: PlanContext, split: ParallelismParams) -> AcrossNodes:
    """Return what the chosen layout makes of several machines; without one, replicas of what `split` makes of a machine
    where it holds the model, else one server whose layers the machines share.

    Raises:
        UnsupportedError: a pipeline is asked for or needed together with data parallel copies, or of more machines
            than there are layers; copies over machines are asked for and no such layout is known to fit; one server
            over all machines is asked for beside servers for prefill and decode.
    """
    if machines_of_copies(ctx) > 1:
        return _copies_over_machines(ctx, split)
    nodes, wished = ctx.request.num_nodes, ctx.profile.passes.parallelism.across_nodes
    origin = ctx.profile_origin
    if nodes == 1 or ctx.params(DisaggregationParams) is not None:
        return AcrossNodes(split=split, reason=_apart(ctx))
    if ctx.layout is not None and ctx.layout_choice is not None and ctx.layout_choice.pinned_by:
        wished = "pipeline" if ctx.layout.pipeline_parallel_size > 1 else "replicas"
        origin = ctx.layout_choice.pinned_by
    # The search looks beyond a machine that holds the model where most clients would wait for room.
    needs_room = wished == "auto" and ctx.layout is not None and ctx.layout.pipeline_parallel_size > 1
    if wished == "data_parallel":
        raise UnsupportedError(
            f"{origin}: copies over {nodes} machines (across_nodes: data_parallel): no layout of this kind is possible",
            hint="the experts must divide by all GPUs and fit them; across_nodes: auto takes what is possible",
        )
    holds = ctx.memory(
        num_devices=split.tensor_parallel_size,
        data_parallel_size=split.data_parallel_size,
        expert_parallel=split.expert_parallel,
    ).fits
    if wished == "replicas" or (wished == "auto" and holds and not needs_room):
        why = f"one machine holds the model, so each of {nodes} serves by itself and nothing travels between them"
        if not holds:
            why = f"each of {nodes} machines serves by itself, as {origin} asks"
        if ctx.num_servers > 1:
            why = f"{ctx.num_servers} servers on each of {nodes} machines: each holds the model, and nothing travels"
        rejected = {"one server over all machines": "every token would wait for the network between them"}
        return AcrossNodes(
            split=dataclasses.replace(split, replicas=nodes * ctx.num_servers), reason=why, rejected=rejected
        )
    copies = split.data_parallel_size
    if copies > 1:
        raise UnsupportedError(
            f"one pipeline over {nodes} machines: data parallel copies ({copies}) are not planned together with it",
            hint="leave data parallelism out, or ask for whole experts too (--enable-expert-parallel)",
        )
    stages = nodes if ctx.layout is None else ctx.layout.pipeline_parallel_size
    if stages > ctx.model.num_layers:
        raise UnsupportedError(f"--nodes {nodes}: the model has {ctx.model.num_layers} layers to divide")
    why = f"as {origin} asks"
    if not holds:
        why = "one machine does not hold the model"
    elif needs_room:
        why = "one machine holds the model, and has no room for all of its clients beside it"
    larger = f"TP={split.tensor_parallel_size * stages}"
    return AcrossNodes(
        split=dataclasses.replace(split, pipeline_parallel_size=stages, replicas=nodes // stages),
        reason=f"{why}: its layers are divided over {stages} machines, and only activations travel between them",
        rejected={larger: "every layer would wait for the network between the machines"},
        warnings=(_ONE_HOST,),
    )


def _apart(ctx: PlanContext) -> str:
    """Return how servers for prefill and decode lie on several machines; "" on one.

    Raises:
        UnsupportedError: the profile asks for one server over all machines.
    """
    wished = ctx.profile.passes.parallelism.across_nodes
    if ctx.request.num_nodes == 1:
        return ""
    if wished in ("pipeline", "data_parallel") and not (ctx.layout_choice and ctx.layout_choice.pinned_by):
        _, origin = ctx.wish("disaggregation")
        raise UnsupportedError(
            f"disaggregation ({origin}) and across_nodes: {wished} ({ctx.profile_origin}) contradict each other: each "
            "server for prefill or decode has one machine or a part of it",
            hint="--disable-disaggregation, or across_nodes: auto in the profile",
        )
    return "every server lies within a machine, and between machines only the caches of prompts travel"


def _copies_over_machines(ctx: PlanContext, split: ParallelismParams) -> AcrossNodes:
    machines = machines_of_copies(ctx)
    each = split.data_parallel_size // machines
    copies = f"{each} cop{'y' if each == 1 else 'ies'}"
    return AcrossNodes(
        split=dataclasses.replace(split, machines_of_copies=machines, replicas=ctx.request.num_nodes // machines),
        reason=f"{copies} of the attention part on each of {machines} machines, and tokens travel between them",
        rejected={"TP over machines": "every layer would wait for the network between the machines"},
        warnings=(_NOT_RUN,),
    )
