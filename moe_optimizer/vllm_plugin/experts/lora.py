"""Has MoE layers that no LoRA adapter may change served as without adapters.

vLLM marks every MoE layer of a server with --enable-lora as one with adapters, and takes a kernel that applies them
unasked, also where --lora-target-modules leaves the experts out and it never gives them LoRA weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.specs.lora_targets import reach_experts
from moe_optimizer.vllm_plugin.patch import Patch, PatchState, patch_reports
from moe_optimizer.vllm_plugin.server_facts import lora_targets, server_facts, uses_lora
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session


def why_adapters_keep_vllms() -> str:
    """Return why the experts of this server are left to vLLM because of LoRA, or ""."""
    if not uses_lora():
        return ""
    if reach_experts(lora_targets()):
        return "LoRA adapters may change the experts: vLLM's kernels apply them (--lora-target-modules leaves them out)"
    report = next((each for each in patch_reports() if each.patch is MOE_LAYER_CONFIG), None)
    if report is None or report.state is not PatchState.APPLIED:
        detail = "" if report is None else f": {report.detail}"
        return f"vLLM takes its own LoRA kernel unasked, and that could not be changed{detail}"
    return ""


def _without_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def marked(self: Any) -> None:
        original(self)
        session = current_session()
        if session is None or not self.is_lora_enabled:
            return
        with session.falling_back(EXPERTS_PASS):  # the model works with the mark too
            if not reach_experts(lora_targets()) and _ours_are_planned(session):
                self.is_lora_enabled = False

    return marked


def _ours_are_planned(session: PluginSession) -> bool:
    session.resolve_plan(server_facts)
    return session.wanted(EXPERTS_PASS) is not None


MOE_LAYER_CONFIG = Patch(
    target="vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.__post_init__",
    why="vLLM marks each MoE layer as one with LoRA adapters, also where --lora-target-modules leaves out its experts",
    remove_when="vLLM asks for LoRA kernels only in the layers that it wraps",
    fingerprints={"0.26 to 0.31": "bdf150b5c2651e12", "0.32 to 0.33": "efecce3554f40867"},
    replacement=_without_adapters,
)
