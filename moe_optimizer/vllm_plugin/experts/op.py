"""Registers the torch custom op through which vLLM's forward pass reaches the kernel on the CPU.

vLLM compiles the whole MoE layer into its graph there, so only an op can run Python code (the proof counts calls).
Layers are told apart by the address of their weights: a constant argument per layer would make equal subgraphs
different, and each would be compiled anew.
"""

from __future__ import annotations

import torch

from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights, weight_format
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_session

_SCHEMA = (
    "run_experts(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? expert_map, Tensor? w13_scale, Tensor? w2_scale, Tensor? w13_mask, Tensor? w2_mask, "
    "Tensor? w13_zero, Tensor? w2_zero, Tensor? w13_bias, Tensor? w2_bias, str weight_format) -> ()"
)
# Its own namespace: the ops package registers the kernels in another, and a name can be defined only once.
_library = torch.library.Library("moe_optimizer_vllm", "DEF")
_library.define(_SCHEMA)


def _run_experts(  # noqa: PLR0917 - the op's schema
    out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13_scale: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    w13_mask: torch.Tensor | None,
    w2_mask: torch.Tensor | None,
    w13_zero: torch.Tensor | None,
    w2_zero: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    format_name: str,
) -> None:
    weights = KernelWeights(format_name, w13, w2, w13_scale, w2_scale, w13_mask, w2_mask, w13_zero, w2_zero)
    call = ExpertsCall(out, x, topk_weights, topk_ids, expert_map, w13_bias, w2_bias)
    weight_format(format_name).compute(weights, call)
    session = current_session()
    if session is not None:
        session.called(w13.data_ptr(), x.shape[0], lambda: ((EXPERTS_PASS,), _unnamed(weights, call).proof()))


def _unnamed(weights: KernelWeights, call: ExpertsCall) -> ExpertsLayer:
    """Return a layer that was not named while loading, because vLLM has moved its weights since."""
    return ExpertsLayer(
        name="", weights=weights, dtype=call.x.dtype, top_k=call.topk_ids.shape[1], expert_map=call.expert_map
    )


def _run_experts_fake(*_args: torch.Tensor | str | None) -> None:
    return None


_library.impl("run_experts", _run_experts, "CPU")
torch.library.register_fake("moe_optimizer_vllm::run_experts", _run_experts_fake, lib=_library)

run_experts = torch.ops.moe_optimizer_vllm.run_experts
