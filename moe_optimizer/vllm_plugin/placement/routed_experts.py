"""Gives each MoE layer the expert map of the plan, before its weights are loaded through that map."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.session import current_session


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - the method that is replaced
        # Afterwards: by then vLLM has chosen the kernel of the layer, and no weight has been loaded.
        original(self, *args, **kwargs)
        session = current_session()
        if session is not None:
            from moe_optimizer.vllm_plugin.placement.expert_placement import place_layer

            place_layer(session, self)

    return __init__


ROUTED_EXPERTS = Patch(
    target="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.__init__",
    why="vLLM places experts in order or round robin; there is no argument for a placement of one's own",
    remove_when="--expert-placement-strategy takes a placement, or EPLB starts from one",
    fingerprints={
        "0.26": "f563625bf2f1a6a3",
        "0.27": "70ffacbd1db90651",
        "0.28 to 0.29": "037e874b705f7f81",
        "0.30 to 0.31": "17346878a9d9ec0c",
        "0.32": "7e213af372b96d20",
        "0.33": "451b9be5729f2d63",
    },
    replacement=_replacement,
)
