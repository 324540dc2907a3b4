"""Converts the experts' weights of a layer to FP8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_optimizer.errors import described
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.specs.layer_name import decoder_layer
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights, WeightFormat
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_decision

if TYPE_CHECKING:
    import torch

FP8_PASS = "fp8"
FORMAT = "fp8"


class Fp8Weights(WeightFormat):
    """E4M3 weights with FP32 scales; `ops.fused_experts` reads them in place.

    A layer stays plain where the plan keeps it, and where its output would change by more than the plan's budget. One
    that cannot be converted, for example because a weight is not finite, stays plain too and counts as refused.
    """

    name = FORMAT
    passes = (EXPERTS_PASS, FP8_PASS)

    def convert(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer in FP8 as the plan wants it, or plain.

        Raises:
            RequiredNotAppliedError: it cannot be converted, and the plan requires that it is.
        """
        session, decision = current_decision(FP8_PASS)
        params = decision.params_as(Fp8Params)
        if decoder_layer(layer_name) in params.excluded_layers:
            return _plain(w13, w2, "kept by the plan")
        try:
            return _converted(w13, w2, params)
        except Exception as error:  # noqa: BLE001 - vLLM is loading its model; the loaded weights do as well
            session.refused(FP8_PASS, f"{layer_name}: fallback: {described(error)}")
            return _plain(w13, w2, "could not be converted")

    def convert_again(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer's new weights in FP8; an output that they change by more than the budget is in the proof.

        Raises:
            RequiredNotAppliedError: it is, and the plan requires FP8 within that budget.
        """
        session, decision = current_decision(FP8_PASS)
        params = decision.params_as(Fp8Params)
        converted = _quantized(w13, w2, params)
        error, most = converted.output_error, params.max_layer_error
        if error is not None and most is not None and not error <= most:
            # The compiled graphs read FP8: the layer cannot go back to the weights as loaded.
            session.refused(
                FP8_PASS, f"{layer_name}: with new weights FP8 changes its output by {error:.3g}, allowed are {most:g}"
            )
        return converted

    def dense_expert(self, weights: KernelWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's two matrices in float32."""
        from moe_optimizer.ops.fp8_quant import dequantize_fp8

        assert weights.w13_scale is not None, weights.format
        assert weights.w2_scale is not None, weights.format
        return (
            dequantize_fp8(weights.w13[expert], weights.w13_scale[expert]),
            dequantize_fp8(weights.w2[expert], weights.w2_scale[expert]),
        )


def _converted(w13: torch.Tensor, w2: torch.Tensor, params: Fp8Params) -> KernelWeights:
    converted = _quantized(w13, w2, params)
    error, most = converted.output_error, params.max_layer_error
    # Written so that an error that is not a number is too large.
    if error is not None and most is not None and not error <= most:
        return _plain(w13, w2, f"FP8 changes its output by {error:.3g}, allowed are {most:g}", error)
    return converted


def _quantized(w13: torch.Tensor, w2: torch.Tensor, params: Fp8Params) -> KernelWeights:
    from moe_optimizer.ops.fp8_error import experts_output_error
    from moe_optimizer.ops.fp8_quant import quantize_fp8, saturated_share

    w13_fp8 = quantize_fp8(w13, granularity=params.granularity)
    w2_fp8 = quantize_fp8(w2, granularity=params.granularity)
    return KernelWeights(
        format=FORMAT,
        w13=w13_fp8[0],
        w2=w2_fp8[0],
        w13_scale=w13_fp8[1],
        w2_scale=w2_fp8[1],
        output_error=None if params.max_layer_error is None else experts_output_error(w13, w2, w13_fp8, w2_fp8),
        saturated=saturated_share(w13_fp8[0], w2_fp8[0]),
    )


def _plain(w13: torch.Tensor, w2: torch.Tensor, why: str, error: float | None = None) -> KernelWeights:
    return KernelWeights(format=PLAIN, w13=w13, w2=w2, output_error=error, why_plain=why)
