"""`sparse_experts`: the experts of one MoE layer from 2:4 sparse weights, which the kernel reads as they are stored."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import _load, reference
from moe_optimizer.ops.expert_inputs import MAX_EXPERTS, MAX_TOP_K, Inputs
from moe_optimizer.ops.kernel_arguments import experts_fields
from moe_optimizer.ops.registration import register_op
from moe_optimizer.ops.sparse_24 import SIZE_MULTIPLE, SparseWeight, expand_24
from moe_optimizer.ops.tensor_check import TensorChecks, overlaps_shifted


class SparseInputs(NamedTuple):
    """The inputs of the registered ops, in the order of their schema."""

    x: Tensor
    w13: Tensor
    w13_mask: Tensor
    w2: Tensor
    w2_mask: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, I and E."""
        return self.x.shape[1], 2 * self.w2.shape[2], self.w2.shape[0]


def sparse_experts(  # noqa: PLR0917 - as fused_experts has them
    x: Tensor,
    w13: Tensor,
    w13_mask: Tensor,
    w2: Tensor,
    w2_mask: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return what `fused_experts` returns for the expanded weights (`sparse_24.expand_24`), activation "silu".

    Routing arguments: as there. T tokens, H hidden size, I expert width, E local experts. CPU only.

    Args:
        x: bfloat16 [T, H], last dimension contiguous.
        w13: bfloat16 [E, 2I, H / 2], contiguous: the kept weights.
        w13_mask: uint8 [E, 2I, H / 8], contiguous: two bits set of every four.
        w2: bfloat16 [E, H, I / 2], contiguous.
        w2_mask: uint8 [E, H, I / 8], contiguous, likewise.
        out: bfloat16 [T, H], last dimension contiguous: written and returned. It may share memory with x.

    Returns:
        `out`, or a new tensor.

    Raises:
        TensorContractError: a shape, dtype, device or stride differs from the above, H or I is no multiple of 16, or
            an id in topk_ids names no expert. A mask with more or fewer bits is not noticed; the result is then
            meaningless.

    Numerics: bit for bit those of `fused_experts` on the expanded weights.
    Limits: without compiled kernels, above 1024 experts or top-32 it runs in plain torch, with a warning once.
    """
    inputs = SparseInputs(x, w13, w13_mask, w2, w2_mask, topk_weights, topk_ids, expert_map)
    if out is None:
        return torch.ops.moe_optimizer.sparse_experts(*inputs)
    torch.ops.moe_optimizer.sparse_experts_out(*inputs, out)
    return out


def in_plain_torch(inputs: SparseInputs) -> Tensor:
    """Return the result by the reference, from the expanded weights."""
    return reference.fused_experts(
        inputs.x,
        expand_24(SparseWeight(inputs.w13, inputs.w13_mask)),
        expand_24(SparseWeight(inputs.w2, inputs.w2_mask)),
        inputs.topk_weights,
        inputs.topk_ids,
        expert_map=inputs.expert_map,
    )


def check_sparse_inputs(inputs: SparseInputs, out: Tensor | None = None) -> None:
    """Raise TensorContractError unless the inputs (and `out`) fit each other and the contract."""
    check = TensorChecks("sparse_experts")
    if inputs.x.device.type != "cpu":
        raise check.error("x", "device", inputs.x.device, "cpu: there is no kernel for another")
    check.tokens("x", inputs.x, torch.bfloat16)
    if inputs.w2.dim() != 3:
        check.shape("w2", inputs.w2, "E", "H", "I / 2")
    hidden, width, _ = inputs.sizes
    for name, size in (("H", hidden), ("I", width)):
        if size % SIZE_MULTIPLE:
            raise check.error("w13" if name == "H" else "w2", name, size, f"a multiple of {SIZE_MULTIPLE}")
    check.shape("w2", inputs.w2, "E", "H", width // 2)
    check.shape("w2_mask", inputs.w2_mask, "E", "H", width // 8)
    check.shape("w13", inputs.w13, "E", 2 * width, hidden // 2)
    check.shape("w13_mask", inputs.w13_mask, "E", 2 * width, hidden // 8)
    for name in ("w13", "w2"):
        values, mask = getattr(inputs, name), getattr(inputs, f"{name}_mask")
        check.dtype(name, values, torch.bfloat16)
        check.dtype(f"{name}_mask", mask, torch.uint8)
        for each, tensor in ((name, values), (f"{name}_mask", mask)):
            if not tensor.is_contiguous():
                raise check.error(each, "strides", list(tensor.stride()), "a contiguous tensor")
    check.routing(inputs.topk_weights, inputs.topk_ids, inputs.expert_map)
    if out is not None:
        check.tokens("out", out, torch.bfloat16)
    check.devices(inputs._asdict() | {"out": out}, inputs.x.device)


def run_sparse(inputs: SparseInputs, out: Tensor, *, isa: str = "") -> None:
    """Compute checked inputs into `out`. `isa` forces a lesser instruction set than this machine's best."""
    reason = _why_plain_torch(inputs)
    if reason:
        _load.warn_of_reference("sparse_experts", reason)
        out.copy_(in_plain_torch(inputs))
        return
    x, routing = inputs.x, (inputs.topk_weights, inputs.topk_ids, inputs.expert_map)
    if overlaps_shifted(out, x):
        run_sparse(inputs._replace(x=x.clone()), out, isa=isa)
        return
    dense = Inputs(x, inputs.w13, inputs.w2, *routing, None, None, None, None, "silu").for_kernels()
    fields = experts_fields(dense, out) | {"intermediate_size": inputs.sizes[1]}
    masks = {"w13_mask": inputs.w13_mask.data_ptr(), "w2_mask": inputs.w2_mask.data_ptr()}
    try:
        _load.kernels().sparse_experts(fields, masks, isa)
    except ValueError as error:
        raise TensorContractError(f"sparse_experts: {error}") from None


def _why_plain_torch(inputs: SparseInputs) -> str:
    available, reason = _load.kernels_available()
    if not available:
        return reason or "kernels are not built"
    num_experts, top_k = inputs.w2.shape[0], inputs.topk_ids.shape[1]
    if num_experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        return f"at most {MAX_EXPERTS} experts and top-{MAX_TOP_K}, got {num_experts} and top-{top_k}"
    return ""


register_op(
    "sparse_experts",
    "Tensor x, Tensor w13, Tensor w13_mask, Tensor w2, Tensor w2_mask, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? expert_map",
    parse=SparseInputs._make,
    check=check_sparse_inputs,
    run=run_sparse,
)
