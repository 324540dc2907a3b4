"""Makes the question that a request puts to the search over layouts."""

from __future__ import annotations

import dataclasses

from moe_optimizer.costs.weights import DTYPE_BYTES
from moe_optimizer.layouts.candidates import candidates
from moe_optimizer.layouts.experts import ours_compute
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.plan.decision import Status, Wish
from moe_optimizer.plan.pass_params import ParallelismParams
from moe_optimizer.plan_context.api_servers import API_SERVERS_FLAG, may_add_api_servers
from moe_optimizer.plan_context.cache_dtype import cache_bits, cache_dtype
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.decode_step import served_bits
from moe_optimizer.plan_context.expert_balancing import why_not_placed
from moe_optimizer.plan_context.expert_kernel import (
    stored_four_bits,
    stored_table,
    why_model_does_not_fit,
    why_not_built,
)
from moe_optimizer.plan_context.fused_router import fused_router_tokens
from moe_optimizer.plan_context.graph_arguments import argument_against_graphs, is_eager, prompts_have_graphs
from moe_optimizer.plan_context.routed_servers import UNSAFE_FLAGS, unsafe_flag
from moe_optimizer.plan_context.step_rule import sizes_without_plan, step_rule
from moe_optimizer.specs.expert_formats import MXFP4, MXFP4_BITS
from moe_optimizer.specs.front_end import FrontEnd
from moe_optimizer.specs.layout import Layout, parse_layout
from moe_optimizer.specs.links import Links

_FP8_BITS = 8


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
    question = LayoutQuestion(
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
        ours_where_never_slower=bool(stored_four_bits(ctx.model)) and ctx.wish("flash_dmoe")[0] is not Wish.ON,
        rounded_activations=ctx.profile.passes.four_bit.activations == "fp8",
        fused_router_tokens=fused_router_tokens(ctx),
        load=None if load is None else load.placed_by.load,
        even_routing=ctx.pinned.value("--load-format") == "dummy",
        # Other machines have other processors, and other links.
        front_end=ctx.software.front_end if ctx.hardware.origin == "probed" else FrontEnd(),
        links=ctx.software.links if ctx.hardware.origin == "probed" else Links(),
        api_servers=ctx.pinned.count(API_SERVERS_FLAG),
        more_api_servers=may_add_api_servers(ctx),
        prompt_graphs=prompts_have_graphs(ctx, steps.given or steps.asked or steps.most),
    )
    return dataclasses.replace(question, placed=placed_servers(ctx, question))


def placed_servers(ctx: PlanContext, question: LayoutQuestion) -> frozenset[Layout]:
    """Return the servers of the layouts in question whose experts the plan places by the measured load.

    After the expert_placement pass that is its decision. Before it, and where our kernels are still to be measured,
    they are those that it would place if our kernels computed what the search takes them to.
    """
    if question.load is None or ctx.wish("expert_placement")[0] is Wish.OFF:
        return frozenset()
    servers = {layout.server for layout in candidates(question) if layout.expert_parallel}
    return frozenset(server for server in servers if _is_placed(ctx, question, server))


def _is_placed(ctx: PlanContext, question: LayoutQuestion, server: Layout) -> bool:
    decided, kernels = ctx.decided.get("expert_placement"), ctx.decided.get("flash_dmoe")
    if decided is not None and kernels is not None and kernels.status is not Status.PENDING:
        return decided.status is Status.ON
    split = ParallelismParams(
        tensor_parallel_size=server.tensor_parallel_size,
        data_parallel_size=server.data_parallel_size,
        expert_parallel=server.expert_parallel,
    )
    return not why_not_placed(ctx, split, ours=ours_compute(question, server))


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
    if wish is Wish.OFF or why_model_does_not_fit(ctx) or why_not_built(ctx):
        return False
    # Beside the kernels of another vLLM nothing is known of experts that this one repacks.
    vllm = ctx.software.vllm.release if ctx.software.vllm is not None else ""
    beside = any(each.vllm == vllm for each in ctx.software.kernel_speeds.tables)
    return beside or wish is Wish.ON or not stored_four_bits(ctx.model)


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
