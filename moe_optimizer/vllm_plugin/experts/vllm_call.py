"""The arguments of a call that vLLM makes to an experts class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation


class VllmCall(NamedTuple):
    """The arguments of vLLM's `FusedMoEExpertsModular.apply` under its names and in its order.

    T tokens, H hidden, I expert width, E local experts, k slots per token.
    """

    output: torch.Tensor
    """[T, H]."""
    hidden_states: torch.Tensor
    """[T, H]."""
    w1: torch.Tensor
    """[E, 2 I, H]."""
    w2: torch.Tensor
    """[E, H, I]."""
    topk_weights: torch.Tensor
    """[T, k]."""
    topk_ids: torch.Tensor
    """[T, k]: global where there is an expert map."""
    activation: MoEActivation
    global_num_experts: int
    expert_map: torch.Tensor | None
    a1q_scale: torch.Tensor | None
    a2_scale: torch.Tensor | None
    workspace13: torch.Tensor
    workspace2: torch.Tensor
    expert_tokens_meta: mk.ExpertTokensMetadata | None
    apply_router_weight_on_input: bool

    @property
    def weights_to_apply(self) -> torch.Tensor:
        """Factors of the experts' outputs: ones where vLLM has multiplied the input by the router's weights already."""
        return torch.ones_like(self.topk_weights) if self.apply_router_weight_on_input else self.topk_weights


def unknown_interface() -> str:
    """Return in what this vLLM's interface of experts differs from the one that our classes are written for, or "".

    vLLM chooses the class before it makes an object or calls one: a difference found here leaves the layer to it.
    """
    base = mk.FusedMoEExpertsModular
    known: tuple[tuple[Callable[..., Any], tuple[str, ...], bool], ...] = (
        (base.__init__, ("moe_config", "quant_config"), False),
        (base.apply, VllmCall._fields, True),
        (base.workspace_shapes, ("M", "N", "K"), False),
        (mk.TopKWeightAndReduce.apply, ("output", "fused_expert_output"), False),
    )
    for function, expected, all_of_them in known:
        found = tuple(inspect.signature(function).parameters)[1:]
        if (found if all_of_them else found[: len(expected)]) != expected:
            return f"vLLM's {function.__qualname__} takes ({', '.join(found)}), known is ({', '.join(expected)})"
    # Further arguments of a constructor without a default would be missing from ours.
    extra = list(inspect.signature(base.__init__).parameters.values())[3:]
    needed = [each.name for each in extra if each.default is each.empty]
    return f"vLLM's {base.__init__.__qualname__} needs {', '.join(needed)}" if needed else ""
