"""Has the experts converted to FP8 inside vLLM's processes."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, Activation
from moe_optimizer.vllm_plugin.patch import PatchReport, apply_when_imported
from moe_optimizer.vllm_plugin.patches.layerwise_loading import LAYERWISE_LOADING
from moe_optimizer.vllm_plugin.weight_format_fp8 import FP8_PASS


def convert_experts(activation: Activation, decision: Decision) -> None:  # noqa: ARG001 - read for each layer
    """Have each layer converted as soon as it is loaded; the experts class does the converting."""
    if activation.wanted(EXPERTS_PASS) is None:
        activation.refused(FP8_PASS, f"needs {EXPERTS_PASS}: no other kernel reads the converted experts")
        return

    def patched(_report: PatchReport) -> None:
        # Where it is refused, the layers are converted after all of them are loaded: more memory, the same server.
        activation.patches_changed()

    apply_when_imported(LAYERWISE_LOADING, on_change=patched)
