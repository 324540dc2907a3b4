"""Runs the CUDA kernels on CUDA tensors: picks the variant, lays out its workspace, makes the call.

`fused_experts` and `flash_dmoe` call `run_fused_experts`, which picks a variant. `run` takes the one that its caller
asks for; the plugin's comes from the plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.ops import _load
from moe_optimizer.ops.cuda_dispatch_calls import COUNTERS, direct_call, grouped_call, sizes_of
from moe_optimizer.ops.cuda_variants import DirectVariant, Variant, choose_variant
from moe_optimizer.ops.expert_inputs import MAX_EXPERTS, MAX_TOP_K, Inputs
from moe_optimizer.ops.kernel_arguments import CudaProblem, Router
from moe_optimizer.ops.launch_geometry.direct import DirectGeometry, direct_geometry
from moe_optimizer.ops.launch_geometry.grouped import GroupedGeometry, grouped_geometry
from moe_optimizer.ops.launch_geometry.hopper import GeometryError
from moe_optimizer.ops.measured_variant import measured_variant

_CAPABILITY = (9, 0)
_ALIGNMENT = 16


def why_unavailable(device: torch.device) -> str | None:
    """Return why no CUDA kernel can run on `device`, or None where they can."""
    available, reason = _load.kernels_available()
    if not available:
        return reason
    if not hasattr(_load.kernels(), "cuda_direct"):
        return "built without CUDA kernels; `bash build.sh` says why"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"CUDA kernels are built for sm_90a, this device is sm_{capability[0]}{capability[1]}"
    return None


def why_not(problem: CudaProblem, variant: Variant) -> str | None:
    """Return why the variant does not cover `problem`, or None where it does. Reads no device data."""
    if problem.x.dtype != torch.bfloat16:
        return f"CUDA kernels take bfloat16 activations, got {problem.x.dtype}"
    sizes = sizes_of(problem)
    if not (sizes.num_experts and sizes.top_k and sizes.hidden_size and sizes.intermediate_size):
        return (
            f"CUDA kernels need E, k, H and I above 0, got E={sizes.num_experts}, k={sizes.top_k}, "
            f"H={sizes.hidden_size}, I={sizes.intermediate_size}"
        )
    if problem.w13.shape[0] > MAX_EXPERTS or problem.top_k > MAX_TOP_K:
        return f"at most {MAX_EXPERTS} experts and top-{MAX_TOP_K}, got {problem.w13.shape[0]}, top-{problem.top_k}"
    if problem.router is not None and problem.router.logits.dtype not in (torch.float32, torch.bfloat16):
        return f"CUDA kernels take float32 or bfloat16 logits, got {problem.router.logits.dtype}"
    for name, tensor in (("x", problem.x), ("w13", problem.w13), ("w2", problem.w2), ("out", problem.out)):
        misaligned = _misaligned(tensor)
        if misaligned:
            return f"CUDA kernels copy 16 bytes at a time: {name} {misaligned}"
    try:
        geometry_of(problem, variant, num_multiprocessors=2)
    except GeometryError as error:
        return str(error)
    return None


def _misaligned(tensor: Tensor) -> str:
    if tensor.data_ptr() % _ALIGNMENT:
        return f"starts at address {tensor.data_ptr():#x}"
    for dim in range(tensor.dim() - 1):
        stride = tensor.stride(dim) * tensor.element_size()
        if tensor.shape[dim] > 1 and stride % _ALIGNMENT:
            return f"has a stride of {stride} bytes in dim {dim}"
    return ""


def geometry_of(problem: CudaProblem, variant: Variant, num_multiprocessors: int) -> DirectGeometry | GroupedGeometry:
    """Return the launches of the variant; raises GeometryError where it does not cover the problem."""
    sizes = sizes_of(problem)
    if isinstance(variant, DirectVariant):
        return direct_geometry(sizes, num_multiprocessors=num_multiprocessors)
    return grouped_geometry(
        sizes,
        variant.mode,
        num_multiprocessors=num_multiprocessors,
        tile_tokens=variant.tile_tokens,
        num_stages=variant.num_stages,
        paired=variant.paired,
    )


def run_fused_experts(inputs: Inputs, out: Tensor, router: Router | None = None) -> str | None:
    """Compute checked CUDA inputs into `out` and return None, or return why no kernel does.

    With `router`, its logits take the place of the inputs' ids and weights.
    """
    reason = why_unavailable(inputs.x.device)
    if reason is not None or inputs.x.shape[0] == 0:
        return reason
    # The kernels write `out` while other blocks may still read x, and in pieces of 16 bytes.
    in_place = not _misaligned(out) and not _overlaps(out, inputs.x)
    target = out if in_place else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    tensors = inputs.for_kernels()._asdict()
    if router is not None:
        tensors |= {"topk_weights": None, "topk_ids": None}
    problem = CudaProblem(**tensors, out=target, router=router)
    variant = measured_variant(problem) or choose_variant(sizes_of(problem))
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
        GeometryError: the variant does not cover the problem.
        RuntimeError: CUDA refused a launch.
    """
    if problem.x.shape[0] == 0:
        return
    device = problem.x.device
    geometry = geometry_of(problem, variant, torch.cuda.get_device_properties(device).multi_processor_count)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        if isinstance(geometry, DirectGeometry):
            call = direct_call(problem, geometry)
            _load.kernels().cuda_direct(*call.structs, stream)
        else:
            call = grouped_call(problem, geometry, _counters_for(device, stream))
            _load.kernels().cuda_grouped(*call.structs, stream)


class CounterBank:
    """Zeroed arrival counters, one set per stream: two launches that may overlap must not share one.

    A set is handed out without allocating, so that the first call on a capturing stream works; only when all sets are
    taken does a call get a fresh one, whose zeroing then becomes part of the call (and of the graph).
    """

    SETS = 16

    def __init__(self, device: torch.device) -> None:
        self._sets = torch.zeros(self.SETS, COUNTERS, dtype=torch.int32, device=device)
        self._owner: dict[int, int] = {}

    def get(self, stream: int) -> Tensor:
        """Return the counters of a stream, by its handle."""
        index = self._owner.setdefault(stream, len(self._owner))
        if index < self.SETS:
            return self._sets[index]
        return torch.zeros_like(self._sets[0])


_banks: dict[torch.device, CounterBank] = {}


def prepare_device(device: torch.device) -> None:
    """Allocate what calls on `device` share. Call it once before capturing a graph; any eager call does it too."""
    if device not in _banks:
        _banks[device] = CounterBank(device)
        torch.cuda.synchronize(device)  # zeros before any other stream uses them


def _counters_for(device: torch.device, stream: int) -> Tensor:
    if device not in _banks:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        prepare_device(device)
    return _banks[device].get(stream)
