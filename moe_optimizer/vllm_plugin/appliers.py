"""Which function installs a pass in a vLLM process. One line per pass that the plugin carries out."""

from __future__ import annotations

import importlib
from typing import Protocol

from moe_optimizer.plan.decision import Decision
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, Activation

APPLIERS = {
    EXPERTS_PASS: "moe_optimizer.vllm_plugin.experts.apply_experts:offer_experts",
    "expert_load": "moe_optimizer.vllm_plugin.expert_load.apply_expert_load:count_expert_load",
    "expert_placement": "moe_optimizer.vllm_plugin.placement.apply_placement:apply_placement",
    "fp8": "moe_optimizer.vllm_plugin.experts.apply_fp8:convert_weights",
    "sparsity_24": "moe_optimizer.vllm_plugin.experts.convert_experts:prune_experts",
}
"""Pass name -> "module:function", imported when a plan wants the pass.

The function takes (activation, decision). It installs what it can at once and may leave the rest to a callback; it
calls `activation.applied` when the pass took effect, and `activation.refused` with the reason when it does not.
Called twice in one process, it changes nothing the second time.
"""


class Applier(Protocol):
    """Installs one pass."""

    def __call__(self, activation: Activation, decision: Decision) -> None:
        """Install it, or say why not."""
        ...


def applier(pass_name: str) -> Applier | None:
    """Return the function that installs a pass; None when this version of the plugin has none."""
    target = APPLIERS.get(pass_name)
    if target is None:
        return None
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
