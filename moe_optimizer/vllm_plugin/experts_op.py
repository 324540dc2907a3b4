"""The torch custom op through which vLLM's forward pass reaches the kernel.

On CPU vLLM compiles the whole MoE layer into its graph, so only an op can carry Python code (the call count of
the proof) to run time. Layers are told apart by the address of their weights, not by an argument: a constant
per layer would make otherwise equal subgraphs different and each would be compiled again.
"""

from __future__ import annotations

import torch

from moe_optimizer.ops.fused_experts import fused_experts
from moe_optimizer.vllm_plugin.activation import EXPERTS_PASS, current
from moe_optimizer.vllm_plugin.proof import LayerProof

_SCHEMA = (
    "run_experts(Tensor(a!) out, Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? expert_map, Tensor? w13_bias, Tensor? w2_bias) -> ()"
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
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
) -> None:
    fused_experts(
        x.contiguous(),
        w13,
        w2,
        topk_weights,
        topk_ids,
        expert_map=expert_map,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        out=out,
    )
    activation = current()
    if activation is not None:
        activation.called(
            EXPERTS_PASS, w13.data_ptr(), x.shape[0], lambda: describe_layer("", w13, has_map=expert_map is not None)
        )


def _run_experts_fake(*_args: torch.Tensor | None) -> None:
    return None


_library.impl("run_experts", _run_experts, "CPU")
torch.library.register_fake("moe_optimizer_vllm::run_experts", _run_experts_fake, lib=_library)

run_experts = torch.ops.moe_optimizer_vllm.run_experts


def describe_layer(name: str, w13: torch.Tensor, *, has_map: bool) -> LayerProof:
    """Return the proof entry of a layer with these weights ([E_local, 2 I, H])."""
    num_experts, double_intermediate, hidden_size = w13.shape
    return LayerProof(
        name=name,
        num_local_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=double_intermediate // 2,
        dtype=str(w13.dtype).removeprefix("torch."),
        expert_map=has_map,
    )
