"""Says whether experts can be held in four bits, and whether the plan will: two passes ask."""

from __future__ import annotations

from moe_optimizer.costs.weights import DTYPE_BYTES
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_balancing import load_balancer_runs
from moe_optimizer.plan_context.expert_kernel import INT4_OP, why_not_for_converted_weights
from moe_optimizer.plan_context.layer_sensitivity import layers_over_budget
from moe_optimizer.specs.expert_formats import INT4, MXFP4, MXFP4_GROUP, four_bits, int4_weights

_QUANTIZATION_FLAGS = ("--quantization", "--quantization-config")


def why_not_in_four_bits(ctx: PlanContext) -> str:
    """Return why the experts cannot be in the profile's format, by model, device, sizes and kernel, or ""."""
    model, section = ctx.model, ctx.profile.passes.four_bit
    if not model.is_moe:
        return "the model has no experts"
    if section.format == INT4 and ctx.device != "cpu":
        return "our kernels read INT4 on the CPU only: on GPUs the format is mxfp4"
    if section.activations == "fp8" and ctx.device == "cpu":
        return "on the CPU our kernels keep the activations as they are, found four_bit.activations fp8"
    if section.format == MXFP4 and section.group != MXFP4_GROUP:
        return f"mxfp4 has a scale per {MXFP4_GROUP} weights, found group {section.group} (format int4 has it)"
    if model.expert_format in (INT4, MXFP4):
        return (
            f"the experts are in four bits already ({model.expert_format.upper()}): flash_dmoe says which kernels "
            "read them"
        )
    if model.quant_method is not None:
        return f"needs unquantised expert weights to convert, found {model.quant_method}"
    if load_balancer_runs(ctx):
        return "vLLM's EPLB was never run on experts in four bits (expert_placement)"
    given = next((flag for flag in _QUANTIZATION_FLAGS if flag in ctx.pinned), None)
    if given is not None:
        return f"{given} {ctx.pinned.value(given)} is given after -- and decides"
    width = model.moe_intermediate_size
    if not ctx.parallelism.expert_parallel:
        width //= ctx.parallelism.tensor_parallel_size
    if model.expert_hidden_size % section.group or width % section.group:
        return (
            f"needs a hidden size and an expert width in multiples of {section.group}, which share a scale, "
            f"found {model.expert_hidden_size} and {width}"
        )
    why = why_not_for_converted_weights(ctx)
    if not why and section.format == INT4 and INT4_OP not in ctx.software.kernels.cpu_ops:
        return f"{INT4_OP} has no CPU kernel in this build"
    return why


def will_be_in_four_bits(ctx: PlanContext) -> bool:
    """Return whether the experts will be converted to MXFP4 on GPUs, which leaves only the other weights to FP8."""
    return ctx.device == "cuda" and ctx.wish("four_bit")[0] is Wish.ON and not why_not_in_four_bits(ctx)


def four_bit_layers_kept(ctx: PlanContext) -> tuple[int, ...]:
    """Return the decoder layers whose experts stay as they are, in order: those that the profile names, and those that
    were measured to change by more than it allows.

    Raises:
        InputError: the measurement is of something else.
    """
    section = ctx.profile.passes.four_bit
    named = {int(part.removeprefix("layers.")) for part in section.keep_bf16_layers}
    weights = MXFP4 if section.format == MXFP4 else int4_weights(section.group, zero_points=False)
    over = layers_over_budget(
        ctx, ctx.request.four_bit_sensitivity, pass_name="four_bit", weights=weights, most=section.max_layer_error
    )
    return tuple(sorted(named | over))


def four_bit_stored_bits(ctx: PlanContext) -> float:
    """Return the bits of an expert weight on average over what is converted and what stays."""
    moe = set(ctx.model.moe_layers)
    kept = len(moe & set(four_bit_layers_kept(ctx))) / len(moe)
    section = ctx.profile.passes.four_bit
    return 8 * DTYPE_BYTES[ctx.dtype] * kept + four_bits(section.format, section.group) * (1 - kept)
