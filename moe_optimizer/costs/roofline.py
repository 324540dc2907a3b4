"""Computes the least time of a step: the larger of bytes over bandwidth and operations over peak rate.

Floors, not predictions: no launch latency, no imperfect overlap, each hit expert read once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe_optimizer.costs.estimate import divide
from moe_optimizer.costs.weights import device_weight_bytes, kv_head_share, weight_element_bytes, weight_parts
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.quantity import Quantity, Source

Rates = Literal["datasheet", "measured"]
"""Which rates of a GpuSpec to use: the vendor's, or those seen on the hardware where it has them."""


def expected_experts_hit(num_experts: int, top_k: int, tokens: int) -> float:
    """Return how many of `num_experts` at least one of `tokens` is routed to, under uniform routing.

    E * (1 - (1 - k/E)**T): each token leaves a given expert out with probability 1 - k/E.
    """
    if num_experts <= 0 or top_k <= 0 or tokens <= 0:
        return 0.0
    return num_experts * (1 - (1 - min(1.0, top_k / num_experts)) ** tokens)


def expert_bytes(model: ModelSpec, *, expert_bits: float) -> float:
    """Return the bytes of one routed expert of one layer at `expert_bits`, scales included."""
    weights = model.expert_matrices * model.expert_hidden_size * model.moe_intermediate_size
    return weights * weight_element_bytes(expert_bits)


def moe_layer_weight_bytes(model: ModelSpec, tokens: int, *, expert_bits: float) -> float:
    """Return the routed-expert bytes that one MoE layer reads for `tokens` tokens, each hit expert once."""
    hit = expected_experts_hit(model.num_experts, model.top_k, tokens)
    return hit * expert_bytes(model, expert_bits=expert_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One decode step: tensor parallel over `num_gpus`, in each of `data_parallel_size` copies, which share experts."""

    model: ModelSpec
    batch: int
    """Sequences in each copy."""
    context: int
    """Cached tokens of each sequence."""
    num_gpus: int
    expert_bits: float
    linear_bits: float
    kv_bits: float = 16
    data_parallel_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What one GPU reads in one decode step, in bytes."""

    experts: float
    """Routed experts that are hit, each once."""
    matrices: float
    """Every other weight: attention, dense and shared MLPs, router, norms, head."""
    cache: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.experts + self.matrices + self.cache


def decode_step_floor_us(step: DecodeStep, gpu: GpuSpec) -> Quantity:
    """Return the least time of one decode step, in us.

    (hit experts + the other weights, of the input embedding only the rows looked up + the cache) per GPU
    / memory bandwidth, or the operations / peak rate where those take longer; communication is not included
    (see `comm`).
    """
    model, batch = step.model, step.batch
    gpus = f"{step.num_gpus} GPUs" if step.num_gpus > 1 else "1 GPU"
    multiplied_params = model.active_params - (model.embedding_params if model.lm_head_params else 0)
    read_bytes = decode_step_bytes(step).total
    read = f"bytes of one decode step, {batch} sequences at {step.context} tokens on {gpus}"
    reading = divide(read_bytes * 1e6, memory_bandwidth(gpu), unit="us", ref=f"{read} / memory bandwidth")
    peak = peak_flops(gpu, max(step.expert_bits, step.linear_bits))
    flop = 2.0 * multiplied_params * batch / step.num_gpus
    computing = divide(flop * 1e6, peak, unit="us", ref=f"operations of {batch} tokens on {gpus} / peak rate")
    return max(reading, computing, key=lambda bound: bound.value)


def decode_step_bytes(step: DecodeStep) -> StepBytes:
    """Return what one GPU reads in one decode step."""
    model, num_gpus = step.model, step.num_gpus
    parts = weight_parts(model, linear_bits=step.linear_bits)
    # The input embedding is looked up, a few rows; the head is read whole, also where the two are one matrix.
    head_params = model.lm_head_params or model.embedding_params
    head_share = head_params / max(1, model.embedding_params + model.lm_head_params)
    others = replace(parts, experts=0, vocabulary=round(parts.vocabulary * head_share))
    matrices = device_weight_bytes(model, others, num_devices=num_gpus, expert_parallel=False)
    tokens, devices = step.batch * step.data_parallel_size, num_gpus * step.data_parallel_size
    experts = model.num_moe_layers * moe_layer_weight_bytes(model, tokens, expert_bits=step.expert_bits) / devices
    return StepBytes(experts=experts, matrices=matrices, cache=decode_cache_bytes(step))


def decode_cache_bytes(step: DecodeStep) -> float:
    """Return what one GPU reads of the KV cache in one decode step."""
    read = step.batch * _cache_read_bytes(step.model, step.context)
    return read * step.kv_bits / 16 * kv_head_share(step.model, step.num_gpus)


def experts_read_ratio(model: ModelSpec, *, batch: int, from_bits: float, to_bits: float) -> Quantity:
    """Return how many times fewer expert bytes a step of `batch` tokens reads at `to_bits` than at `from_bits`."""
    before = moe_layer_weight_bytes(model, batch, expert_bits=from_bits)
    after = moe_layer_weight_bytes(model, batch, expert_bits=to_bits)
    ref = f"expert bytes at {from_bits:g} bits / at {to_bits:g} bits, scales included"
    return Quantity(before / after if after else 1.0, "ratio", Source.MODELLED, ref)


def memory_bandwidth(gpu: GpuSpec, rates: Rates = "datasheet") -> Quantity:
    """Return bytes/s: the measured copy rate where asked for and known, else the datasheet's.

    Raises:
        UnsupportedError: the GpuSpec has no rate (a GPU that is not in the catalog and whose driver does not say).
    """
    if rates == "measured" and "copy_bandwidth" in gpu.measured:
        return gpu.measured["copy_bandwidth"]
    if not gpu.memory_bandwidth.value:
        raise UnsupportedError(f"{gpu.name}: memory bandwidth not known", hint="add it to configs/hardware")
    return gpu.memory_bandwidth


def peak_flops(gpu: GpuSpec, bits: float) -> Quantity:
    """Return the datasheet's flop/s for weights of `bits`: FP8 at 8 bits and below where the GPU has it, else BF16.

    Raises:
        UnsupportedError: the GpuSpec has neither rate.
    """
    dtype = "fp8" if bits <= 8 and gpu.supports("fp8") else "bf16"
    if not gpu.supports(dtype):
        raise UnsupportedError(f"{gpu.name}: no {dtype} rate known", hint="add it to configs/hardware")
    return gpu.dense_flops[dtype]


def _cache_read_bytes(model: ModelSpec, context: int) -> float:
    attention = model.attention
    if not attention.num_attention_layers:
        return 0.0
    window = context if attention.sliding_window is None else min(context, attention.sliding_window)
    full_layers = attention.num_attention_layers - attention.num_windowed_layers
    layer_tokens = full_layers * context + attention.num_windowed_layers * window
    return model.kv_bytes_per_token * layer_tokens / attention.num_attention_layers
