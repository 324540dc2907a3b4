"""Has weights converted to FP8 in vLLM's processes: experts by the plugin, or all by vLLM with another quantiser."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import Activation
from moe_optimizer.vllm_plugin.experts.convert_experts import convert_while_loading
from moe_optimizer.vllm_plugin.experts.weight_format import FORMAT_PARAM
from moe_optimizer.vllm_plugin.experts.weight_format_fp8 import FP8_PASS
from moe_optimizer.vllm_plugin.patch import PatchReport, PatchState, apply_when_imported


def convert_weights(activation: Activation, decision: Decision) -> None:
    """Install what the decision needs."""
    if FORMAT_PARAM in decision.params:
        convert_while_loading(activation, FP8_PASS)
    else:
        _replace_quantizer(activation)


def _replace_quantizer(activation: Activation) -> None:
    from moe_optimizer.vllm_plugin.patches.online_fp8_quantizer import ONLINE_FP8_QUANTIZER

    def patched(report: PatchReport) -> None:
        activation.patches_changed()
        if report.state is PatchState.REFUSED:
            activation.refused(FP8_PASS, f"vLLM's own quantizer is used: {report.detail}")

    apply_when_imported(ONLINE_FP8_QUANTIZER, on_change=patched)
