"""Has vLLM's processes count tokens per expert, and show the counts."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import Activation
from moe_optimizer.vllm_plugin.expert_load.capture import LOAD_PASS
from moe_optimizer.vllm_plugin.pass_patches import install_patches, vllm_fits
from moe_optimizer.vllm_plugin.patches.worker_execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.patches.worker_model_loaded import WORKER_MODEL_LOADED


def count_expert_load(activation: Activation, decision: Decision | None = None) -> None:  # noqa: ARG001 - read later
    """Patch vLLM's worker so that its model is counted, and show the counts on /metrics in the API server."""
    if not vllm_fits(activation, LOAD_PASS, changes_graph=True):
        return
    install_patches(activation, LOAD_PASS, WORKER_MODEL_LOADED, WORKER_EXECUTE_MODEL)
    show_expert_load(activation)


def show_expert_load(activation: Activation) -> None:
    """Show on /metrics, in the process that answers it, what the workers of this run have counted."""
    if activation.proof.role == "frontend":
        from moe_optimizer.vllm_plugin.expert_load.metrics import show_on_metrics

        show_on_metrics(activation.run_dir)
