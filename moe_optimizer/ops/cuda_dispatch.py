"""Runs the CUDA kernels on CUDA tensors: which variant, its workspace, the call.

State: right on one H200 (docs/kernels.md). A caller names the variant: the plugin does, by the plan's measured speeds.
`fused_experts` on CUDA tensors runs in plain torch unless `cuda_kernels_enabled` is switched on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_optimizer.ops import _load
from moe_optimizer.ops.cuda_dispatch_calls import direct_call, grouped_call, sizes_of
from moe_optimizer.ops.cuda_dispatch_problem import CudaProblem, Router
from moe_optimizer.ops.expert_inputs import MAX_EXPERTS, MAX_TOP_K, Inputs, as_float32
from moe_optimizer.ops.launch_geometry.direct import PAIRS, TOKENS, DirectGeometry, direct_geometry
from moe_optimizer.ops.launch_geometry.grouped import GemmMode, GroupedGeometry, grouped_geometry
from moe_optimizer.ops.launch_geometry.hopper import GeometryError
from moe_optimizer.ops.launch_geometry.routing import routing_geometry
from moe_optimizer.ops.launch_geometry.sizes import MoeSizes
from moe_optimizer.ops.launch_geometry.workspace import COUNTERS

_CAPABILITY = (9, 0)
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class DirectVariant:
    """The two chained kernels for small batches."""

    def __str__(self) -> str:
        return "direct"


@dataclass(frozen=True, slots=True)
class GroupedVariant:
    """The grouped GEMMs."""

    mode: GemmMode
    tile_tokens: int | None = None
    num_stages: int | None = None
    paired: bool = False
    """Two blocks share an expert's weights, each with its own token tile."""

    def __str__(self) -> str:
        tile = ("" if self.tile_tokens is None else f"-n{self.tile_tokens}") + ("x2" if self.paired else "")
        stages = "" if self.num_stages is None else f"/{self.num_stages}"
        return f"grouped-{self.mode.name.lower()}{tile}{stages}"


Variant = DirectVariant | GroupedVariant

_enabled = False


@contextlib.contextmanager
def cuda_kernels_enabled() -> Iterator[None]:
    """Let `fused_experts` use these kernels inside the block: for tests and measurements."""
    global _enabled  # noqa: PLW0603
    before, _enabled = _enabled, True
    try:
        yield
    finally:
        _enabled = before


def why_not_selected() -> str | None:
    """Return why `fused_experts` on CUDA tensors does not use the kernels, or None where it may."""
    if not _enabled:
        return "CUDA kernels: not switched on (cuda_kernels_enabled)"
    available, reason = _load.kernels_available()
    if not available:
        return reason
    if not hasattr(_load.kernels(), "cuda_direct"):
        return "built without CUDA kernels; `bash build.sh` says why"
    return None


def why_not(problem: CudaProblem) -> str | None:
    """Return why no CUDA kernel covers `problem`, or None where one does. Reads no device data."""
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
    capability = torch.cuda.get_device_capability(problem.x.device)
    if capability != _CAPABILITY:
        return f"CUDA kernels are built for sm_90a, this device is sm_{capability[0]}{capability[1]}"
    for name, tensor in (("x", problem.x), ("w13", problem.w13), ("w2", problem.w2), ("out", problem.out)):
        misaligned = _misaligned(tensor)
        if misaligned:
            return f"CUDA kernels copy 16 bytes at a time: {name} {misaligned}"
    try:
        variant = choose_variant(sizes)
        if isinstance(variant, DirectVariant):
            direct_launch(problem, num_multiprocessors=1)
        else:
            grouped_launch(problem, variant, num_multiprocessors=1)
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


def choose_variant(sizes: MoeSizes) -> Variant:
    """Return the variant for these sizes by arithmetic, for callers that know no measured speeds."""
    if sizes.num_tokens <= TOKENS and sizes.num_pairs <= PAIRS:
        return DirectVariant()
    # FP8 x FP8 rounds the activations to 4 significant bits: it has to be asked for.
    return GroupedVariant(GemmMode.BF16 if sizes.weight_bytes == 2 else GemmMode.FP8_WEIGHTS)


def direct_launch(problem: CudaProblem, num_multiprocessors: int) -> DirectGeometry:
    """Return the launches of the direct kernels; raises GeometryError where they do not cover the problem."""
    return direct_geometry(sizes_of(problem), num_multiprocessors=num_multiprocessors)


def grouped_launch(problem: CudaProblem, variant: GroupedVariant, num_multiprocessors: int) -> GroupedGeometry:
    """Return the launch of the grouped GEMMs; raises GeometryError where they do not cover the problem."""
    return grouped_geometry(
        sizes_of(problem),
        variant.mode,
        num_multiprocessors=num_multiprocessors,
        tile_tokens=variant.tile_tokens,
        num_stages=variant.num_stages,
        paired=variant.paired,
    )


def run_fused_experts(inputs: Inputs, out: Tensor, router: Router | None = None) -> str | None:
    """Compute checked CUDA inputs into `out` and return None, or return why no kernel covers them.

    With `router`, its logits take the place of the inputs' ids and weights.
    """
    if inputs.x.shape[0] == 0:
        return None
    # The kernels write `out` while other blocks may still read x, and in pieces of 16 bytes.
    direct = not _misaligned(out) and not _overlaps(out, inputs.x)
    target = out if direct else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    problem = CudaProblem(
        x=inputs.x,
        w13=inputs.w13,
        w2=inputs.w2,
        out=target,
        topk_weights=None if router is not None else inputs.topk_weights.contiguous(),
        topk_ids=None if router is not None else inputs.topk_ids.contiguous(),
        router=router,
        expert_map=None if inputs.expert_map is None else inputs.expert_map.contiguous(),
        w13_scale=as_float32(inputs.w13_scale),
        w2_scale=as_float32(inputs.w2_scale),
        w13_bias=as_float32(inputs.w13_bias),
        w2_bias=as_float32(inputs.w2_bias),
        activation=inputs.activation,
    )
    reason = why_not(problem)
    if reason is not None:
        return reason
    run(problem)
    if target is not out:
        out.copy_(target)
    return None


def _overlaps(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def run(problem: CudaProblem, variant: Variant | None = None) -> None:
    """Enqueue the kernels that write `problem.out` on the current stream.

    Graph-capturable. Ids outside [0, E) cannot be reported from the device: they are skipped like negative ones.

    Raises:
        KernelUnavailableError: the extension is not built.
        GeometryError: the variant does not cover the problem.
        RuntimeError: CUDA refused a launch.
    """
    if problem.x.shape[0] == 0:
        return
    sizes = sizes_of(problem)
    variant = choose_variant(sizes) if variant is None else variant
    device = problem.x.device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        if isinstance(variant, DirectVariant):
            call = direct_call(problem, direct_launch(problem, multiprocessors))
            _load.kernels().cuda_direct(call.values, call.workspace, call.geometry, stream)
        else:
            geometry = grouped_launch(problem, variant, multiprocessors)
            call = grouped_call(problem, geometry, routing_geometry(sizes), _counters_for(device, stream))
            _load.kernels().cuda_grouped(call.values, call.workspace, call.geometry, stream)


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
