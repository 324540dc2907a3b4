"""Converts the experts' weights of a layer to INT4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_optimizer.plan.pass_params import FourBitParams
from moe_optimizer.specs.expert_formats import INT4
from moe_optimizer.vllm_plugin.experts.weight_format import KernelWeights
from moe_optimizer.vllm_plugin.experts.weight_format_mxfp4 import FOUR_BIT_PASS
from moe_optimizer.vllm_plugin.experts.weight_format_quantized import QuantizedWeights
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_decision

if TYPE_CHECKING:
    import torch

    from moe_optimizer.ops.int4 import Int4Weight
    from moe_optimizer.vllm_plugin.experts.weight_format import Operand


class Int4Weights(QuantizedWeights):
    """Four-bit integers around 0 with a BF16 scale per group, on the CPU."""

    name = INT4
    passes = (EXPERTS_PASS, FOUR_BIT_PASS)
    read_as_held = False
    pass_name, params, words = FOUR_BIT_PASS, FourBitParams, "four bits change"

    def why_not(self, moe_config: Any) -> str:
        """Return why layers of this vLLM FusedMoEConfig cannot be in this format, or ""."""
        _, decision = current_decision(FOUR_BIT_PASS)
        group = decision.params_as(FourBitParams).group
        sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        if any(size % group for size in sizes):
            return f"INT4 experts need H and I in multiples of the group {group}, found {sizes[0]} and {sizes[1]}"
        return ""

    def quantized(self, w13: torch.Tensor, w2: torch.Tensor, params: FourBitParams) -> KernelWeights:
        """Return the weights in INT4."""
        from moe_optimizer.ops.int4 import quantize_int4

        gate_up, down = quantize_int4(w13, params.group), quantize_int4(w2, params.group)
        return KernelWeights(INT4, gate_up.codes, down.codes, w13_scale=gate_up.scale, w2_scale=down.scale)

    def dense_expert(self, weights: KernelWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's two matrices in float32."""
        from moe_optimizer.ops.int4 import dequantize_int4

        w13, w2 = _stored(weights)
        return dequantize_int4(w13.expert(expert)), dequantize_int4(w2.expert(expert))

    def operands(self, weights: KernelWeights) -> tuple[Operand, Operand]:
        """Return both as weights that have their scales."""
        w13, w2 = _stored(weights)
        return (w13, None), (w2, None)


def _stored(weights: KernelWeights) -> tuple[Int4Weight, Int4Weight]:
    from moe_optimizer.ops.int4 import Int4Weight

    assert weights.w13_scale is not None, weights.format
    assert weights.w2_scale is not None, weights.format
    w13 = Int4Weight(weights.w13, weights.w13_scale, weights.w13_zero)
    return w13, Int4Weight(weights.w2, weights.w2_scale, weights.w2_zero)
