"""Has vLLM's processes place experts: by expert maps before loading, or as the policy of its EPLB."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import Activation
from moe_optimizer.vllm_plugin.pass_patches import install_patches, vllm_fits
from moe_optimizer.vllm_plugin.patch import apply_when_imported
from moe_optimizer.vllm_plugin.patches.routed_experts import ROUTED_EXPERTS
from moe_optimizer.vllm_plugin.placement.expert_placement import PLACEMENT_PASS


def apply_placement(activation: Activation, decision: Decision) -> None:
    """Install what the decision's mode needs."""
    if not vllm_fits(activation, PLACEMENT_PASS, changes_graph=False):
        return
    if decision.params["mode"] == "eplb":
        from moe_optimizer.vllm_plugin.placement.eplb_policy import register_policy

        register_policy(activation)
        return
    install_patches(activation, PLACEMENT_PASS, ROUTED_EXPERTS)


def offer_placement(activation: Activation) -> None:
    """Patch vLLM's layers for a plan that is made while vLLM builds the first of them; no plan, no change."""
    apply_when_imported(ROUTED_EXPERTS, on_change=lambda report: activation.patches_changed())  # noqa: ARG005
