"""Draws a roofline: what a device can do by bytes and by operations, and where each expert kernel stands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_optimizer.costs.roofline import expected_experts_hit, memory_bandwidth, peak_flops
from moe_optimizer.measure.report.chart import Point, Series, chart
from moe_optimizer.measure.report.scale import logarithmic
from moe_optimizer.measure.report.svg import Picture
from moe_optimizer.specs.expert_formats import INT4, INT4_GROUPS, MXFP4_BITS, four_bits, int4_weights
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape

_WEIGHT_BITS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8_block": 8.0 + 32.0 / 128**2,
    "fp8_channel": 8.0,
    "mxfp4": MXFP4_BITS,
    "fp8_tensor": 8.0,
    **{
        int4_weights(group, zero_points=points): four_bits(INT4, group) + 8 / group * points
        for group in INT4_GROUPS
        for points in (False, True)
    },
}
_IN_WORDS = {
    "fp32": "FP32",
    "bf16": "BF16",
    "fp16": "FP16",
    "fp8_block": "FP8",
    "fp8_channel": "FP8 per channel",
    "fp8_tensor": "FP8 per tensor",
    "mxfp4": "MXFP4",
    **{
        int4_weights(group, zero_points=points): f"INT4 g{group}{' with zero points' * points}"
        for group in INT4_GROUPS
        for points in (False, True)
    },
}
_ACTIVATION_BYTES = 2
STOCK_NAME = "vLLM"
_NUMBERS = {"ours, grouped": 0, STOCK_NAME: 1, "ours, direct": 2}
"""Kernel -> number of its colour and mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPoint:
    """One kernel at one number of tokens."""

    kernel: str
    tokens: int
    us: float
    flop: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte that has to be read or written."""
        return self.flop / self.bytes

    @property
    def flop_per_s(self) -> float:
        """Operations per second that were reached."""
        return self.flop / self.us * 1e6


def kernel_points(speeds: KernelSpeeds) -> tuple[KernelPoint, ...]:
    """Return a point for each kernel and number of tokens of a table; a family of kernels by its fastest member."""
    return tuple(point for row in speeds.rows for point in _row_points(speeds, row.tokens, row.stock_us, row.ours_us))


def _row_points(
    speeds: KernelSpeeds, tokens: int, stock_us: float, ours_us: Mapping[str, float]
) -> Iterator[KernelPoint]:
    fastest: dict[str, float] = {STOCK_NAME: stock_us}
    for variant, us in ours_us.items():
        family = f"ours, {variant.partition('-')[0]}"
        fastest[family] = min(us, fastest.get(family, us))
    flop, read = layer_work(speeds.shape, tokens, weight_bits=_WEIGHT_BITS[speeds.weights])
    for kernel, us in fastest.items():
        yield KernelPoint(kernel=kernel, tokens=tokens, us=us, flop=flop, bytes=read)


def layer_work(shape: LayerShape, tokens: int, *, weight_bits: float) -> tuple[float, float]:
    """Return operations and least bytes of one layer's experts: each hit expert read once, activations in and out.

    Uniform routing; of a rank that holds a part of the experts, its share.
    """
    weights = 3.0 * shape.hidden_size * shape.intermediate_size
    routed = tokens * shape.top_k * shape.num_experts / shape.num_global_experts
    hit = expected_experts_hit(shape.num_global_experts, shape.top_k, tokens)
    hit *= shape.num_experts / shape.num_global_experts
    activations = 2.0 * tokens * shape.hidden_size * _ACTIVATION_BYTES
    return 2.0 * weights * routed, hit * weights * weight_bits / 8 + activations


def roofline(speeds: KernelSpeeds, gpu: GpuSpec) -> Picture:
    """Return the roofline of a device with the kernels of one table."""
    points = kernel_points(speeds)
    bandwidth = memory_bandwidth(gpu, "measured").value
    peak = peak_flops(gpu, 8.0 if speeds.weights.startswith("fp8") else 16.0).value
    ridge = peak / bandwidth
    x = logarithmic(min(each.intensity for each in points), max(*(each.intensity for each in points), ridge))
    y = logarithmic(min(each.flop_per_s for each in points) / 1e12, peak / 1e12)
    roof = [(at, min(peak, bandwidth * at) / 1e12) for at in (max(x.low, y.low * 1e12 / bandwidth), ridge, x.high)]
    by_kernel = defaultdict(list)
    for each in points:
        by_kernel[each.kernel].append(each)
    best = max(points, key=lambda each: each.flop_per_s / min(peak, bandwidth * each.intensity))
    shape = speeds.shape
    return chart(
        f"{_IN_WORDS[speeds.weights]} weights, {gpu.name}: TFLOP/s, log scale",
        f"Roofline of {gpu.name}: {bandwidth / 1e12:.2f} TB/s up to {ridge:.0f} FLOP/byte, then {peak / 1e12:.0f} "
        f"TFLOP/s. Kernels of one layer of {shape.num_experts} experts with {speeds.weights} weights, 1 to "
        f"{points[-1].tokens} tokens. Nearest to the roof: {best.kernel} at {best.tokens} tokens, "
        f"{best.flop_per_s / min(peak, bandwidth * best.intensity):.0%} of it.",
        x=x,
        y=y,
        x_label="FLOP for each byte that has to be moved, logarithmic",
        series=[
            Series(name=name, points=_places(found), line=False, number=_NUMBERS.get(name, 3))
            for name, found in sorted(by_kernel.items(), key=lambda each: each[0] != STOCK_NAME)
        ],
        guide=roof,
        width=480.0,
        height=330.0,
    )


def _places(points: Sequence[KernelPoint]) -> tuple[Point, ...]:
    return tuple(
        Point(
            x=each.intensity,
            y=each.flop_per_s / 1e12,
            says=f"{each.kernel}, {each.tokens} tokens: {each.us:g} us, {each.flop_per_s / 1e12:.1f} TFLOP/s, "
            f"{each.bytes / each.us / 1e6:.2f} TB/s",
        )
        for each in points
    )
