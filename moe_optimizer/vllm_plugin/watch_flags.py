"""Has vLLM's workers show what became of the plan's flags."""

from __future__ import annotations

from moe_optimizer.vllm_plugin.activation import Activation
from moe_optimizer.vllm_plugin.captured_graphs import captures_graphs
from moe_optimizer.vllm_plugin.compat import supported_version
from moe_optimizer.vllm_plugin.flag_passes import flag_decisions, refuse_flags
from moe_optimizer.vllm_plugin.patch import PatchReport, PatchState, apply_when_imported
from moe_optimizer.vllm_plugin.patches.worker_execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.patches.worker_model_loaded import WORKER_MODEL_LOADED


def watch_flags(activation: Activation) -> None:
    """Have this process look at its vLLM's configuration once its model is loaded, if it loads one."""
    assert activation.plan is not None, "flags of a plan that is not made"
    decisions = flag_decisions(activation.plan)
    if not decisions:
        return

    import vllm

    with_graphs = tuple(decision for decision in decisions if captures_graphs(decision))

    def patched(report: PatchReport) -> None:
        activation.patches_changed()
        if report.state is PatchState.REFUSED:
            refuse_flags(activation, decisions, f"cannot be shown: {report.detail}")

    def patched_steps(report: PatchReport) -> None:
        activation.patches_changed()
        if report.state is PatchState.REFUSED:
            refuse_flags(activation, with_graphs, f"cannot be shown: {report.detail}")

    supported, why_not = supported_version(str(vllm.__version__))
    if not supported:
        refuse_flags(activation, decisions, f"cannot be shown: {why_not}")
        return
    apply_when_imported(WORKER_MODEL_LOADED, on_change=patched)
    if with_graphs:
        apply_when_imported(WORKER_EXECUTE_MODEL, on_change=patched_steps)
