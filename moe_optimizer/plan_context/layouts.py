"""Asks the search over layouts what a request allows, and makes its answer part of the plan."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from moe_optimizer.costs.weights import DTYPE_BYTES
from moe_optimizer.errors import DoesNotFitError, GoalMissedError, InputError, UnsupportedError
from moe_optimizer.layouts.candidates import candidates, why_not_shape
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.layouts.search import Ranking, rank, why_behind
from moe_optimizer.layouts.serving import Prediction, memory_of, predict, step_tokens
from moe_optimizer.plan.decision import Status, Wish
from moe_optimizer.plan.layout_choice import LayoutChoice, LayoutEstimate, waiting_in_words
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan_context.api_servers import API_SERVERS_FLAG, may_add_api_servers
from moe_optimizer.plan_context.cache_dtype import cache_bits, cache_dtype
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.decode_step import served_bits
from moe_optimizer.plan_context.expert_kernel import (
    stored_four_bits,
    stored_table,
    why_model_does_not_fit,
    why_not_built,
)
from moe_optimizer.plan_context.fused_router import fused_router_tokens
from moe_optimizer.plan_context.graph_arguments import argument_against_graphs, is_eager, prompts_have_graphs
from moe_optimizer.plan_context.routed_servers import UNSAFE_FLAGS, UNSAFE_FLAGS_APART, unsafe_flag
from moe_optimizer.plan_context.step_rule import sizes_without_plan, step_rule
from moe_optimizer.specs.expert_formats import MXFP4, MXFP4_BITS
from moe_optimizer.specs.layout import Layout, parse_layout
from moe_optimizer.specs.quantity import Quantity, bytes_in_words

_SHOWN = 5
_DIGITS = 4
_FP8_BITS = 8
_LEAST_SHOWN = 0.005
_MOST_GPUS = 64
"""Chosen: up to how many GPUs a refusal says that they would do."""


def choose_layout(ctx: PlanContext) -> LayoutChoice | None:
    """Return the layout that the goal asks for.

    None where nothing is predicted: on the CPU, inside a running vLLM, for stock vLLM, on a GPU of unknown rates, or
    where no layout fits, which the memory plan then refuses with what is missing.

    Raises:
        GoalMissedError: layouts fit, and none keeps the limits; the nearest is named.
        InputError: the pinned layout is none.
        UnsupportedError: the pinned layout is none of those that the model and the machines allow, or does not fit.
    """
    pinned = ctx.request.layout
    layout = None if pinned is None else parse_layout(pinned)
    if ctx.device == "cpu" or ctx.request.inside_vllm or ctx.request.engine != "vllm" or not ctx.num_gpus:
        if layout is not None:
            raise UnsupportedError(
                f"--layout {layout.name}: layouts are planned for vLLM on GPUs", hint=_without_layouts(ctx, layout)
            )
        return None
    if not ctx.request.search_layouts:
        return None
    try:
        question = layout_question(ctx)
        ranking = rank(question, ctx.goal, ctx.limits, allowed=lambda each: _allows(ctx, each, layout))
    except UnsupportedError:
        if pinned is not None:
            raise
        return None
    if layout is not None:
        _check_pinned(ctx, layout, ranking, question)
    if not ranking.within and not ranking.beyond:
        return None
    if not ranking.within and layout is None:
        _refuse(ctx, ranking, question)
    return _choice(ctx, ranking, pinned="" if layout is None else f"--layout {layout.name}")


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
            raise InputError(f"--layout {layout.name} and {flag} {given} after -- contradict each other")
    wishes = {key: (Wish.ON if needs else Wish.OFF, origin) for key, needs in needed.items()}
    return dataclasses.replace(ctx, request=dataclasses.replace(ctx.request, wishes={**ctx.request.wishes, **wishes}))


def predicted_as_decided(asked: PlanContext, decided: PlanContext, memory: MemoryPlan) -> LayoutChoice | None:
    """Return the choice with its layout predicted again, with what the passes decided of requests, steps and memory.

    The search knows of steps what the scheduler does, and nothing of what drafts tokens, of replicas of experts or of
    our kernels' buffers. Where our kernels are still to be measured, a step has no more tokens than the search takes
    it to have after that, as the layouts beside this one do.

    Args:
        asked: the context that the layout was chosen in.
        decided: the same with all decisions.
        memory: of a GPU under them; it fits.
    """
    choice = decided.layout_choice
    if choice is None:
        return None
    question = dataclasses.replace(
        layout_question(asked), max_running=decided.scheduler.max_num_seqs, api_servers=choice.estimate.api_servers
    )
    request = decided.memory_request(**decided.memory_terms(decided.kv_cache.kv_bits))
    if decided.decided["flash_dmoe"].status is Status.PENDING:
        tokens = min(request.max_num_batched_tokens, step_tokens(question, choice.layout))
        request = dataclasses.replace(request, max_num_batched_tokens=tokens)
    prediction = predict(question, choice.layout, memory, request=request)
    return dataclasses.replace(
        choice, estimates=(_estimate(prediction, ""), *choice.estimates[1:]), parts_us=_parts_us(prediction)
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
            and _allows(asked, layout, None, sizes=free)
            and memory_of(question, layout).fits
            for layout in candidates(question)
        ):
            return each * machines, machines
    return None


def layout_question(ctx: PlanContext) -> LayoutQuestion:
    """Return what the search is asked; weights that FP8 or four bits will convert count as converted."""
    request = ctx.request
    converted = _converted_bits(ctx)
    expert_bits, linear_bits = served_bits(ctx) if converted is None else converted
    load, steps = request.expert_load, step_rule(ctx)
    # Without the scheduler pass vLLM takes as many requests as it does by itself.
    most_running = None if ctx.batch_is_of_clients else ctx.workload.batch_size
    if ctx.wish("scheduler")[0] is Wish.OFF:
        _, most_running = sizes_without_plan(ctx)
    return LayoutQuestion(
        memory=ctx.memory_request(
            max_num_seqs=most_running or ctx.workload.batch_size,
            max_model_len=ctx.workload.input_tokens + ctx.workload.output_tokens,
            kv_bits=cache_bits(ctx, cache_dtype(ctx)),
            cuda_graphs=not is_eager(ctx) and not argument_against_graphs(ctx.pinned),
            **({"expert_bits": expert_bits, "linear_bits": linear_bits} if converted else {}),
        ),
        steps=steps,
        gpu=ctx.gpu,
        gpus_per_machine=ctx.num_gpus,
        num_machines=request.num_nodes,
        servers_per_machine=_most_servers(ctx),
        split=_asked_split(ctx),
        clients=ctx.clients,
        input_tokens=ctx.workload.input_tokens,
        output_tokens=ctx.workload.output_tokens,
        max_running=most_running,
        expert_bits=expert_bits,
        linear_bits=linear_bits,
        fp8_blocks=_fills_blocks(ctx, converted),
        weights=_stored_experts(ctx, converted),
        speeds=ctx.software.kernel_speeds,
        our_kernels=_ours(ctx),
        fused_router_tokens=fused_router_tokens(ctx),
        load=None if load is None else load.placed_by.load,
        even_routing=ctx.pinned.value("--load-format") == "dummy",
        api_servers=ctx.pinned.count(API_SERVERS_FLAG),
        more_api_servers=may_add_api_servers(ctx),
        prompt_graphs=prompts_have_graphs(ctx, steps.given or steps.asked or steps.most),
        placed=ctx.wish("expert_placement")[0] is not Wish.OFF,
    )


def _fills_blocks(ctx: PlanContext, converted: tuple[float, float] | None) -> bool:
    """Return whether the fp8 pass will have vLLM convert the experts by block."""
    by_argument = "fp8" in (ctx.pinned.value("--quantization") or "")
    by_block = ctx.profile.passes.fp8.granularity != "channel"
    return converted is not None and converted[0] == _FP8_BITS and by_block and not by_argument


def _converted_bits(ctx: PlanContext) -> tuple[float, float] | None:
    """Return the bits of expert and other weights that are stored in 16 bits and converted; None: they are not."""
    if ctx.model.quant_method is not None:
        return None
    if "fp8" in (ctx.pinned.value("--quantization") or ""):
        return _FP8_BITS, _FP8_BITS
    if ctx.wish("sparsity_24")[0] is not Wish.OFF:
        return None
    fp8 = ctx.wish("fp8")[0] is not Wish.OFF and ctx.gpu.supports("fp8")
    if ctx.wish("four_bit")[0] is Wish.ON and ctx.profile.passes.four_bit.format == MXFP4:
        return MXFP4_BITS, _FP8_BITS if fp8 else DTYPE_BYTES[ctx.dtype] * 8
    return (_FP8_BITS, _FP8_BITS) if fp8 else None


def _stored_experts(ctx: PlanContext, converted: tuple[float, float] | None) -> str:
    """Return how the tables of kernel speeds call the experts' weights; "" where they have none."""
    if ctx.model.int4 is not None:
        return stored_table(ctx.model)
    if ctx.model.expert_format == MXFP4 or (converted is not None and converted[0] == MXFP4_BITS):
        return MXFP4
    if converted is not None or ctx.model.expert_format == "fp8":
        return "fp8_block" if ctx.model.weight_block is not None or converted is not None else "fp8_channel"
    return {"bfloat16": "bf16", "float16": "fp16"}.get(ctx.dtype, "") if ctx.model.expert_format == "dtype" else ""


def _ours(ctx: PlanContext) -> bool:
    wish, _ = ctx.wish("flash_dmoe")
    if wish is Wish.OFF or (stored_four_bits(ctx.model) and wish is not Wish.ON):
        return False
    return not why_model_does_not_fit(ctx) and not why_not_built(ctx)


def _most_servers(ctx: PlanContext) -> int | None:
    """Return how many servers may share a machine; None: as many as fit."""
    if ctx.request.layout is not None:
        return max(1, parse_layout(ctx.request.layout).replicas // ctx.request.num_nodes)
    on_one_machine = ctx.request.num_nodes == 1
    if ctx.wish("replicas")[0] is Wish.OFF or (on_one_machine and unsafe_flag(ctx, UNSAFE_FLAGS)):
        return 1
    return ctx.section("replicas").count


def _asked_split(ctx: PlanContext) -> tuple[int | None, int | None]:
    """Return how many prefill and decode servers are asked for; None: the search says it."""
    if ctx.request.layout is not None:
        pinned = parse_layout(ctx.request.layout)
        return pinned.prefill_servers, pinned.replicas
    asked = ctx.profile.passes.disaggregation
    return asked.prefill_servers, asked.decode_servers


def _allows(
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
            piped in (1, nodes),
            # The copies of a server lie on several machines with whole experts only.
            machines == 1 or layout.expert_parallel,
            nodes == 1 or across in ("auto", across_nodes),
            # Servers for prompts and answers that are asked for are several.
            not ctx.request.one_server or piped == nodes or ctx.wish("disaggregation")[0] is Wish.ON,
        )
    )


def _is_on(ctx: PlanContext, *passes: str) -> bool:
    return any(ctx.wish(name)[0] is Wish.ON for name in passes)


def _check_pinned(ctx: PlanContext, layout: Layout, ranking: Ranking, question: LayoutQuestion) -> None:
    if ranking.within or ranking.beyond:
        return
    there = ctx.num_gpus * ctx.request.num_nodes
    if layout.num_devices > there:
        raise UnsupportedError(
            f"--layout {layout.name}: needs {layout.num_devices} GPUs, found {there}", hint=_how_to_get(ctx, layout)
        )
    if ranking.do_not_fit:
        _refuse_too_large(ctx, layout, memory_of(question, layout))
    tensor, data = layout.tensor_parallel_size, layout.data_parallel_size
    why = why_not_shape(question, tensor, data, expert=layout.expert_parallel) or _why_not_over_machines(ctx, layout)
    machines = f"over {ctx.request.num_nodes} x {ctx.num_gpus} GPUs"
    raise UnsupportedError(
        f"--layout {layout.name}: {ctx.model.name} does not divide so {machines}{f' ({why})' if why else ''}",
        hint="leave it out: the dry run lists the layouts that are possible",
    )


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


def _refuse(ctx: PlanContext, ranking: Ranking, question: LayoutQuestion) -> NoReturn:
    nearest = ranking.beyond[0]
    apart = _apart_within(ctx, question)
    keeps = "" if apart is None else f"--enable-disaggregation keeps them ({apart.name}); else "
    raise GoalMissedError(
        f"no layout of {ctx.num_gpus * ctx.request.num_nodes} GPUs is predicted to keep the limits with {ctx.clients} "
        f"clients; the nearest, {nearest.layout.name}: {ctx.limits.why_not(nearest)}",
        hint=f"{keeps}fewer --clients, more GPUs or a higher limit; "
        f"--layout {nearest.layout.name} serves it all the same",
    )


def _apart_within(ctx: PlanContext, question: LayoutQuestion) -> Layout | None:
    """Return the best layout with prefill and decode apart that keeps the limits, where only the profile leaves those
    out; None: there is none, or the user said what is to be done with them.
    """
    if "disaggregation" in ctx.request.wishes or ctx.wish("disaggregation")[0] is not Wish.OFF:
        return None
    wishes = {**ctx.request.wishes, "disaggregation": (Wish.ON, "")}
    asked = dataclasses.replace(ctx, request=dataclasses.replace(ctx.request, wishes=wishes))
    within = rank(question, ctx.goal, ctx.limits, allowed=lambda each: _allows(asked, each, None)).within
    return within[0].layout if within else None


def _choice(ctx: PlanContext, ranking: Ranking, *, pinned: str) -> LayoutChoice:
    ordered = [*ranking.within, *ranking.beyond]
    chosen = ordered[0]
    return LayoutChoice(
        goal=ctx.goal,
        clients=ctx.clients,
        ttft_limit_ms=ctx.limits.ttft_ms,
        tpot_limit_ms=ctx.limits.tpot_ms,
        chosen=chosen.layout.name,
        pinned_by=pinned,
        estimates=tuple(
            _estimate(each, "" if each is chosen else _why_not(ctx, each, chosen)) for each in ordered[:_SHOWN]
        ),
        num_layouts=len(ordered) + len(ranking.do_not_fit),
        parts_us=_parts_us(chosen),
    )


def _parts_us(prediction: Prediction) -> dict[str, Quantity]:
    return {
        name: dataclasses.replace(part, value=_rounded(part.value))
        for name, part in prediction.parts.items()
        if part.value
    }


def _estimate(prediction: Prediction, why_not: str) -> LayoutEstimate:
    return LayoutEstimate(
        layout=prediction.layout.name,
        num_gpus=prediction.layout.num_devices,
        tpot_ms=_rounded(prediction.tpot_ms),
        ttft_ms=_rounded(prediction.ttft_ms),
        tokens_per_s=_rounded(prediction.tokens_per_s),
        weight_bytes=prediction.memory.weight_bytes,
        kv_tokens=prediction.memory.kv_tokens,
        running=prediction.running,
        waiting=prediction.waiting,
        api_servers=prediction.api_servers,
        front_end_share=_rounded(prediction.front_end_share),
        reading_share=_rounded(prediction.reading_share),
        why_not=why_not,
    )


def _why_not(ctx: PlanContext, each: Prediction, chosen: Prediction) -> str:
    """Return what a layout does worse than the chosen one."""
    broken = ctx.limits.why_not(each)
    if broken:
        return broken
    if each.waiting and not chosen.waiting:
        return waiting_in_words(each.waiting, each.running, copies=each.layout.num_engines)
    slower = each.tpot_ms / chosen.tpot_ms - 1
    fewer = 1 - each.tokens_per_s / chosen.tokens_per_s
    words = [f"TPOT {slower:+.0%}"] if abs(slower) >= _LEAST_SHOWN else []
    words += [f"tokens/s {-fewer:+.0%}"] if abs(fewer) >= _LEAST_SHOWN else []
    words += ["bound by the front end"] if words and each.front_end_share == 1 else []
    behind = why_behind(each, chosen, ctx.goal)
    words += [behind] if words and behind else []
    if words:
        return ", ".join(words)
    splits = each.layout.disaggregated and not chosen.layout.disaggregated
    return "prefill and decode apart gain nothing here" if splits else "the same within 0.5 %"


def _rounded(value: float) -> float:
    """Return the digits that a prediction may claim."""
    return float(f"{value:.{_DIGITS}g}")
