"""Takes a layout that the user names: what it asks of the passes, and why it may be refused."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

from moe_optimizer.errors import DoesNotFitError, InputError, UnsupportedError
from moe_optimizer.layouts.candidates import why_not_shape
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.layouts.search import Ranking
from moe_optimizer.layouts.serving import memory_of
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan_context.allowed_layouts import least_gpus
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.layout import Layout, parse_layout
from moe_optimizer.specs.quantity import bytes_in_words

_LEFT_OUT = "leave it out: the dry run lists the layouts that are possible"


def with_pinned_layout(ctx: PlanContext) -> PlanContext:
    """Return the context in which the passes that a pinned layout needs are asked for by it.

    Raises:
        InputError: the layout is none, or a flag or an argument after -- says the opposite of it.
    """
    if ctx.request.layout is None:
        return ctx
    layout = parse_layout(ctx.request.layout)
    origin = f"flag --layout {layout.name}"
    needed = {
        # Over several machines no router is planned: servers of parts of them know nothing of each other.
        "replicas": layout.replicas > 1 and not layout.disaggregated and ctx.request.num_nodes == 1,
        "disaggregation": layout.disaggregated,
        "parallelism.expert_parallel": layout.expert_parallel,
    }
    opposite = {True: Wish.OFF, False: Wish.ON}
    for key, needs in {**needed, "parallelism": layout.devices_of_server > 1}.items():
        wish, said_by = ctx.request.wishes.get(key, (Wish.AUTO, ""))
        if (wish is opposite[needs] and key != "parallelism") or (needs and wish is Wish.OFF):
            raise InputError(
                f"{origin.removeprefix('flag ')} and {said_by.removeprefix('flag ')} contradict each other",
                hint="give one of them",
            )
    for flag, size in (
        ("--tensor-parallel-size", layout.tensor_parallel_size),
        ("--data-parallel-size", layout.data_parallel_size),
    ):
        given = ctx.pinned.count(flag)
        if given not in (None, size):
            raise InputError(
                f"--layout {layout.name} and {flag} {given} after -- contradict each other", hint="give one of them"
            )
    wishes = {key: (Wish.ON if needs else Wish.OFF, origin) for key, needs in needed.items()}
    return dataclasses.replace(ctx, request=dataclasses.replace(ctx.request, wishes={**ctx.request.wishes, **wishes}))


def check_pinned(ctx: PlanContext, layout: Layout, ranking: Ranking, question: LayoutQuestion) -> None:
    """Refuse the pinned layout where the search found nothing.

    Raises:
        DoesNotFitError: a GPU has too little memory for it.
        UnsupportedError: it needs more GPUs than there are, or neither model nor machines divide so.
    """
    if ranking.within or ranking.beyond:
        return
    there = ctx.num_gpus * ctx.request.num_nodes
    if layout.num_devices > there:
        raise UnsupportedError(
            f"--layout {layout.name}: needs {layout.num_devices} GPUs, found {there}",
            hint=_how_to_get(ctx, layout) or _LEFT_OUT,
        )
    if ranking.do_not_fit:
        _refuse_too_large(ctx, layout, memory_of(question, layout))
    tensor, data = layout.tensor_parallel_size, layout.data_parallel_size
    why = why_not_shape(question, tensor, data, expert=layout.expert_parallel) or _why_not_over_machines(ctx, layout)
    machines = f"over {ctx.request.num_nodes} x {ctx.num_gpus} GPUs"
    raise UnsupportedError(
        f"--layout {layout.name}: {ctx.model.name} does not divide so {machines}{f' ({why})' if why else ''}",
        hint=_LEFT_OUT,
    )


def refuse_without_layouts(ctx: PlanContext, layout: Layout) -> NoReturn:
    """Refuse a layout where none is planned.

    Raises:
        UnsupportedError: always; where something else asks for its servers, the hint says it.
    """
    raise UnsupportedError(
        f"--layout {layout.name}: layouts are planned for vLLM on GPUs", hint=_without_layouts(ctx, layout)
    )


def _without_layouts(ctx: PlanContext, layout: Layout) -> str | None:
    """Return what asks for the servers of a layout where none is planned, or None."""
    if ctx.device != "cpu" or ctx.request.engine != "vllm" or layout.devices_of_server > 1 or layout.num_servers == 1:
        return None
    if layout.disaggregated:
        return (
            f"in a profile, passes: {{disaggregation: {{mode: on, prefill_servers: {layout.prefill_servers}, "
            f"decode_servers: {layout.replicas}}}}} starts these servers"
        )
    return f"in a profile, passes: {{replicas: {{mode: on, count: {layout.replicas}}}}} starts these servers"


def _how_to_get(ctx: PlanContext, layout: Layout) -> str | None:
    """Return the arguments that plan for as many GPUs as a layout needs, where the machines are only named."""
    needed, most = layout.num_devices, ctx.gpu.max_gpus_per_node
    if ctx.hardware.origin != "named":
        return None
    if needed <= most * ctx.request.num_nodes:
        return f"--gpus {needed}"
    if needed % most or (layout.disaggregated and layout.devices_of_server > most):
        return None
    return f"moe-optimizer plan --gpus {needed} --nodes {needed // most}"


def _why_not_over_machines(ctx: PlanContext, layout: Layout) -> str:
    """Return why a layout whose shape the model allows cannot lie on the machines, or ""."""
    machine = f"a machine of {ctx.num_gpus} GPUs"
    if layout.tensor_parallel_size > ctx.num_gpus:
        return f"slices of a layer stay in {machine}"
    if layout.disaggregated and layout.devices_of_server > ctx.num_gpus:
        return f"a server that only reads prompts or writes answers has one machine, here {machine}"
    if layout.disaggregated and layout.num_servers < ctx.request.num_nodes:
        return f"each of {ctx.request.num_nodes} machines has one of the servers at least"
    if layout.disaggregated:
        return f"{machine} has room for {ctx.num_gpus // layout.devices_of_server} of the servers"
    if layout.pipeline_parallel_size > 1:
        return f"each of the {layout.pipeline_parallel_size} stages of a pipeline has {machine}"
    return ""


def _refuse_too_large(ctx: PlanContext, layout: Layout, memory: MemoryPlan) -> NoReturn:
    work = memory.activation_bytes + memory.workspace_bytes
    sizes = (memory.weight_bytes, work, memory.budget_bytes, memory.total_bytes)
    weights, worked, budget, total = map(bytes_in_words, sizes)
    needed = least_gpus(ctx)
    least = "" if needed is None else f"it fits {needed[0]} GPUs that share it; "
    raise DoesNotFitError(
        f"--layout {layout.name}: {ctx.model.name} does not fit: each GPU needs {weights} of weights and {worked} to "
        f"work in, and may use {budget} of {total}",
        hint=f"{least}leave --layout out: the dry run lists the layouts that are possible",
    )
