"""Prunes the experts' weights of a layer to two of every four."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_optimizer.errors import described
from moe_optimizer.plan.pass_params import Sparsity24Params
from moe_optimizer.specs.activation_norms import hidden_norms_name, input_norms_name
from moe_optimizer.specs.layer_name import decoder_layer
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, ExpertsCall, KernelWeights, WeightFormat
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, current_decision

if TYPE_CHECKING:
    import torch

    from moe_optimizer.ops.sparse_24 import SparseWeight

SPARSITY_PASS = "sparsity_24"
FORMAT = "sparse_24"


class SparseWeights(WeightFormat):
    """BF16 weights without their zeros; `ops.sparse_experts` reads them in place.

    A layer that cannot be converted, for example because a weight is not finite, stays plain and counts as refused.
    """

    name = FORMAT
    passes = (EXPERTS_PASS, SPARSITY_PASS)
    read_as_held = False

    def why_not(self, moe_config: Any) -> str:
        """Return why layers of this vLLM FusedMoEConfig cannot be in this format, or ""."""
        import torch

        from moe_optimizer.ops.sparse_24 import SIZE_MULTIPLE

        if moe_config.in_dtype != torch.bfloat16:
            return f"sparse experts need torch.bfloat16, found {moe_config.in_dtype}"
        sizes = (moe_config.hidden_dim, moe_config.intermediate_size_per_partition)
        if any(size % SIZE_MULTIPLE for size in sizes):
            return f"sparse experts need H and I in multiples of {SIZE_MULTIPLE}, found {sizes[0]} and {sizes[1]}"
        return ""

    def convert(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer pruned, or plain.

        Raises:
            RequiredNotAppliedError: it cannot be pruned, and the plan requires that it is.
        """
        session, decision = current_decision(SPARSITY_PASS)
        try:
            return _pruned(layer_name, w13, w2, decision.params_as(Sparsity24Params).activation_norms)
        except Exception as error:  # noqa: BLE001 - vLLM is loading its model; the loaded weights do as well
            session.refused(SPARSITY_PASS, f"{layer_name}: fallback: {described(error)}")
            return KernelWeights(format=PLAIN, w13=w13, w2=w2, why_plain="could not be pruned")

    def convert_again(self, layer_name: str, w13: torch.Tensor, w2: torch.Tensor) -> KernelWeights:
        """Return the layer's new weights pruned."""
        _, decision = current_decision(SPARSITY_PASS)
        return _pruned(layer_name, w13, w2, decision.params_as(Sparsity24Params).activation_norms)

    def dense_expert(self, weights: KernelWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's two matrices with their zeros, in float32."""
        from moe_optimizer.ops.sparse_24 import SparseWeight, expand_24

        w13, w2 = (SparseWeight(values[expert], mask[expert]) for values, mask in _stored(weights))
        return expand_24(w13).float(), expand_24(w2).float()

    def compute(self, weights: KernelWeights, call: ExpertsCall) -> None:
        """Run `ops.sparse_experts`."""
        from moe_optimizer.ops.sparse_experts import sparse_experts

        assert call.w13_bias is None, "the plan refuses experts with biases"
        assert call.w2_bias is None, "the plan refuses experts with biases"
        (w13, w13_mask), (w2, w2_mask) = _stored(weights)
        sparse_experts(
            call.x.contiguous(),
            w13,
            w13_mask,
            w2,
            w2_mask,
            call.topk_weights,
            call.topk_ids,
            expert_map=call.expert_map,
            out=call.out,
        )


def _pruned(layer_name: str, w13: torch.Tensor, w2: torch.Tensor, norms_path: str | None) -> KernelWeights:
    from moe_optimizer.ops.sparse_24 import prune_24

    x_norms, h_norms = (None, None) if norms_path is None else _norms(norms_path, layer_name)
    gate_up, down = prune_24(w13, x_norms), prune_24(w2, h_norms)
    return KernelWeights(format=FORMAT, w13=gate_up.values, w2=down.values, w13_mask=gate_up.mask, w2_mask=down.mask)


def _norms(path: str, layer_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of a layer's input [H] and of its experts' activations [E, I]."""
    from safetensors import safe_open

    layer = decoder_layer(layer_name)
    assert layer is not None, f"{layer_name}: no decoder layer"
    with safe_open(path, framework="pt", device="cpu") as file:
        return file.get_tensor(input_norms_name(layer)), file.get_tensor(hidden_norms_name(layer))


def _stored(weights: KernelWeights) -> tuple[SparseWeight, SparseWeight]:
    from moe_optimizer.ops.sparse_24 import SparseWeight

    assert weights.w13_mask is not None, weights.format
    assert weights.w2_mask is not None, weights.format
    return SparseWeight(weights.w13, weights.w13_mask), SparseWeight(weights.w2, weights.w2_mask)
