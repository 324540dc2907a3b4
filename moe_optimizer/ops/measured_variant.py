"""Picks the fastest measured CUDA kernel for a call, where a kernel speed table covers its layer."""

from __future__ import annotations

import functools

import torch

from moe_optimizer.inspection.kernel_inventory import read_kernel_inventory
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds
from moe_optimizer.ops.cuda_variants import Variant, variant_named
from moe_optimizer.ops.expert_inputs import columns_of, holds_mxfp4
from moe_optimizer.ops.kernel_arguments import CudaProblem
from moe_optimizer.specs.expert_formats import int4_weights
from moe_optimizer.specs.kernel_speeds import LayerShape, TokenSpeeds, rounds_activations


def measured_variant(problem: CudaProblem) -> Variant | None:
    """Return the fastest variant at the next measured number of tokens, or None where nothing was measured.

    Variants that quantise the activations do not count: a caller has to ask for them.
    """
    num_experts = problem.w13.shape[0]
    shape = LayerShape(
        hidden_size=problem.x.shape[1],
        intermediate_size=columns_of(problem.w2),
        num_experts=num_experts,
        num_global_experts=num_experts if problem.expert_map is None else problem.expert_map.shape[0],
        top_k=problem.top_k,
    )
    rows = _rows(torch.cuda.get_device_name(problem.x.device), _weights(problem), shape)
    row = next((row for row in rows if problem.x.shape[0] <= row.tokens), None)
    times = {} if row is None else {name: us for name, us in row.ours_us.items() if not rounds_activations(name)}
    return variant_named(min(times, key=lambda name: times[name])) if times else None


def _weights(problem: CudaProblem) -> str:
    if problem.w13_scale is None:
        return "bf16"
    if problem.int4:
        group = columns_of(problem.w13) // max(1, problem.w13_scale.shape[-1])
        return int4_weights(group, zero_points=problem.w13_zero is not None)
    if holds_mxfp4(problem.w13):
        return "mxfp4"
    return "fp8_channel" if problem.w13_scale.dim() == 2 else "fp8_block"


@functools.cache
def _rows(device: str, weights: str, shape: LayerShape) -> tuple[TokenSpeeds, ...]:
    """Return the last table of the kernels that are built, as `SpeedTables.find` would, for any vLLM and driver."""
    sources = read_kernel_inventory().cuda_sources
    for table in reversed(read_kernel_speeds().tables):
        if (table.device, table.weights, table.shape, table.kernel_hash) == (device, weights, shape, sources):
            return table.rows
    return ()
