"""Decides whether experts are held in four bits."""

from __future__ import annotations

from moe_optimizer.costs.roofline import experts_read_ratio
from moe_optimizer.costs.weights import DTYPE_BYTES
from moe_optimizer.errors import InputError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import UNJUDGED, Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import FourBitParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_balancing import load_balancer_runs
from moe_optimizer.plan_context.expert_kernel import why_converted_already, why_not_for_converted_weights
from moe_optimizer.specs.expert_formats import MXFP4_BITS, MXFP4_GROUP
from moe_optimizer.specs.quantity import bytes_in_words

_RECORDS = {
    "cpu": "benchmarks/records/2026-11-23_epyc_four_bit.json",
    "cuda": "benchmarks/records/2026-11-23_h100_mxfp4_experts.json",
}
_QUANTIZATION_FLAGS = ("--quantization", "--quantization-config")


class FourBit(OptimizationPass):
    """MXFP4 experts: a quarter of the bytes of BF16, and a little more for the scales.

    Converted layer by layer while loading. Off in every shipped profile, and `auto` is off too: four bits change every
    answer, and only a quality gate may allow it.
    """

    name = "four_bit"
    flag = "four-bit"
    title = "experts in four bits (MXFP4)"
    limits = "unquantised experts, through our kernels; on GPUs Hopper, BF16 activations; the output changes"
    no_gain = "the model has no experts"
    needs_experts = True

    def why_not(self, ctx: PlanContext) -> str:
        """Check model, device and sizes, then the kernel."""
        model = ctx.model
        if model.quant_method is not None:
            return f"needs unquantised expert weights to convert, found {model.quant_method}"
        if load_balancer_runs(ctx):
            return "vLLM's EPLB was never run on experts in four bits (expert_placement)"
        given = next((flag for flag in _QUANTIZATION_FLAGS if flag in ctx.pinned), None)
        if given is not None:
            return f"{given} {ctx.pinned.value(given)} is given after -- and decides"
        converted = why_converted_already(ctx)
        if converted:
            return converted
        width = model.moe_intermediate_size
        if not ctx.parallelism.expert_parallel:
            width //= ctx.parallelism.tensor_parallel_size
        if model.expert_hidden_size % MXFP4_GROUP or width % MXFP4_GROUP:
            return (
                f"needs a hidden size and an expert width in multiples of {MXFP4_GROUP}, which share a scale, "
                f"found {model.expert_hidden_size} and {width}"
            )
        return why_not_for_converted_weights(ctx)

    def gain(self, ctx: PlanContext) -> Gain | None:
        """Return how many times fewer expert bytes a decode step reads."""
        if not ctx.model.is_moe:
            return None
        whole = 8 * DTYPE_BYTES[ctx.dtype]
        to_bits = _stored_bits(ctx, _excluded_layers(ctx))
        ratio = experts_read_ratio(ctx.model, batch=ctx.workload.batch_size, from_bits=whole, to_bits=to_bits)
        return Gain(metric="expert weight bytes per decode step", ratio=ratio)

    def choose(self, ctx: PlanContext) -> Decision:
        """Convert where it is asked for by name."""
        if ctx.wish(self.name)[0] is not Wish.ON:
            return self.when_off(ctx, "four bits change the answers and no quality gate has allowed it; auto is off")
        section, layers = ctx.profile.passes.four_bit, _excluded_layers(ctx)
        if set(ctx.model.moe_layers) <= set(layers):
            return self.refused(ctx, "every layer stays as it is: keep_bf16_layers leaves none")
        bits = _stored_bits(ctx, layers)
        return self.decision(
            ctx,
            Status.ON,
            "experts in MXFP4",
            f"four bits a weight and a power of two per {MXFP4_GROUP}, converted layer by layer while loading"
            f"{_found_while_loading(ctx, section.max_layer_error, bits)}; the output changes, and {UNJUDGED}",
            Applier.PLUGIN,
            evidence=(_RECORDS[ctx.device],),
            gain=self.gain(ctx),
            params=FourBitParams(
                weight_format=section.format,
                excluded_layers=layers,
                max_layer_error=section.max_layer_error,
                stored_expert_bits=bits,
            ),
        )


def _excluded_layers(ctx: PlanContext) -> tuple[int, ...]:
    """Return the decoder layers that the profile keeps as they are.

    Raises:
        InputError: the model has no such layer.
    """
    layers = {int(part.removeprefix("layers.")) for part in ctx.profile.passes.four_bit.keep_bf16_layers}
    if layers and max(layers) >= ctx.model.num_layers:
        raise InputError(
            f"four_bit.keep_bf16_layers ({ctx.profile_origin}): got layers.{max(layers)}, "
            f"expected at most layers.{ctx.model.num_layers - 1}: {ctx.model.name} has {ctx.model.num_layers} layers"
        )
    return tuple(sorted(layers))


def _stored_bits(ctx: PlanContext, layers: tuple[int, ...]) -> float:
    """Return the bits of an expert weight on average over what is converted and what stays."""
    moe = set(ctx.model.moe_layers)
    kept = len(moe & set(layers)) / len(moe)
    return 8 * DTYPE_BYTES[ctx.dtype] * kept + MXFP4_BITS * (1 - kept)


def _found_while_loading(ctx: PlanContext, most: float | None, bits: float) -> str:
    """Return that the plugin may leave more layers than planned, with the weights if it leaves all; "": it may not."""
    if most is None:
        return ""
    planned, unconverted = (ctx.memory(**ctx.split_terms(), expert_bits=each).weight_bytes for each in (bits, None))
    return (
        f"; a layer that they change by more than {most:g} stays {ctx.dtype}, which the memory plan does not count "
        f"(all: {bytes_in_words(unconverted)} of weights instead of {bytes_in_words(planned)})"
    )
