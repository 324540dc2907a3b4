"""Runs the CUDA kernels on CUDA tensors: picks the variant, lays out its workspace, makes the call.

`fused_experts` and `flash_dmoe` call `run_fused_experts`, or with INT4 weights `run_int4_experts`: both pick a variant.
`run` takes the one that its caller asks for; the plugin's comes from the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import _load
from moe_optimizer.ops.cuda_variants import MODES_OF_WEIGHT_BITS, DirectVariant, Variant, choose_variant
from moe_optimizer.ops.expert_inputs import MAX_EXPERTS, MAX_TOP_K, Inputs
from moe_optimizer.ops.int4 import Int4Weight
from moe_optimizer.ops.kernel_arguments import CudaProblem, Router
from moe_optimizer.ops.measured_variant import measured_variant

_CAPABILITY = (9, 0)
_ALIGNMENT = 16
_WORD = 4


def why_unavailable(device: torch.device) -> str | None:
    """Return why no CUDA kernel can run on `device`, or None where they can."""
    available, reason = _load.kernels_available()
    if not available:
        return reason
    if not hasattr(_load.kernels(), "cuda_run"):
        return "built without CUDA kernels; `bash build.sh` says why"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"CUDA kernels are built for sm_90a, this device is sm_{capability[0]}{capability[1]}"
    return None


def why_not(problem: CudaProblem, variant: Variant) -> str | None:
    """Return why the variant does not cover `problem`, or None where it does. Reads no device data."""
    reason = _why_no_variant(problem)
    if reason is not None:
        return reason
    try:
        _load.kernels().cuda_layout(*problem.call(variant, 2), 0)
    except ValueError as error:
        return str(error)
    return None


def _why_no_variant(problem: CudaProblem) -> str | None:
    """Return why no variant covers `problem`, or None where one may."""
    if problem.x.dtype != torch.bfloat16:
        return f"CUDA kernels take bfloat16 activations, got {problem.x.dtype}"
    sizes = problem.sizes
    if sizes.weight_bits not in MODES_OF_WEIGHT_BITS:
        return f"CUDA kernels take bfloat16, FP8, MXFP4 or INT4 weights, got {problem.w13.dtype}"
    if not (sizes.num_experts and sizes.top_k and sizes.hidden_size and sizes.intermediate_size):
        return (
            f"CUDA kernels need E, k, H and I above 0, got E={sizes.num_experts}, k={sizes.top_k}, "
            f"H={sizes.hidden_size}, I={sizes.intermediate_size}"
        )
    if sizes.num_experts > MAX_EXPERTS or sizes.top_k > MAX_TOP_K:
        return f"at most {MAX_EXPERTS} experts and top-{MAX_TOP_K}, got {sizes.num_experts}, top-{sizes.top_k}"
    if problem.router is not None and problem.router.logits.dtype not in (torch.float32, torch.bfloat16):
        return f"CUDA kernels take float32 or bfloat16 logits, got {problem.router.logits.dtype}"
    for name, tensor in (("x", problem.x), ("w13", problem.w13), ("w2", problem.w2), ("out", problem.out)):
        misaligned = _misaligned(tensor)
        if misaligned:
            return f"CUDA kernels copy 16 bytes at a time: {name} {misaligned}"
    return _why_not_int4(problem) if problem.int4 else None


def _why_not_int4(problem: CudaProblem) -> str | None:
    """Return what of the scales and zero points of INT4 weights no kernel reads, or None."""
    w13, w2 = (problem.w13, problem.w13_scale, problem.w13_zero), (problem.w2, problem.w2_scale, problem.w2_zero)
    for name, (weight, scale, zero) in (("w13", w13), ("w2", w2)):
        # FP16 has more digits than the BF16 that is multiplied: the caller decides how to round them.
        if scale is None or scale.dtype != torch.bfloat16:
            got = None if scale is None else scale.dtype
            return f"CUDA kernels take bfloat16 scales of INT4 weights, got {name}_scale {got}"
        if scale.shape[:2] != weight.shape[:2] or (zero is not None and zero.shape != scale.shape):
            return f"CUDA kernels need a scale (and zero point) per group and row of {name}, got {list(scale.shape)}"
        for tensor in (scale, zero):
            if tensor is not None and (not tensor.is_contiguous() or tensor.data_ptr() % _WORD):
                return f"CUDA kernels copy words of {name}'s scales and zero points: expected them contiguous"
    return None


def _misaligned(tensor: Tensor) -> str:
    if tensor.data_ptr() % _ALIGNMENT:
        return f"starts at address {tensor.data_ptr():#x}"
    for dim in range(tensor.dim() - 1):
        stride = tensor.stride(dim) * tensor.element_size()
        if tensor.shape[dim] > 1 and stride % _ALIGNMENT:
            return f"has a stride of {stride} bytes in dim {dim}"
    return ""


def run_fused_experts(inputs: Inputs, out: Tensor, router: Router | None = None) -> str | None:
    """Compute checked CUDA inputs into `out` and return None, or return why no kernel does.

    With `router`, its logits take the place of the inputs' ids and weights.
    """
    tensors: dict[str, Any] = inputs.for_kernels()._asdict()
    if router is not None:
        tensors |= {"topk_weights": None, "topk_ids": None}
    return _run_chosen(out, **tensors, router=router)


def run_int4_experts(inputs: Inputs, w13: Int4Weight, w2: Int4Weight, out: Tensor) -> str | None:
    """Compute checked CUDA inputs, whose weights are the codes of `w13` and `w2`, into `out` and return None, or return
    why no kernel does.
    """
    tensors: dict[str, Any] = inputs.for_kernels()._asdict()
    for name, weight in (("w13", w13), ("w2", w2)):
        # As they are: a scale of 16 bits tells INT4 from MXFP4.
        zero = None if weight.zero is None else weight.zero.contiguous()
        tensors |= {f"{name}_scale": weight.scale.contiguous(), f"{name}_zero": zero}
    return _run_chosen(out, **tensors)


def _run_chosen(out: Tensor, **fields: Any) -> str | None:
    """Run the fastest variant that is known for a problem of these fields into `out`, or return why there is none."""
    x = fields["x"]
    reason = why_unavailable(x.device)
    if reason is not None or x.shape[0] == 0:
        return reason
    # The kernels write `out` while other blocks may still read x, and in pieces of 16 bytes.
    in_place = not _misaligned(out) and not _overlaps(out, x)
    target = out if in_place else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    problem = CudaProblem(**fields, out=target)
    reason = _why_no_variant(problem)
    if reason is not None:
        return reason
    variant = measured_variant(problem) or choose_variant(problem.sizes)
    reason = why_not(problem, variant)
    if reason is not None:
        return reason
    run(problem, variant)
    if target is not out:
        out.copy_(target)
    return None


def _overlaps(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def run(problem: CudaProblem, variant: Variant) -> None:
    """Enqueue the variant's kernels, which write `problem.out`, on the current stream.

    Graph-capturable. Ids outside [0, E) cannot be reported from the device: they are skipped like negative ones.

    Raises:
        KernelUnavailableError: the extension is not built.
        UnsupportedError: the variant does not cover the problem.
        RuntimeError: CUDA refused a launch.
    """
    if problem.x.shape[0] == 0:
        return
    device, kernels = problem.x.device, _load.kernels()
    call = problem.call(variant, torch.cuda.get_device_properties(device).multi_processor_count)
    try:
        layout = kernels.cuda_layout(*call, 0)
    except ValueError as error:
        raise UnsupportedError(str(error)) from None
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        # The kernels allocate nothing; what the workspace holds before the call does not matter.
        workspace = torch.empty(layout["bytes"], dtype=torch.uint8, device=device)
        words = None if isinstance(variant, DirectVariant) else zeroed_words(device, stream)
        kernels.cuda_run(*call, workspace.data_ptr(), 0 if words is None else words.data_ptr(), stream)


class WordBank:
    """Zeroed words by which blocks tell one another of what is done: two calls that may overlap must not share them.

    Every call that finishes leaves its stream's words zero. They are handed out without allocating, so that the first
    call on a capturing stream works; only when all are taken does a call get fresh ones, whose zeroing then becomes
    part of the call (and of the graph).
    """

    STREAMS = 16
    WORDS = 8 * MAX_EXPERTS
    """Per stream: a logit of each of 8 tokens (`gate_topk`); the grouped kernels use one."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros((self.STREAMS, self.WORDS), dtype=torch.int32, device=device)
        self._owner: dict[int, int] = {}

    def get(self, stream: int) -> Tensor:
        """Return the words of a stream, by its handle."""
        index = self._owner.setdefault(stream, len(self._owner))
        if index < self.STREAMS:
            return self._words[index]
        return torch.zeros_like(self._words[0])


_banks: dict[torch.device, WordBank] = {}


def prepare_device(device: torch.device) -> None:
    """Allocate what calls on `device` share. Call it once before capturing a graph; any eager call does it too."""
    if device not in _banks:
        _banks[device] = WordBank(device)
        torch.cuda.synchronize(device)  # zeros before any other stream uses them


def zeroed_words(device: torch.device, stream: int) -> Tensor:
    """Return the int32 words of a stream, by its handle, which must be zero again after the call that takes them."""
    if device not in _banks:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(WordBank.WORDS, dtype=torch.int32, device=device)
        prepare_device(device)
    return _banks[device].get(stream)
