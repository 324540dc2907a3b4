"""Says what a plan asks of the tables of kernel speeds: one question for each format that its experts may have."""

from __future__ import annotations

from moe_optimizer.inspection.kernel_speeds import cpu_device
from moe_optimizer.plan.pass_params import FourBitParams, Fp8Params
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cpu_workers import worker_threads
from moe_optimizer.plan_context.expert_balancing import given_replicas, load_balancer_runs
from moe_optimizer.plan_context.expert_kernel import DTYPES, converted_format, stored_four_bits, stored_table
from moe_optimizer.plan_context.triton_config import tuned_digest
from moe_optimizer.specs.expert_formats import sliced_width
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape, SpeedQuestion

ONLINE_SCHEMES = {"fp8": "fp8_tensor", "fp8_per_tensor": "fp8_tensor", "fp8_per_channel": "fp8_channel",
                  "fp8_per_block": "fp8_block"}  # fmt: skip
"""vLLM's --quantization -> how the experts' weights are then stored."""


def layer_shape(ctx: PlanContext) -> LayerShape:
    """Return the experts of one layer as one device of the plan holds them."""
    model, split = ctx.model, ctx.parallelism
    whole = split.expert_parallel
    numbered = model.num_experts + _replicas(ctx)
    experts = -(-numbered // split.num_devices) if whole else model.num_experts
    # vLLM slices whole experts over all devices of a server, those of other data-parallel ranks too.
    slices = 1 if whole else split.num_devices
    return LayerShape(
        hidden_size=model.expert_hidden_size,
        intermediate_size=sliced_width(model.moe_intermediate_size, slices, model.expert_format),
        num_experts=experts,
        num_global_experts=numbered,
        top_k=model.top_k,
    )


def _replicas(ctx: PlanContext) -> int:
    """Return how many replicas of experts a layer has, which vLLM's load balancer numbers like experts."""
    if not load_balancer_runs(ctx):
        return 0
    given = given_replicas(ctx)
    return ctx.section("expert_placement").redundant_experts or 0 if given is None else given


def stored_weights(ctx: PlanContext) -> tuple[str, ...]:
    """Return how the experts' weights may be stored when they are served, the likely one first, by the names of the
    tables. A second one is there for layers that stay as loaded, or where the model does not say.
    """
    if stored_four_bits(ctx.model):
        return (stored_table(ctx.model),)
    if ctx.device == "cpu":
        converted = converted_format(ctx)
        return ("fp8_block",) if converted == "fp8" else (converted or DTYPES[ctx.dtype],)
    four_bit = ctx.params(FourBitParams)
    if four_bit is not None:
        return (four_bit.weight_format, *((DTYPES[ctx.dtype],) if four_bit.excluded_layers else ()))
    given = ctx.pinned.value("--quantization")
    if given is not None:
        return (ONLINE_SCHEMES[given],) if given in ONLINE_SCHEMES else ()
    if ctx.model.quant_method is not None:
        return (f"fp8_{ctx.model.fp8_scales}",) if ctx.model.fp8_scales else ()
    fp8 = ctx.params(Fp8Params)
    if fp8 is None or fp8.expert_bits != 8 or ctx.request.inside_vllm:
        # vLLM itself converts by its arguments only, and one that runs already has got its own.
        return (DTYPES[ctx.dtype],)
    kept = (DTYPES[ctx.dtype],) if fp8.excluded_layers else ()
    return (f"fp8_{fp8.granularity}", *kept)


def questions(ctx: PlanContext) -> tuple[SpeedQuestion, ...]:
    """Return what is to be asked of the tables, in the order of `stored_weights`."""
    kernels, software, vllm = ctx.software.kernels, ctx.software, ctx.software.vllm
    on_cpu = ctx.device == "cpu"
    digest = tuned_digest(ctx)
    tuned = f"tuned={digest}" if digest else ""
    return tuple(
        SpeedQuestion(
            device=cpu_device(ctx.cpu, worker_threads(ctx)) if on_cpu else ctx.gpu.name,
            weights=weights,
            shape=layer_shape(ctx),
            kernel_hash=kernels.cpu_sources if on_cpu else kernels.cuda_sources,
            vllm="" if vllm is None else vllm.release,
            driver="" if on_cpu else ctx.hardware.driver_version or "",
            torch=software.torch,
            triton="" if on_cpu else software.triton,
            # A tuned configuration is of the format that is likely.
            environment=f"{software.kernel_environment} {tuned if at == 0 else ''}".strip(),
        )
        for at, weights in enumerate(stored_weights(ctx))
    )


def found_tables(ctx: PlanContext) -> dict[str, KernelSpeeds]:
    """Return the tables that answer, by how the weights are stored."""
    found = {question.weights: ctx.software.kernel_speeds.find(question) for question in questions(ctx)}
    return {weights: table for weights, table in found.items() if table is not None}


def table_of_ours_alone(ctx: PlanContext) -> KernelSpeeds | None:
    """Return the last table of our kernels on experts as no other kernel reads them, whatever it compares them with."""
    wanted = (ctx.gpu.name, stored_weights(ctx)[0], layer_shape(ctx), ctx.software.kernels.cuda_sources)
    tables = reversed(ctx.software.kernel_speeds.tables)
    found = (each for each in tables if (each.device, each.weights, each.shape, each.kernel_hash) == wanted)
    return next(found, None)


def open_questions(ctx: PlanContext) -> tuple[SpeedQuestion, ...]:
    """Return the questions that no table answers to the end."""
    tables = found_tables(ctx)
    return tuple(
        question
        for question in questions(ctx)
        if question.weights not in tables or not tables[question.weights].is_final
    )
