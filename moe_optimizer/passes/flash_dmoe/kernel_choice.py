"""Looks up the measured kernel speeds for the layers of a plan, and chooses kernels by them."""

from __future__ import annotations

from collections.abc import Sequence

from moe_optimizer.inspection.kernel_speeds import cpu_device
from moe_optimizer.plan.decision import Gain
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_kernel import DTYPES, converted_format
from moe_optimizer.specs.kernel_speeds import (
    STOCK,
    KernelSpeeds,
    LayerShape,
    SpeedQuestion,
    TokenRange,
    TokenSpeeds,
    kernel_for,
    token_ranges,
)
from moe_optimizer.specs.quantity import Quantity, Source

ONLINE_SCHEMES = {"fp8": "fp8_channel", "fp8_per_tensor": "fp8_channel", "fp8_per_channel": "fp8_channel",
                  "fp8_per_block": "fp8_block"}  # fmt: skip
"""vLLM's --quantization -> how the experts' weights are then stored."""


def layer_shape(ctx: PlanContext) -> LayerShape:
    """Return the experts of one layer as one device of the plan holds them."""
    model, split = ctx.model, ctx.parallelism
    whole = split.expert_parallel
    experts = -(-model.num_experts // split.num_devices) if whole else model.num_experts
    width = model.moe_intermediate_size if whole else model.moe_intermediate_size // split.tensor_parallel_size
    return LayerShape(
        hidden_size=model.expert_hidden_size,
        intermediate_size=width,
        num_experts=experts,
        num_global_experts=model.num_experts,
        top_k=model.top_k,
    )


def stored_weights(ctx: PlanContext) -> tuple[str, ...]:
    """Return how the experts' weights may be stored when they are served, by the names of the tables.

    Two names: the checkpoint is in FP8, and its header alone does not say with which scales; or vLLM converts the
    weights, and not all of them.
    """
    if ctx.device == "cpu":
        converted = converted_format(ctx)
        return ("fp8_block",) if converted == "fp8" else (converted or DTYPES[ctx.dtype],)
    given = ctx.pinned.value("--quantization")
    if given is not None:
        return (ONLINE_SCHEMES[given],) if given in ONLINE_SCHEMES else ()
    if ctx.model.quant_method is not None:
        return ("fp8_block", "fp8_channel") if ctx.model.quant_method == "fp8" else ()
    fp8 = ctx.params(Fp8Params)
    if fp8 is not None and fp8.expert_bits == 8:
        # Some layers may stay as they are; all of them where vLLM was started without the flags of that decision.
        return (f"fp8_{fp8.granularity}", DTYPES[ctx.dtype])
    return (DTYPES[ctx.dtype],)


def questions(ctx: PlanContext) -> tuple[SpeedQuestion, ...]:
    """Return what is to be asked of the tables: one question for each way the weights may be stored."""
    kernels, vllm = ctx.software.kernels, ctx.software.vllm
    on_cpu = ctx.device == "cpu"
    threads = max(1, ctx.cpu.cores // ctx.parallelism.tensor_parallel_size) if on_cpu else 0
    return tuple(
        SpeedQuestion(
            device=cpu_device(ctx.cpu, threads) if on_cpu else ctx.gpu.name,
            weights=weights,
            shape=layer_shape(ctx),
            kernel_hash=kernels.cpu_sources if on_cpu else kernels.cuda_sources,
            vllm="" if vllm is None else release(vllm.version),
            driver="" if on_cpu else ctx.hardware.driver_version or "",
        )
        for weights in stored_weights(ctx)
    )


def release(version: str) -> str:
    """Return a version without the build that follows "+": "0.26.0" of "0.26.0+cu130"."""
    return version.partition("+")[0]


def found_tables(ctx: PlanContext) -> dict[str, KernelSpeeds]:
    """Return the tables that answer, by how the weights are stored."""
    found = {question.weights: ctx.software.kernel_speeds.find(question) for question in questions(ctx)}
    return {weights: table for weights, table in found.items() if table is not None}


def in_plain_words(table: KernelSpeeds, ranges: Sequence[TokenRange]) -> str:
    """Return which kernel computes how many tokens, with the gains: "1-8 tokens ours (direct, 1.05-1.10x), ..."."""
    parts, start = [], 1
    for each in ranges:
        span = f"{start}" if start == each.up_to else f"{start}-{each.up_to}"
        # Those it was measured at, in the range or beside it: it may end before the next measured number.
        gains = [row.stock_us / row.ours_us[each.use] for row in table.rows
                 if each.use in row.ours_us and start - 1 <= row.tokens <= each.up_to + 1]  # fmt: skip
        parts.append(f"{span}: {_kernel(each.use, gains)}")
        start = each.up_to + 1
    parts.append(f"above {start - 1}: vLLM's")
    return "tokens in a step " + ", ".join(parts)


def _kernel(name: str, gains: Sequence[float]) -> str:
    if name == STOCK:
        return "vLLM's"
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return f"ours, {name} ({low}x)" if low == high else f"ours, {name} ({low}-{high}x)"


def measured_gain(table: KernelSpeeds, ranges: Sequence[TokenRange], batch: int) -> Gain | None:
    """Return the gain of the experts in a decode step of so many requests; None where none was measured there."""
    row = nearest_row(table.rows, batch)
    use = kernel_for(ranges, row.tokens)
    if use == STOCK:
        return None
    ratio = Quantity(row.stock_us / row.ours_us[use], "ratio", Source.MEASURED, table.source)
    return Gain(metric=f"expert kernels of one layer at {row.tokens} tokens", ratio=ratio)


def nearest_row(rows: Sequence[TokenSpeeds], tokens: int) -> TokenSpeeds:
    """Return the row measured nearest to this many tokens, by ratio."""
    return min(rows, key=lambda row: max(row.tokens / tokens, tokens / row.tokens))


def all_ranges(tables: dict[str, KernelSpeeds]) -> dict[str, tuple[TokenRange, ...]]:
    """Return the dispatch of each table in which a kernel of ours wins anywhere."""
    ranges = {weights: token_ranges(table.rows) for weights, table in tables.items()}
    return {weights: each for weights, each in ranges.items() if each}
