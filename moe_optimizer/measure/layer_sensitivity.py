"""Measures how much fewer bits change each layer's experts on a text: a process of its own, see `measure.process`.

Runs the model on vLLM's CPU build with our kernel, and computes every layer of every step twice: with the loaded
weights, whose output goes on, and with converted ones. The model, copies of its experts and one sequence must fit.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_optimizer.files import write_atomically
from moe_optimizer.measure.observed_text import TextRequest, observe_text
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.specs.expert_formats import INT4, MXFP4
from moe_optimizer.specs.layer_sensitivity import LayerSensitivity, MeasuredWeights

if TYPE_CHECKING:
    import torch

    from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights, Operand


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRequest(TextRequest):
    """What is measured."""

    weights: MeasuredWeights
    """What the experts are converted to."""


@dataclass(slots=True)
class _LayerSums:
    converted: tuple[Operand, Operand]
    difference: float = 0.0
    size: float = 0.0


class LayerErrors:
    """Compares each layer with its converted copy, call by call.

    Args:
        weights: what it is converted to.
    """

    def __init__(self, weights: MeasuredWeights) -> None:
        self._weights: MeasuredWeights = weights
        self._layers: dict[int, _LayerSums] = {}

    def add(self, layer: int, weights: KernelWeights, call: ExpertsCall) -> None:
        """Compute a call, whose exact output is in `call.out`, with converted weights, and add the difference."""
        from moe_optimizer.ops.fused_experts import fused_experts

        if layer not in self._layers:
            self._layers[layer] = _LayerSums(
                (_converted(weights.w13, self._weights), _converted(weights.w2, self._weights))
            )
        sums = self._layers[layer]
        (w13, w13_scale), (w2, w2_scale) = sums.converted
        changed = fused_experts(
            call.x.contiguous(),
            w13,
            w2,
            call.topk_weights,
            call.topk_ids,
            expert_map=call.expert_map,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
        )
        sums.difference += float((changed.double() - call.out.double()).square().sum())
        sums.size += float(call.out.double().square().sum())

    def by_layer(self) -> dict[int, float]:
        """Return the relative error of each layer."""
        layers = sorted(self._layers.items())
        return {layer: math.sqrt(sums.difference / sums.size) if sums.size else 0.0 for layer, sums in layers}


def _converted(weight: torch.Tensor, to: MeasuredWeights) -> Operand:
    """Return a matrix as the kernel takes it, with its scales beside it where it does not hold them."""
    from moe_optimizer.ops.fp8_quant import quantize_fp8
    from moe_optimizer.ops.int4 import quantize_int4
    from moe_optimizer.ops.mxfp4 import quantize_mxfp4

    if to == MXFP4:
        return quantize_mxfp4(weight)
    if to.startswith("fp8"):
        return quantize_fp8(weight, granularity="block" if to == "fp8_block" else "channel")
    return quantize_int4(weight, int(to.removeprefix(f"{INT4}_g"))), None


def measure(request: SensitivityRequest, on_step: OnStep) -> LayerSensitivity:
    """Run the text through the model, write the error of each layer and return it."""
    on_step(0.0, "starting vLLM")
    errors = LayerErrors(request.weights)
    tokens = observe_text(request, errors.add)
    sensitivity = LayerSensitivity(model=request.name, weights=request.weights, tokens=tokens, errors=errors.by_layer())
    write_atomically(Path(request.output), sensitivity.to_json())
    return sensitivity


if __name__ == "__main__":
    sys.exit(answer_request(SensitivityRequest, sys.argv[1:], measure))
