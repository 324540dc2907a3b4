"""`int4_experts`: `fused_experts` of INT4 weights, which the kernels read as `int4.Int4Weight` has them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import _load, cpu_calls, cuda_dispatch, reference
from moe_optimizer.ops.expert_inputs import MAX_EXPERTS, MAX_TOP_K, Inputs
from moe_optimizer.ops.int4 import Int4Weight, check_int4
from moe_optimizer.ops.kernel_arguments import ACTIVATIONS, Fields, experts_fields
from moe_optimizer.ops.registration import register_op
from moe_optimizer.ops.tensor_check import TensorChecks, overlaps_shifted

X_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OP = "int4_experts"


class Int4Inputs(NamedTuple):
    """The inputs of the registered ops, in the order of their schema."""

    x: Tensor
    w13: Tensor
    w13_scale: Tensor
    w13_zero: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_zero: Tensor | None
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: str

    @property
    def weights(self) -> tuple[Int4Weight, Int4Weight]:
        """w13 and w2."""
        return Int4Weight(self.w13, self.w13_scale, self.w13_zero), Int4Weight(self.w2, self.w2_scale, self.w2_zero)


def int4_experts(
    x: Tensor,
    w13: Int4Weight,
    w2: Int4Weight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return what `fused_experts` returns for these weights, which is how it is called.

    T tokens, H hidden size, I expert width, E local experts. Arguments that are not named here: as there.

    Args:
        x: float32, bfloat16 or float16 [T, H], last dimension contiguous.
        w13: codes [E, 2I, H / 2], last dimension contiguous. Read in place; scales and zero points that are not
            contiguous are copied on every call.
        w2: codes [E, H, I / 2], likewise. The groups of the two weights may differ.

    Returns:
        `out`, or a new tensor.

    Raises:
        TensorContractError: a shape, dtype, device or stride differs from the above, H or I is no multiple of the
            group, or an id in topk_ids names no expert.

    Numerics: on the CPU codes less zero points are exact, and sums and scales float32. Products are float32, and the
    activation's result is kept in float32; with bfloat16 activations on avx512_bf16 both are bfloat16, as in
    `fused_experts`. On CUDA a code less its zero point is exact, and its product with the scale is rounded to
    bfloat16, which is multiplied. The result is the same bit for bit for any number of threads and any other tokens
    in the batch.
    Limits: without compiled kernels, above 1024 experts or top-32 it runs in plain torch, with a warning once; on CUDA
    also with float16 scales and without bfloat16 activations.
    """
    inputs = Int4Inputs(x, *w13, *w2, topk_weights, topk_ids, expert_map, w13_bias, w2_bias, activation)
    if out is not None and not torch.compiler.is_compiling() and cpu_calls.again(*_repeated(inputs, out)):
        return out
    if out is None:
        return torch.ops.moe_optimizer.int4_experts(*inputs)
    torch.ops.moe_optimizer.int4_experts_out(*inputs, out)
    return out


def check_int4_inputs(inputs: Int4Inputs, out: Tensor | None = None) -> None:
    """Raise TensorContractError unless the inputs (and `out`) fit each other and the contract."""
    check = TensorChecks(_OP)
    x = inputs.x
    if inputs.activation not in ACTIVATIONS:
        raise TensorContractError(f"{_OP}: activation: got {inputs.activation!r}, expected {' or '.join(ACTIVATIONS)}")
    check.tokens("x", x, *X_DTYPES)
    w13, w2 = inputs.weights
    check.shape("w2", w2.codes, "E", "H", "I / 2")
    check.bind("2I", 2 * w2.columns, "four times w2 dim 2")
    check.bind("H / 2", x.shape[1] // 2, "half of x dim 1")
    check.shape("w13", w13.codes, "E", "2I", "H / 2")
    for name, weight in (("w13", w13), ("w2", w2)):
        check_int4(check, weight, (name, f"{name}_scale", f"{name}_zero"))
        check.contiguous_rows(name, weight.codes)
    check.routing(inputs.topk_weights, inputs.topk_ids, inputs.expert_map)
    for name, bias, rows in (("w13_bias", inputs.w13_bias, "2I"), ("w2_bias", inputs.w2_bias, "H")):
        if bias is not None:
            check.shape(name, bias, "E", rows)
            check.dtype(name, bias, torch.float32, x.dtype)
    if out is not None:
        check.tokens("out", out, x.dtype)
    check.devices(inputs._asdict() | {"out": out}, x.device)


def run_int4(inputs: Int4Inputs, out: Tensor, *, isa: str = "") -> None:
    """Compute checked inputs into `out`. `isa` forces a lesser instruction set than this machine's best."""
    reason = why_plain_torch(inputs)
    w13, w2 = inputs.weights
    routing = (inputs.topk_weights, inputs.topk_ids)
    biases = (inputs.w13_bias, inputs.w2_bias)
    given = Inputs(inputs.x, w13.codes, w2.codes, *routing, inputs.expert_map, None, None, *biases, inputs.activation)
    if reason is None and inputs.x.is_cuda:
        reason = cuda_dispatch.run_int4_experts(given, w13, w2, out)
        if reason is None:
            return
    if reason:
        _load.warn_of_reference(_OP, reason)
        others = {name: getattr(inputs, name) for name in ("expert_map", "w13_bias", "w2_bias", "activation")}
        out.copy_(reference.fused_experts(inputs.x, w13, w2, *routing, **others))
        return
    if overlaps_shifted(out, inputs.x):
        run_int4(inputs._replace(x=inputs.x.clone()), out, isa=isa)
        return
    # Both keep their copies until the kernel has returned.
    experts = given.for_kernels()
    read = [_as_kernels_read(weight) for weight in (w13, w2)]
    described = (experts_fields(experts, out), *map(_scales, read))
    try:
        _load.kernels().int4_experts(*described, isa)
    except ValueError as error:
        raise TensorContractError(f"{_OP}: {error}") from None
    if all(one is other for one, other in zip((*given, *w13, *w2), (*experts, *read[0], *read[1]), strict=True)):
        repeated, _, zeros = _repeated(inputs, out)
        cpu_calls.remember(repeated, out, *described, zeros=zeros)


def _repeated(inputs: Int4Inputs, out: Tensor) -> tuple[Inputs, Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return what `cpu_calls` knows a call by."""
    x, w13, w13_scale, w13_zero, w2, w2_scale, w2_zero, topk_weights, topk_ids, expert_map = inputs[:10]
    w13_bias, w2_bias, activation = inputs[10:]
    scales = (w13_scale, w2_scale)
    known = Inputs(x, w13, w2, topk_weights, topk_ids, expert_map, *scales, w13_bias, w2_bias, activation)
    return known, out, (w13_zero, w2_zero)


def why_plain_torch(inputs: Int4Inputs) -> str | None:
    """Return why checked inputs run in plain torch, or None where a kernel runs them."""
    available, reason = _load.kernels_available()
    if not available:
        return reason
    if inputs.x.device.type not in ("cpu", "cuda"):
        return f"no {inputs.x.device.type} kernel in this version"
    if not inputs.w13.numel() or not inputs.w2.numel():
        return f"no weights: got w13 {list(inputs.w13.shape)}, w2 {list(inputs.w2.shape)}"
    num_experts, top_k = inputs.w2.shape[0], inputs.topk_ids.shape[1]
    if num_experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        return f"at most {MAX_EXPERTS} experts and top-{MAX_TOP_K}, got {num_experts} and top-{top_k}"
    return None


def _as_kernels_read(weight: Int4Weight) -> Int4Weight:
    zero = None if weight.zero is None else weight.zero.contiguous()
    return weight._replace(scale=weight.scale.contiguous(), zero=zero)


def _scales(weight: Int4Weight) -> Fields:
    """Return `Int4Scales`."""
    return {
        "scale": weight.scale.data_ptr(),
        "zero": 0 if weight.zero is None else weight.zero.data_ptr(),
        "group": weight.group,
        "scale_is_fp16": weight.scale.dtype == torch.float16,
    }


register_op(
    _OP,
    "Tensor x, Tensor w13, Tensor w13_scale, Tensor? w13_zero, Tensor w2, Tensor w2_scale, Tensor? w2_zero, "
    "Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, Tensor? w13_bias, Tensor? w2_bias, str activation",
    parse=Int4Inputs._make,
    check=check_int4_inputs,
    run=run_int4,
)
