"""Says which layouts a request allows, and how few GPUs one of them needs."""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_optimizer.layouts.candidates import candidates
from moe_optimizer.layouts.serving import memory_of
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.layout_question import layout_question
from moe_optimizer.plan_context.routed_servers import UNSAFE_FLAGS_APART, unsafe_flag
from moe_optimizer.specs.layout import Layout

_MOST_GPUS = 64
"""Chosen: up to how many GPUs a refusal says that they would do."""


def allows_layout(
    ctx: PlanContext, layout: Layout, pinned: Layout | None, *, sizes: tuple[int | None, int | None] | None = None
) -> bool:
    """Return whether flags, profile and vLLM arguments allow a layout; `sizes` instead of those that they ask for."""
    if pinned is not None:
        return layout == pinned
    tensor, data = sizes or ctx.asked_sizes
    experts, _ = ctx.wish("parallelism.expert_parallel")
    if "--enable-expert-parallel" in ctx.pinned:
        experts = Wish.ON if ctx.pinned.is_on("--enable-expert-parallel") else Wish.OFF
    needs_experts = experts is Wish.ON or _is_on(ctx, "expert_placement", "dual_batch_overlap")
    needs_one_copy = _is_on(ctx, "expert_load")
    # As the parallelism pass has it of copies whose number alone is asked for.
    whole = ctx.model.is_moe and ctx.model.num_experts % layout.devices_of_stage == 0
    shares_experts = whole and experts is not Wish.OFF
    several = layout.replicas > ctx.request.num_nodes and not layout.disaggregated
    nodes, across = ctx.request.num_nodes, ctx.section("parallelism").across_nodes
    piped, machines = layout.pipeline_parallel_size, -(-layout.devices_of_stage // ctx.num_gpus)
    across_nodes = "pipeline" if piped > 1 else "data_parallel" if machines > 1 else "replicas"
    return all(
        (
            tensor is None or layout.tensor_parallel_size == tensor,
            layout.data_parallel_size == (data or layout.data_parallel_size),
            # Copies without whole experts were seen in vLLM's source only: they are for who asks for them.
            layout.data_parallel_size == 1 or layout.expert_parallel or (data is not None and not shares_experts),
            experts is not Wish.OFF or not layout.expert_parallel,
            not needs_experts or layout.expert_parallel or layout.devices_of_stage == 1,
            not needs_one_copy or layout.data_parallel_size == 1,
            not _is_on(ctx, "dual_batch_overlap") or layout.data_parallel_size > 1,
            ctx.wish("parallelism")[0] is not Wish.OFF or layout.devices_of_server == 1,
            ctx.wish("replicas")[0] is not Wish.ON or several,
            ctx.wish("disaggregation")[0] is not Wish.ON or layout.disaggregated,
            ctx.wish("disaggregation")[0] is not Wish.OFF or not layout.disaggregated,
            not layout.disaggregated or not unsafe_flag(ctx, UNSAFE_FLAGS_APART),
            # The copies of a server lie on several machines with whole experts only.
            machines == 1 or layout.expert_parallel,
            nodes == 1 or across in ("auto", across_nodes),
            # A pipeline that is asked for is one server over all machines.
            piped in (1, nodes) or across != "pipeline",
        )
    )


def least_gpus(ctx: PlanContext, **memory: Any) -> tuple[int, int] | None:
    """Return the fewest GPUs that hold one server, and on how many machines: one, or several whole ones.

    They are those of a layout that the search would take, whatever was asked of tensor parallelism. None: no number up
    to `_MOST_GPUS` does.

    Args:
        ctx: before any layout was chosen.
        memory: what a MemoryRequest has other than planned, such as the bits of weights.
    """
    most = ctx.gpu.max_gpus_per_node
    single = {"parallelism": Wish.AUTO, "replicas": Wish.OFF, "disaggregation": Wish.OFF}
    wishes = {**ctx.request.wishes, **{key: (wish, "") for key, wish in single.items()}}
    sizes = [(each, 1) for each in range(1, most + 1)]
    sizes += [(most, machines) for machines in range(2, _MOST_GPUS // most + 1)]
    for each, machines in sizes:
        request = dataclasses.replace(ctx.request, num_nodes=machines, wishes=wishes, layout=None)
        asked = dataclasses.replace(ctx, request=request, num_gpus=each)
        question = layout_question(asked)
        question = dataclasses.replace(
            question,
            memory=dataclasses.replace(question.memory, **memory),
            fp8_blocks=question.fp8_blocks and not memory,
        )
        free = (None, ctx.asked_sizes[1])
        if any(
            layout.devices_of_server == each * machines
            and allows_layout(asked, layout, None, sizes=free)
            and memory_of(question, layout).fits
            for layout in candidates(question)
        ):
            return each * machines, machines
    return None


def _is_on(ctx: PlanContext, *passes: str) -> bool:
    return any(ctx.wish(name)[0] is Wish.ON for name in passes)
