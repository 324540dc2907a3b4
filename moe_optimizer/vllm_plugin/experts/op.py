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
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, ExpertsCall, KernelWeights, weight_format
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_session

_SCHEMA = (
    "run_experts(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? expert_map, Tensor? w13_scale, Tensor? w2_scale, Tensor? w13_mask, Tensor? w2_mask, "
    "Tensor? w13_zero, Tensor? w2_zero, Tensor? w13_bias, Tensor? w2_bias, str weight_format) -> ()"
)
_PLAIN_SCHEMA = (
    "run_plain_experts(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids) -> ()"
)
"""Of a layer that has nothing else: handing ten arguments that are None to Python takes torch longer than what the
experts of a small layer differ from vLLM's by.
"""
_PLAIN_TENSORS = _PLAIN_SCHEMA.count("Tensor")
_NOTHING_ELSE = (None,) * (_SCHEMA.count("Tensor") - _PLAIN_TENSORS)
# Its own namespace: the ops package registers the kernels in another, and a name can be defined only once.
_library = torch.library.Library("moe_optimizer_vllm", "DEF")
for _schema in (_SCHEMA, _PLAIN_SCHEMA):
    _library.define(_schema)


def _run_experts(*arguments: Any) -> None:
    """Compute a call whose arguments are those of the schema."""
    out, x, w13, w2, weights, ids, expert_map, w13_scale, w2_scale, *_, w13_bias, w2_bias, format_name = arguments
    form = weight_format(format_name)
    # A call that is like an earlier one goes from here to the kernel: on small layers each step between costs a share.
    inputs = (x, w13, w2, weights, ids, expert_map, w13_scale, w2_scale, w13_bias, w2_bias, form.activation)
    if not (form.read_as_held and cpu_calls.again(inputs, out)):
        form.compute(*_described(arguments))
    _count(w13, x, arguments)


def _run_plain_experts(*tensors: Any) -> None:
    """Compute a call of a layer whose weights are as loaded, without a map or biases."""
    out, x, w13, w2, weights, ids = tensors
    arguments = (*tensors, *_NOTHING_ELSE, PLAIN)
    form = weight_format(PLAIN)
    inputs = (x, w13, w2, weights, ids, None, None, None, None, None, form.activation)
    if form.read_as_held and cpu_calls.again(inputs, out):
        _count(w13, x, arguments)
    else:
        _run_experts(*arguments)


def _count(w13: torch.Tensor, x: torch.Tensor, arguments: tuple[Any, ...]) -> None:
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


for _name, _function in (("run_experts", _run_experts), ("run_plain_experts", _run_plain_experts)):
    _library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"moe_optimizer_vllm::{_name}", _run_experts_fake, lib=_library)


def run_experts(*arguments: torch.Tensor | str | None) -> None:
    """Compute the routed experts of every token: `arguments` are those of `_SCHEMA`."""
    *tensors, format_name = arguments
    if format_name == PLAIN and all(each is None for each in tensors[_PLAIN_TENSORS:]):
        torch.ops.moe_optimizer_vllm.run_plain_experts.default(*tensors[:_PLAIN_TENSORS])
    else:
        torch.ops.moe_optimizer_vllm.run_experts.default(*arguments)
