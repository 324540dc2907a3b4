"""Registers the torch custom op through which vLLM's forward pass reaches the kernel on the CPU.

vLLM compiles the whole MoE layer into its graph there, so only an op can run Python code (the proof counts calls).
Layers are told apart by the address of their weights: a constant argument per layer would make equal subgraphs
different, and each would be compiled anew.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_optimizer.ops import cpu_calls
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


def _run_experts(*arguments: Any) -> None:
    """Compute a call whose arguments are those of the schema."""
    out, x, w13, w2, weights, ids, expert_map, w13_scale, w2_scale, *_, w13_bias, w2_bias, format_name = arguments
    form = weight_format(format_name)
    # A call that is like an earlier one goes from here to the kernel: on small layers each step between costs a share.
    inputs = (x, w13, w2, weights, ids, expert_map, w13_scale, w2_scale, w13_bias, w2_bias, form.activation)
    if not (form.read_as_held and cpu_calls.again(inputs, out)):
        form.compute(*_described(arguments))
    session = current_session()
    if session is not None:
        session.called(w13.data_ptr(), x.shape[0], lambda: ((EXPERTS_PASS,), _unnamed(arguments).proof()))


def _described(arguments: tuple[Any, ...]) -> tuple[KernelWeights, ExpertsCall]:
    out, x, w13, w2, weights, ids, expert_map, *beside_weights, w13_bias, w2_bias, format_name = arguments
    call = ExpertsCall(out, x, weights, ids, expert_map, w13_bias, w2_bias)
    return KernelWeights(format_name, w13, w2, *beside_weights), call


def _unnamed(arguments: tuple[Any, ...]) -> ExpertsLayer:
    """Return a layer that was not named while loading, because vLLM has moved its weights since."""
    weights, call = _described(arguments)
    return ExpertsLayer(
        name="", weights=weights, dtype=call.x.dtype, top_k=call.topk_ids.shape[1], expert_map=call.expert_map
    )


def _run_experts_fake(*_args: torch.Tensor | str | None) -> None:
    return None


_library.impl("run_experts", _run_experts, "CPU")
torch.library.register_fake("moe_optimizer_vllm::run_experts", _run_experts_fake, lib=_library)

run_experts = torch.ops.moe_optimizer_vllm.run_experts.default
