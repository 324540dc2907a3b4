"""`fused_experts`: dispatch, both expert GEMMs, SwiGLU and combine of one MoE layer, after the router."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.errors import TensorContractError
from moe_optimizer.ops import _load, cpu_calls, cuda_dispatch, mxfp4, reference
from moe_optimizer.ops.expert_inputs import MAX_EXPERTS, MAX_TOP_K, Inputs, columns_of, holds_mxfp4
from moe_optimizer.ops.four_bit_codes import CODES_PER_BYTE
from moe_optimizer.ops.int4 import Int4Weight
from moe_optimizer.ops.int4_experts import int4_experts
from moe_optimizer.ops.kernel_arguments import ACTIVATIONS, experts_fields
from moe_optimizer.ops.registration import register_op
from moe_optimizer.ops.tensor_check import TensorChecks, overlaps_shifted

SIZE_MULTIPLE = 16
"""H and I that the CPU kernels cover; other sizes run in `reference`."""

_X_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused_experts(
    x: Tensor,
    w13: Tensor | Int4Weight,
    w2: Tensor | Int4Weight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of the experts each token was routed to.

    Meaning of every argument: `reference.fused_experts`. Beyond that:

    Args:
        x: float32, bfloat16 or float16 [T, H], last dimension contiguous.
        w13: [E, 2I, H], dtype of x or float8_e4m3fn, or uint8 [E, 2I, H / 2] with MXFP4 codes (then both scales are
            needed), last dimension contiguous. Read in place. H and I are multiples of 32 for MXFP4. Or an
            `Int4Weight`, with its scales: see `int4_experts`.
        w2: [E, H, I] or [E, H, I / 2], dtype of w13, likewise.
        w13_bias: float32, or converted on every call.
        w2_bias: likewise.
        out: [T, H], dtype of x, last dimension contiguous: written and returned. It may share memory with x.

    Returns:
        `out`, or a new tensor.

    Raises:
        TensorContractError: a shape, dtype, device or stride differs from the above, or an id in topk_ids
            names no expert.

    Numerics: products accumulate in float32; the activation's result is rounded to bfloat16 only where the
    machine multiplies bfloat16 natively; the experts' outputs are summed in float32 in ascending order of
    expert and rounded once. The result is the same bit for bit for any number of threads and any other
    tokens in the batch.
    Kernel: on the CPU that of the best instruction set; on CUDA the fastest in the speed table of this layer,
    else one by sizes. `cuda_dispatch.run` takes the kernel that the caller names.
    Limits: without a kernel (`why_reference`), and for sizes that none covers, it runs in plain torch, with a warning
    once. For inference: no gradient flows back. On the CPU a process that has called it and then forks must not call
    it in the child, where the OpenMP threads are gone and the call waits for ever, as torch's own operations do there.
    """
    if isinstance(w13, Int4Weight) or isinstance(w2, Int4Weight):
        if not (isinstance(w13, Int4Weight) and isinstance(w2, Int4Weight) and w13_scale is None and w2_scale is None):
            raise TensorContractError("fused_experts: INT4 weights: expected w13 and w2 both Int4Weight, and no scales")
        return int4_experts(
            x,
            w13,
            w2,
            topk_weights,
            topk_ids,
            expert_map=expert_map,
            activation=activation,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            out=out,
        )
    optional = (expert_map, w13_scale, w2_scale, w13_bias, w2_bias)
    inputs = Inputs(x, w13, w2, topk_weights, topk_ids, *optional, activation)
    if out is not None and not torch.compiler.is_compiling() and cpu_calls.again(inputs, out):
        return out
    if out is None:
        return torch.ops.moe_optimizer.fused_experts(*inputs)
    torch.ops.moe_optimizer.fused_experts_out(*inputs, out)
    return out


def why_reference(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor) -> str | None:
    """Return why a valid call with these tensors runs in plain torch, or None where a kernel runs it.

    On CUDA: why none can run on the device. Sizes and alignment are looked at when the op is called.
    """
    num_experts, hidden, intermediate = w13.shape[0], columns_of(w13), columns_of(w2)
    top_k = topk_ids.shape[-1]
    if x.device.type == "cuda":
        return cuda_dispatch.why_unavailable(x.device)
    if x.device.type != "cpu":
        return f"no {x.device.type} kernel in this version"
    available, reason = _load.kernels_available()
    if not available:
        return reason
    if not hidden or not intermediate:
        return f"H and I must be above 0, got H={hidden}, I={intermediate}"
    if hidden % SIZE_MULTIPLE or intermediate % SIZE_MULTIPLE:
        return f"H and I must be multiples of {SIZE_MULTIPLE}, got H={hidden}, I={intermediate}"
    if num_experts > MAX_EXPERTS:
        return f"at most {MAX_EXPERTS} experts, got {num_experts}"
    if top_k > MAX_TOP_K:
        return f"at most {MAX_TOP_K} experts per token, got {top_k}"
    return None


def check_inputs(inputs: Inputs, out: Tensor | None = None, *, op: str = "fused_experts") -> None:
    """Raise TensorContractError, naming `op`, unless the inputs (and `out`) fit each other and the contract."""
    check = TensorChecks(op)
    x, w13, w2 = inputs.x, inputs.w13, inputs.w2
    if inputs.activation not in ACTIVATIONS:
        expected = " or ".join(ACTIVATIONS)
        raise TensorContractError(f"{op}: activation: got {inputs.activation!r}, expected {expected}")
    check.tokens("x", x, *_X_DTYPES)
    check.dtype("w13", w13, x.dtype, torch.float8_e4m3fn, mxfp4.PACKED_DTYPE)
    if holds_mxfp4(w13):
        check.shape("w2", w2, "E", "H", "I / 2")
        check.bind("2I", CODES_PER_BYTE * 2 * w2.shape[2], "four times w2 dim 2")
        check.bind("H / 2", x.shape[1] // CODES_PER_BYTE, "half of x dim 1")
        check.shape("w13", w13, "E", "2I", "H / 2")
    else:
        check.shape("w2", w2, "E", "H", "I")
        check.bind("2I", 2 * w2.shape[2], "twice w2 dim 2")
        check.shape("w13", w13, "E", "2I", "H")
    check.dtype("w2", w2, w13.dtype)
    check.contiguous_rows("w13", w13)
    check.contiguous_rows("w2", w2)

    check.routing(inputs.topk_weights, inputs.topk_ids, inputs.expert_map)
    if inputs.w13_bias is not None:
        check.shape("w13_bias", inputs.w13_bias, "E", "2I")
        check.dtype("w13_bias", inputs.w13_bias, torch.float32, x.dtype)
    if inputs.w2_bias is not None:
        check.shape("w2_bias", inputs.w2_bias, "E", "H")
        check.dtype("w2_bias", inputs.w2_bias, torch.float32, x.dtype)
    _check_scales(check, w13, w2, inputs.w13_scale, inputs.w2_scale)
    if out is not None:
        check.tokens("out", out, x.dtype)
    check.devices(inputs._asdict() | {"out": out}, x.device)


def _check_scales(
    check: TensorChecks, w13: Tensor, w2: Tensor, w13_scale: Tensor | None, w2_scale: Tensor | None
) -> None:
    packed = holds_mxfp4(w13)
    quantized = packed or w13.dtype == torch.float8_e4m3fn
    for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        if quantized != (scale is not None):
            expected = f"a tensor, as the weights are {w13.dtype}" if quantized else f"None with {w13.dtype} weights"
            raise check.error(name, "presence", "None" if scale is None else "a tensor", expected)
    if w13_scale is None or w2_scale is None:
        return
    check.dtype("w13_scale", w13_scale, mxfp4.PACKED_DTYPE if packed else torch.float32)
    check.dtype("w2_scale", w2_scale, mxfp4.PACKED_DTYPE if packed else torch.float32)
    if w13_scale.dim() == 2 and not packed:
        check.shape("w13_scale", w13_scale, "E", "2I")
        check.shape("w2_scale", w2_scale, "E", "H")
        return
    for name, weight, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
        rows, columns = weight.shape[1], columns_of(weight)
        if not packed:
            check.shape(f"{name}_scale", scale, "E", *(-(-size // reference.SCALE_BLOCK) for size in (rows, columns)))
            continue
        if columns % mxfp4.SCALE_GROUP:
            raise check.error(name, "columns", columns, f"a multiple of {mxfp4.SCALE_GROUP}, which share a scale")
        check.shape(f"{name}_scale", scale, "E", rows, columns // mxfp4.SCALE_GROUP)


def run(inputs: Inputs, out: Tensor, *, isa: str = "") -> None:
    """Compute checked inputs into `out`: with the kernel, or in plain torch where `why_reference` has a reason.

    `isa` forces a lesser instruction set than this machine's best; tests and benchmarks compare them.
    """
    reason = why_reference(inputs.x, inputs.w13, inputs.w2, inputs.topk_ids)
    if reason is None and inputs.x.is_cuda:
        reason = cuda_dispatch.run_fused_experts(inputs, out)
        if reason is None:
            return
    if reason is not None:
        _load.warn_of_reference("fused_experts", reason)
        out.copy_(reference.fused_experts(**inputs._asdict()))
        return
    if overlaps_shifted(out, inputs.x):
        run(inputs._replace(x=inputs.x.clone()), out, isa=isa)
        return
    for_kernels = inputs.for_kernels()
    fields = experts_fields(for_kernels, out)
    cpu_calls.enqueue(fields, isa)
    if all(given is read for given, read in zip(inputs, for_kernels, strict=True)):
        cpu_calls.remember(inputs, out, fields)


register_op(
    "fused_experts",
    "Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "Tensor? w13_scale, Tensor? w2_scale, Tensor? w13_bias, Tensor? w2_bias, str activation",
    parse=Inputs._make,
    check=check_inputs,
    run=run,
)
