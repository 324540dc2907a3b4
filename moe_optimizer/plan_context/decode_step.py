"""Computes the requests of a decode step and the least time that the GPUs need for it."""

from __future__ import annotations

from typing import Any

from moe_optimizer.costs.comm import Group, all_reduce_us
from moe_optimizer.costs.memory import plan_memory, sequences_held
from moe_optimizer.costs.roofline import DecodeStep, decode_step_floor_us
from moe_optimizer.costs.weights import DTYPE_BYTES, stored_linear_bits
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.quantity import Quantity


def full_length(ctx: PlanContext) -> int:
    """Return the tokens of a request at its end, prompt and answer."""
    return ctx.workload.input_tokens + ctx.workload.output_tokens


def held_at_once(ctx: PlanContext, **memory: Any) -> int:
    """Return how many requests of their full length the cache of one device holds; `memory` as in `ctx.memory`."""
    request = ctx.memory_request(**memory)
    return sequences_held(request, plan_memory(request).kv_cache_bytes, full_length(ctx))


def served_bits(ctx: PlanContext) -> tuple[float, float]:
    """Return the bits of a routed expert's weight and of the other matrices', as they are served without conversion."""
    if ctx.model.quant_method is None:
        whole = 8.0 * DTYPE_BYTES[ctx.dtype]
        return whole, whole
    return ctx.model.weight_bits, stored_linear_bits(ctx.model)


def least_step_us(
    ctx: PlanContext, requests: int, *, kv_bits: int, expert_bits: float | None, linear_bits: float | None
) -> Quantity:
    """Return the least time of one decode step of `requests` of their full length, in us.

    The roofline of one GPU and, under tensor parallelism, two all-reduces a layer: after attention and after the
    experts.

    Args:
        ctx: after the parallelism pass, on GPUs.
        requests: of each data parallel copy.
        kv_bits: bits of one cache element.
        expert_bits: bits of one routed-expert weight, None: as it is served without conversion.
        linear_bits: the same for the other matrices.

    Raises:
        UnsupportedError: a rate of the GPU is not known.
    """
    model, size = ctx.model, ctx.parallelism.tensor_parallel_size
    experts, linears = served_bits(ctx)
    decoded = DecodeStep(
        model=model,
        batch=requests,
        context=full_length(ctx),
        num_gpus=size,
        data_parallel_size=ctx.parallelism.data_parallel_size,
        expert_bits=experts if expert_bits is None else expert_bits,
        linear_bits=linears if linear_bits is None else linear_bits,
        kv_bits=kv_bits,
    )
    step = decode_step_floor_us(decoded, ctx.gpu)
    if size == 1:
        return step
    exchange = all_reduce_us(requests * model.hidden_size * 2, ctx.gpu, Group(size))
    count = 2 * model.num_layers
    ref = f"{step.ref}; {count} all-reduces of {exchange.value:.0f} us over {ctx.gpu.gpu_link}"
    return Quantity(step.value + count * exchange.value, "us", step.source | exchange.source, ref)
