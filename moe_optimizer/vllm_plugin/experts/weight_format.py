"""Defines the formats of the experts' weights in memory: how a layer is converted, and which kernel reads it.

The plan names a format; `plain` is as vLLM loads them. Another format converts a layer after loading and replaces the
loaded weights. Whatever a kernel reads is a parameter of vLLM's layer, which keeps its address when weights are loaded
anew (`converted_layer`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession

if TYPE_CHECKING:
    import torch

    from moe_optimizer.ops.int4 import Int4Weight

    Operand = tuple[torch.Tensor | Int4Weight, torch.Tensor | None]
    """A weight and its scales, as `ops.fused_experts` takes them."""

PLAIN = "plain"

WEIGHT_FORMATS = {
    PLAIN: "moe_optimizer.vllm_plugin.experts.weight_format:WeightFormat",
    "fp8": "moe_optimizer.vllm_plugin.experts.weight_format_fp8:Fp8Weights",
    "gpt_oss": "moe_optimizer.vllm_plugin.experts.weight_format_gpt_oss:GptOssWeights",
    "int4": "moe_optimizer.vllm_plugin.experts.weight_format_int4:Int4Weights",
    "int4_stored": "moe_optimizer.vllm_plugin.experts.weight_format_int4_stored:StoredInt4Weights",
    "mxfp4": "moe_optimizer.vllm_plugin.experts.weight_format_mxfp4:Mxfp4Weights",
    "sparse_24": "moe_optimizer.vllm_plugin.experts.weight_format_sparse:SparseWeights",
}
"""Name -> "module:class". One line per format; the class is imported when a plan asks for it."""


_PARAMETERS = {
    "w13": "w13_weight",
    "w2": "w2_weight",
    "w13_scale": "w13_weight_scale",
    "w2_scale": "w2_weight_scale",
    "w13_mask": "w13_weight_mask",
    "w2_mask": "w2_weight_mask",
    "w13_zero": "w13_weight_zero",
    "w2_zero": "w2_weight_zero",
}
"""Field of KernelWeights -> name of the parameter on vLLM's layer."""


class KernelWeights(NamedTuple):
    """The tensors of one layer that a kernel reads. E local experts, H hidden size, I expert width.

    A tuple, as is the call: on the CPU both are made in every forward, and a frozen dataclass takes four times as long.
    """

    format: str
    """Name of these tensors' format; a planned format may leave a layer plain."""
    w13: torch.Tensor
    """Replaces the layer's w13_weight; plain: [E, 2I, H], gate rows first."""
    w2: torch.Tensor
    """Replaces the layer's w2_weight; plain: [E, H, I]."""
    w13_scale: torch.Tensor | None = None
    """fp8: float32, int4: bfloat16, int4_stored: as loaded, mxfp4 and gpt_oss: bytes, as
    `ops.fused_experts` takes them."""
    w2_scale: torch.Tensor | None = None
    w13_mask: torch.Tensor | None = None
    """sparse_24: a bit for each weight that w13 still has, as `ops.sparse_experts` takes it."""
    w2_mask: torch.Tensor | None = None
    w13_zero: torch.Tensor | None = None
    """int4_stored: a byte for each scale, as `ops.int4` has it; None: 8 everywhere."""
    w2_zero: torch.Tensor | None = None
    output_error: float | None = None
    """Relative change of the layer's output by the planned format; None: not measured."""
    saturated: float | None = None
    """fp8: share of the weights whose magnitude is the largest that the format has."""
    why_plain: str = ""
    """Why the layer stays plain although the plan names another format; "" where it does not."""

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The tensors under the names that they have as parameters of vLLM's layer."""
        named = {parameter: getattr(self, field) for field, parameter in _PARAMETERS.items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_parameters(self, held: Mapping[str, torch.Tensor]) -> KernelWeights:
        """Return them with other tensors under the names of `parameters`."""
        fields: dict[str, Any] = {field: held[name] for field, name in _PARAMETERS.items() if name in held}
        return self._replace(**fields)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales, masks and zero points."""
        return sum(tensor.nbytes for tensor in self.parameters.values())


class ExpertsCall(NamedTuple):
    """One call of a kernel: T tokens, k experts each."""

    out: torch.Tensor
    """[T, H]: to be written."""
    x: torch.Tensor
    """[T, H]."""
    topk_weights: torch.Tensor
    """float32 [T, k]."""
    topk_ids: torch.Tensor
    """[T, k]: global where there is an expert map."""
    expert_map: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None


class WeightFormat:
    """The plain format, with the weights as vLLM loads them; others override what differs.

    Created once per layer kind, holds no state of a layer.
    """

    name: str = PLAIN
    passes: tuple[str, ...] = (EXPERTS_PASS,)
    """Passes that are applied when a layer is in this format."""
    activation: str = "silu"
    """As `ops.fused_experts` names it; says where gate and up rows are, too."""
    read_as_held: bool = True
    """`compute` gives the tensors to `ops.fused_experts` as they are: a call of them can be repeated without it."""

    def why_not(self, moe_config: Any) -> str:  # noqa: ARG002 - every layer can be plain
        """Return why layers of this vLLM FusedMoEConfig cannot be in this format, or ""; asked before loading."""
        return ""

    def convert(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:  # noqa: ARG002
        """Return a layer's weights ([E, 2I, H], [E, H, I] as loaded) in this format; the inputs stay as they are."""
        return KernelWeights(format=PLAIN, w13=w13, w2=w2)

    def convert_again(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:  # noqa: ARG002
        """Return new weights of a layer that is in this format already; shapes and types are those of the old ones.

        Raises:
            ValueError: these weights cannot be in this format.
        """
        return KernelWeights(format=PLAIN, w13=w13, w2=w2)

    def dense_expert(self, weights: KernelWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return w13 [2I, H] and w2 [H, I] of one local expert as float32."""
        return weights.w13[expert].float(), weights.w2[expert].float()

    def operands(self, weights: KernelWeights) -> tuple[Operand, Operand]:
        """Return w13 and w2 as `ops.fused_experts` takes them."""
        return (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)

    def compute(self, weights: KernelWeights, call: ExpertsCall) -> None:
        """Write the weighted sum of the experts of every token into `call.out`."""
        from moe_optimizer.ops.fused_experts import fused_experts

        (w13, w13_scale), (w2, w2_scale) = self.operands(weights)
        fused_experts(
            call.x.contiguous(),
            w13,
            w2,
            call.topk_weights,
            call.topk_ids,
            expert_map=call.expert_map,
            activation=self.activation,
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            w13_bias=call.w13_bias,
            w2_bias=call.w2_bias,
            out=call.out,
        )


_created: dict[str, WeightFormat] = {}


def weight_format(name: str) -> WeightFormat:
    """Return the format of this name.

    Raises:
        KeyError: there is none of this name.
    """
    if name not in _created:
        module, _, class_name = WEIGHT_FORMATS[name].partition(":")
        _created[name] = getattr(importlib.import_module(module), class_name)()
    return _created[name]


def planned_format(session: PluginSession) -> WeightFormat:
    """Return the format that the plan wants the experts' weights in."""
    decisions = () if session.plan is None else session.plan.plugin_decisions
    names = [decision.weight_format for decision in decisions if decision.weight_format is not None]
    return weight_format(names[0] if names else PLAIN)
