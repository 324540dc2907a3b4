"""Has the experts of each layer converted to the planned weight format as soon as the layer is loaded."""

from __future__ import annotations

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, Activation
from moe_optimizer.vllm_plugin.patch import PatchReport, apply_when_imported


def convert_while_loading(activation: Activation, pass_name: str) -> None:
    """Install what lets the experts class convert a layer while the next ones are loaded."""
    from moe_optimizer.vllm_plugin.patches.layerwise_loading import LAYERWISE_LOADING

    if activation.wanted(EXPERTS_PASS) is None:
        activation.refused(pass_name, f"needs {EXPERTS_PASS}: no other kernel reads the converted experts")
        return

    def patched(_report: PatchReport) -> None:
        # Where it is refused, the layers are converted after all of them are loaded: more memory, the same server.
        activation.patches_changed()

    apply_when_imported(LAYERWISE_LOADING, on_change=patched)


def prune_experts(activation: Activation, decision: Decision) -> None:
    """Install sparsity_24."""
    convert_while_loading(activation, decision.pass_name)
