"""Offers our experts classes to vLLM's kernel choice."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, Activation
from moe_optimizer.vllm_plugin.pass_patches import install_patches, vllm_fits
from moe_optimizer.vllm_plugin.patches.fp8_oracle import FP8_ORACLE
from moe_optimizer.vllm_plugin.patches.unquantized_oracle import UNQUANTIZED_ORACLE


def offer_experts(activation: Activation, decision: Decision | None = None) -> None:
    """Patch vLLM's kernel choice; without a plan yet, the classes are offered once there is one that wants them."""
    if not vllm_fits(activation, EXPERTS_PASS, changes_graph=True):
        return
    install_patches(activation, EXPERTS_PASS, UNQUANTIZED_ORACLE)
    if decision is None or decision.params.get("kernel") == "cuda":
        install_patches(activation, EXPERTS_PASS, FP8_ORACLE)
