"""Measures how much FP8 changes each layer's experts on a text: a process of its own, see `measure.process`.

Runs the model on vLLM's CPU build with our kernel, and computes every layer of every step twice: with the loaded
weights, whose output goes on, and with FP8. The model, FP8 copies of its experts and one sequence must fit.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moe_optimizer.files import write_atomically
from moe_optimizer.measure.observed_text import TextRequest, observe_text
from moe_optimizer.measure.process import OnStep, answer_request
from moe_optimizer.specs.fp8_sensitivity import Fp8Sensitivity

if TYPE_CHECKING:
    import torch

    from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityRequest(TextRequest):
    """What is measured."""

    granularity: Literal["block", "channel"]
    """Of the scales."""


@dataclass(slots=True)
class _LayerSums:
    weights: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    difference: float = 0.0
    size: float = 0.0


class LayerErrors:
    """Compares each layer with its FP8 copy, call by call.

    Args:
        granularity: of the scales.
    """

    def __init__(self, granularity: Literal["block", "channel"]) -> None:
        self._granularity: Literal["block", "channel"] = granularity
        self._layers: dict[int, _LayerSums] = {}

    def add(self, layer: int, weights: KernelWeights, call: ExpertsCall) -> None:
        """Compute a call, whose exact output is in `call.out`, with FP8 weights, and add the difference."""
        from moe_optimizer.ops.fp8_quant import quantize_fp8
        from moe_optimizer.ops.fused_experts import fused_experts

        if layer not in self._layers:
            converted = [quantize_fp8(weight, granularity=self._granularity) for weight in (weights.w13, weights.w2)]
            self._layers[layer] = _LayerSums((converted[0], converted[1]))
        sums = self._layers[layer]
        (w13, w13_scale), (w2, w2_scale) = sums.weights
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


def measure(request: SensitivityRequest, on_step: OnStep) -> Fp8Sensitivity:
    """Run the text through the model, write the error of each layer and return it."""
    on_step(0.0, "starting vLLM")
    errors = LayerErrors(request.granularity)
    tokens = observe_text(request, errors.add)
    sensitivity = Fp8Sensitivity(
        model=request.name, granularity=request.granularity, tokens=tokens, errors=errors.by_layer()
    )
    write_atomically(Path(request.output), sensitivity.to_json())
    return sensitivity


if __name__ == "__main__":
    sys.exit(answer_request(SensitivityRequest, sys.argv[1:], measure))
