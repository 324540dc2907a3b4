"""Offers our experts classes to vLLM's kernel choice."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, Activation
from moe_optimizer.vllm_plugin.compat import supported_version
from moe_optimizer.vllm_plugin.compile_factor import add_compile_factor
from moe_optimizer.vllm_plugin.patch import PatchReport, PatchState, apply_when_imported
from moe_optimizer.vllm_plugin.patches.fp8_oracle import FP8_ORACLE
from moe_optimizer.vllm_plugin.patches.unquantized_oracle import UNQUANTIZED_ORACLE


def offer_experts(activation: Activation, decision: Decision | None = None) -> None:
    """Patch vLLM's kernel choice; without a plan yet, the classes are offered once there is one that wants them."""
    import vllm

    supported, why_not = supported_version(str(vllm.__version__))
    why_not = why_not if not supported else add_compile_factor()
    if why_not:
        activation.refused(EXPERTS_PASS, why_not)
        return

    def patched(report: PatchReport) -> None:
        activation.patches_changed()
        if report.state is PatchState.REFUSED:
            activation.refused(EXPERTS_PASS, report.detail)

    apply_when_imported(UNQUANTIZED_ORACLE, on_change=patched)
    if decision is None or decision.params.get("kernel") == "cuda":
        apply_when_imported(FP8_ORACLE, on_change=patched)
