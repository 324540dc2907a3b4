"""Decides whether experts are held in four bits."""

from __future__ import annotations

from moe_optimizer.costs.roofline import experts_read_ratio
from moe_optimizer.costs.weights import DTYPE_BYTES
from moe_optimizer.errors import InputError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import UNJUDGED, Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import FourBitParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_kernel import why_converted_already
from moe_optimizer.plan_context.four_bits import four_bit_layers_kept, four_bit_stored_bits, why_not_in_four_bits
from moe_optimizer.plan_context.layer_sensitivity import measured_on
from moe_optimizer.specs.expert_formats import INT4, MXFP4
from moe_optimizer.specs.quantity import bytes_in_words

_RECORDS = {
    "cpu": "benchmarks/records/2026-11-24_epyc_four_bit.json",
    "cuda": "benchmarks/records/2026-11-23_h100_mxfp4_experts.json",
}

_SCALE = {MXFP4: "a power of two", INT4: "a BF16 scale"}

_NOT_JUDGED = (
    "four bits change the answers: auto takes them where `moe-optimizer quality` with --enable-four-bit has kept every "
    "threshold for the same plan, and it has not"
)


class FourBit(OptimizationPass):
    """MXFP4 or INT4 experts: a quarter of the bytes of BF16, and a little more for the scales.

    Converted layer by layer while loading. Four bits change every answer, so `auto` is off here: the command line asks
    for them by name where `quality` has judged the plan that has them (cli/judgement.py).
    """

    name = "four_bit"
    flag = "four-bit"
    title = "experts in four bits (MXFP4, INT4)"
    limits = "unquantised experts, through our kernels; on GPUs Hopper, BF16 activations; the output changes"
    no_gain = "the model has no experts"
    needs_experts = True

    def why_not(self, ctx: PlanContext) -> str:
        """Check model, device and sizes, then the kernel."""
        if ctx.wish(self.name)[0] is not Wish.ON:
            return why_not_in_four_bits(ctx) or _NOT_JUDGED
        return why_converted_already(ctx) or why_not_in_four_bits(ctx)

    def gain(self, ctx: PlanContext) -> Gain | None:
        """Return how many times fewer expert bytes a decode step reads."""
        if not ctx.model.is_moe:
            return None
        whole = 8 * DTYPE_BYTES[ctx.dtype]
        to_bits = four_bit_stored_bits(ctx)
        ratio = experts_read_ratio(ctx.model, batch=ctx.workload.batch_size, from_bits=whole, to_bits=to_bits)
        return Gain(metric="expert weight bytes per decode step", ratio=ratio)

    def choose(self, ctx: PlanContext) -> Decision:
        """Convert the layers that the profile does not keep."""
        section, layers = ctx.profile.passes.four_bit, _excluded_layers(ctx)
        if set(ctx.model.moe_layers) <= set(layers):
            return self.refused(ctx, "every layer stays as it is: keep_bf16_layers and max_layer_error leave none")
        bits, given = four_bit_stored_bits(ctx), ctx.request.four_bit_sensitivity
        # What was measured on text before is not measured once more while loading.
        most = section.max_layer_error if given is None else None
        return self.decision(
            ctx,
            Status.ON,
            f"experts in {section.format.upper()}",
            f"four bits a weight and {_SCALE[section.format]} per {section.group}, converted layer by layer while "
            f"loading"
            f"{_found_while_loading(ctx, most, bits)}; the output changes, and {UNJUDGED}",
            Applier.PLUGIN,
            evidence=(_RECORDS[ctx.device], *measured_on(given, "four bits change")),
            gain=self.gain(ctx),
            params=FourBitParams(
                weight_format=section.format,
                group=section.group,
                excluded_layers=layers,
                max_layer_error=most,
                stored_expert_bits=bits,
            ),
        )


def _excluded_layers(ctx: PlanContext) -> tuple[int, ...]:
    """Return the decoder layers that stay as they are.

    Raises:
        InputError: the model has no such layer, or the measurement is of something else.
    """
    layers = four_bit_layers_kept(ctx)
    if layers and max(layers) >= ctx.model.num_layers:
        raise InputError(
            f"four_bit.keep_bf16_layers ({ctx.profile_origin}): got layers.{max(layers)}, "
            f"expected at most layers.{ctx.model.num_layers - 1}: {ctx.model.name} has {ctx.model.num_layers} layers"
        )
    return layers


def _found_while_loading(ctx: PlanContext, most: float | None, bits: float) -> str:
    """Return that the plugin may leave more layers than planned, with the weights if it leaves all; "": it may not."""
    if most is None:
        return ""
    planned, unconverted = (ctx.memory(**ctx.split_terms(), expert_bits=each).weight_bytes for each in (bits, None))
    return (
        f"; a layer that they change by more than {most:g} stays {ctx.dtype}, which the memory plan does not count "
        f"(all: {bytes_in_words(unconverted)} of weights instead of {bytes_in_words(planned)})"
    )
