"""Converts the experts' weights of a layer to MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import described
from moe_optimizer.plan.pass_params import FourBitParams
from moe_optimizer.specs.expert_formats import MXFP4
from moe_optimizer.specs.layer_name import decoder_layer
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights, WeightFormat
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_decision

if TYPE_CHECKING:
    import torch

FOUR_BIT_PASS = "four_bit"


class Mxfp4Weights(WeightFormat):
    """Four-bit codes with a scale byte per 32; `ops.fused_experts` reads them in place.

    A layer stays plain where the plan keeps it, and where its output would change by more than the plan's budget. One
    that cannot be converted, for example because a weight is not finite, stays plain too and counts as refused.
    """

    name = MXFP4
    passes = (EXPERTS_PASS, FOUR_BIT_PASS)

    def why_not(self, moe_config: Any) -> str:
        """Return why layers of this vLLM FusedMoEConfig cannot be in this format, or ""."""
        from moe_optimizer.ops.mxfp4 import SCALE_GROUP

        sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        if any(size % SCALE_GROUP for size in sizes):
            return f"MXFP4 experts need H and I in multiples of {SCALE_GROUP}, found {sizes[0]} and {sizes[1]}"
        return ""

    def convert(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer in four bits as the plan wants it, or plain.

        Raises:
            RequiredNotAppliedError: it cannot be converted, and the plan requires that it is.
        """
        session, decision = current_decision(FOUR_BIT_PASS)
        params = decision.params_as(FourBitParams)
        if decoder_layer(layer_name) in params.excluded_layers:
            return _plain(w13, w2, "kept by the plan")
        try:
            converted = _quantized(w13, w2, params)
        except Exception as error:  # noqa: BLE001 - vLLM is loading its model; the loaded weights do as well
            session.refused(FOUR_BIT_PASS, f"{layer_name}: fallback: {described(error)}")
            return _plain(w13, w2, "could not be converted")
        if _beyond_budget(converted, params):
            found, most = converted.output_error, params.max_layer_error
            return _plain(w13, w2, f"four bits change its output by {found:.3g}, allowed are {most:g}", found)
        return converted

    def convert_again(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer's new weights in four bits; an output that they change by more than the budget is in the
        proof.

        Raises:
            RequiredNotAppliedError: it is, and the plan requires four bits within that budget.
        """
        session, decision = current_decision(FOUR_BIT_PASS)
        params = decision.params_as(FourBitParams)
        converted = _quantized(w13, w2, params)
        if _beyond_budget(converted, params):
            # The compiled graphs read four bits: the layer cannot go back to the weights as loaded.
            session.refused(
                FOUR_BIT_PASS,
                f"{layer_name}: with new weights four bits change its output by {converted.output_error:.3g}, "
                f"allowed are {params.max_layer_error:g}",
            )
        return converted

    def dense_expert(self, weights: KernelWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's two matrices in float32."""
        from moe_optimizer.ops.mxfp4 import dequantize_mxfp4

        assert weights.w13_scale is not None, weights.format
        assert weights.w2_scale is not None, weights.format
        return (
            dequantize_mxfp4(weights.w13[expert], weights.w13_scale[expert]),
            dequantize_mxfp4(weights.w2[expert], weights.w2_scale[expert]),
        )


def _quantized(w13: torch.Tensor, w2: torch.Tensor, params: FourBitParams) -> KernelWeights:
    from moe_optimizer.ops.fp8_error import experts_output_error
    from moe_optimizer.ops.mxfp4 import quantize_mxfp4

    gate_up, down = quantize_mxfp4(w13), quantize_mxfp4(w2)
    return KernelWeights(
        format=MXFP4,
        w13=gate_up[0],
        w2=down[0],
        w13_scale=gate_up[1],
        w2_scale=down[1],
        output_error=None if params.max_layer_error is None else experts_output_error(w13, w2, gate_up, down),
    )


def _beyond_budget(converted: KernelWeights, params: FourBitParams) -> bool:
    error, most = converted.output_error, params.max_layer_error
    # Written so that an error that is not a number is too large.
    return error is not None and most is not None and not error <= most


def _plain(w13: torch.Tensor, w2: torch.Tensor, why: str, error: float | None = None) -> KernelWeights:
    return KernelWeights(format=PLAIN, w13=w13, w2=w2, output_error=error, why_plain=why)
