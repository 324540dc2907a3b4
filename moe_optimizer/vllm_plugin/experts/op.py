"""The torch custom op through which vLLM's forward pass reaches the kernel on the CPU.

There vLLM compiles the whole MoE layer into its graph, so only an op can carry Python code (the call count of
the proof) to run time. Layers are told apart by the address of their weights, not by an argument: a constant
per layer would make otherwise equal subgraphs different and each would be compiled again.
"""

from __future__ import annotations

import torch

from moe_optimizer.proof.record import LayerProof
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights, weight_format
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_session

_SCHEMA = (
    "run_experts(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? expert_map, Tensor? w13_scale, Tensor? w2_scale, Tensor? w13_mask, Tensor? w2_mask, "
    "Tensor? w13_bias, Tensor? w2_bias, str weight_format) -> ()"
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
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    format_name: str,
) -> None:
    weights = KernelWeights(
        format=format_name,
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_mask=w13_mask,
        w2_mask=w2_mask,
    )
    call = ExpertsCall(
        out=out,
        x=x,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
    )
    weight_format(format_name).compute(weights, call)
    session = current_session()
    if session is not None:
        session.called(
            w13.data_ptr(),
            x.shape[0],
            lambda: ((EXPERTS_PASS,), _unnamed_layer(weights, has_map=expert_map is not None)),
        )


def _run_experts_fake(*_args: torch.Tensor | str | None) -> None:
    return None


_library.impl("run_experts", _run_experts, "CPU")
torch.library.register_fake("moe_optimizer_vllm::run_experts", _run_experts_fake, lib=_library)

run_experts = torch.ops.moe_optimizer_vllm.run_experts


def _unnamed_layer(weights: KernelWeights, *, has_map: bool) -> LayerProof:
    """Return the proof entry of a layer that was not named while loading (vLLM moved its weights since)."""
    return LayerProof(
        name="",
        num_local_experts=weights.w13.shape[0],
        hidden_size=weights.w2.shape[1],
        intermediate_size=weights.w13.shape[1] // 2,
        dtype=dtype_name(weights.w13.dtype),
        expert_map=has_map,
        weight_format=weights.format,
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as the proof writes it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
