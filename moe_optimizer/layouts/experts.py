"""Computes the time of one MoE layer's experts on the busiest GPU: from a table of measured kernels, or modelled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from moe_optimizer.costs.expert_imbalance import rank_imbalance
from moe_optimizer.costs.roofline import expected_experts_hit, peak_flops
from moe_optimizer.costs.weights import weight_element_bytes
from moe_optimizer.layouts.constants import OUR_EXPERTS, TABLES, UNEVEN_PER_DOUBLING, VLLM_EXPERTS
from moe_optimizer.layouts.expert_tiles import L2_BYTES, reads_of_an_expert
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.specs.expert_formats import sliced_width
from moe_optimizer.specs.expert_load import ExpertLoad
from moe_optimizer.specs.kernel_speeds import (
    STOCK,
    KernelSpeeds,
    LayerShape,
    ours_never_slower,
    rounds_activations,
    token_ranges,
)
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.model import ModelSpec
from moe_optimizer.specs.quantity import Quantity, Source

_FP8_BITS = 8
_DEFAULT_TILES_BITS = 16
_MOST_SLICES = 16
"""Of an expert, that a table may be of."""


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """The experts of one layer as one GPU of a layout holds them."""

    question: LayoutQuestion
    shape: LayerShape
    num_ranks: int
    """GPUs that hold whole experts; 1: each holds a slice of every expert."""
    imbalance: float
    """Tokens of the busiest rank over the mean, of the measured load; 1 without one."""
    table: KernelSpeeds | None
    """Of exactly this shape."""
    related: ExpertTimes | None
    """The same layer in the slices of a table that are next to these in width: the model is scaled to it."""
    ours: bool
    shares: tuple[float, ...] = ()
    """Of the tokens, that each expert takes by the measured load, the busiest first; (): all take as many."""

    def layer_us(self, tokens: float) -> Quantity:
        """Return the time of one layer for `tokens` of all GPUs that share it."""
        if tokens <= 0:
            return Quantity(0.0, "us", Source.MODELLED, "no tokens")
        uneven = self._busiest(tokens) / (tokens * self.shape.top_k / self.num_ranks)
        if self.table is not None:
            return self._from_table(self.table, tokens * uneven, uneven=uneven)
        modelled, ref = self._modelled_us(tokens * uneven, ours=self.ours), f"experts fitted to {TABLES}"
        if self.related is not None:
            measured = self.related.layer_us(tokens)
            modelled *= measured.value / self.related._modelled_us(tokens, ours=self.ours)
            ref = f"{ref}, scaled to width {self.related.shape.intermediate_size} in {measured.ref}"
        return Quantity(max(modelled, self._reading_again_us(tokens, tokens * uneven)), "us", Source.MODELLED, ref)

    def _from_table(self, table: KernelSpeeds, tokens: float, *, uneven: float) -> Quantity:
        """Return the time of a measured layer for so many tokens, `uneven` times those of the mean rank.

        It is measured between the first and the last number of tokens that were. Beyond the last it grows as modelled:
        in proportion it would be far too long where a table ends early, since up to hundreds of tokens the experts'
        weights are read, however many there are. How many tokens the busiest rank has is modelled too.
        """
        first, last, alone = table.rows[0].tokens, table.rows[-1].tokens, self.question.expert_bits < _FP8_BITS
        # Above it vLLM's kernel computes; not on weights that only ours read.
        ours = self.ours and (tokens <= last or alone)

        def usable(name: str) -> bool:
            if name == STOCK or not ours:
                return name == STOCK and not (ours and alone)
            return not alone or self.question.rounded_activations or not rounds_activations(name)

        points = _points(table, usable=usable, even=self.question.even_routing)
        scaled = [] if uneven == 1 else ["of the busiest GPU's tokens"]
        scaled += [] if first <= tokens <= last else [f"continued from {last if tokens > last else first} tokens"]
        us = _interpolated(points, min(tokens, last))
        if tokens > last:
            us *= self._modelled_us(tokens, ours=ours) / self._modelled_us(last, ours=ours)
        source = Source.MODELLED if scaled else Source.MEASURED
        return Quantity(us, "us", source, ", ".join([table.source, *scaled]))

    def _reading_again_us(self, tokens: float, busiest: float) -> float:
        """Return the least time of vLLM's kernel where it reads experts more than once; 0 where it does not.

        Of whole experts, because of large ones vLLM has tuned tiles for slices alone, and in 16 bits: in 8 its default
        tiles share what they read.
        """
        shape, gpu, matrices = self.shape, self.question.gpu, self.question.model.expert_matrices
        one = matrices * shape.hidden_size * shape.intermediate_size * weight_element_bytes(self.question.expert_bits)
        # Gate and up are one product, which is the larger one.
        large = one * (matrices - 1) / matrices > L2_BYTES
        if self.ours or self.num_ranks == 1 or self.question.expert_bits != _DEFAULT_TILES_BITS or not large:
            return 0.0
        reads = reads_of_an_expert(tokens, shape.num_experts, busiest * shape.top_k / shape.num_global_experts)
        bandwidth = gpu.memory_bandwidth.value * VLLM_EXPERTS.bandwidth_share
        return VLLM_EXPERTS.start_us + 1e6 * reads * shape.num_experts * one / bandwidth if reads > 1 else 0.0

    def _busiest(self, tokens: float) -> float:
        """Return the (token, expert) pairs of the busiest rank: what the load says, and two to three deviations of
        what chance adds, of the pairs at most all.
        """
        pairs = tokens * self.shape.top_k
        mean = self.imbalance * pairs / self.num_ranks
        if self.num_ranks == 1:
            return mean
        return min(pairs, mean + math.sqrt(2 * mean * math.log(self.num_ranks)))

    def _modelled_us(self, tokens: float, *, ours: bool) -> float:
        shape, gpu = self.shape, self.question.gpu
        bits = self.question.expert_bits
        fit = OUR_EXPERTS if ours else VLLM_EXPERTS
        share = shape.num_experts / shape.num_global_experts
        hit = self._experts_hit(math.ceil(tokens)) * share
        pairs = tokens * shape.top_k * share
        tile = fit.tile if bits >= _FP8_BITS else fit.four_bit_tile
        width = tile * math.ceil(shape.intermediate_size / tile)
        weights = self.question.model.expert_matrices * shape.hidden_size * width
        # vLLM's kernels take a row for every pair of the step through activation and sum, also of experts elsewhere.
        rows = pairs if ours else tokens * shape.top_k
        activations = rows * (4 * shape.hidden_size + 8 * shape.intermediate_size) + 4 * tokens * shape.hidden_size
        # Kernels for fewer than 8 bits widen the weights and multiply in BF16.
        fp8 = bits == _FP8_BITS and gpu.supports("fp8")
        flop_share = fit.flop_share if bits >= _FP8_BITS else fit.four_bit_flop_share
        rate = peak_flops(gpu, bits).value * fit.fp8_flop_share if fp8 else peak_flops(gpu, 16).value * flop_share
        bandwidth = gpu.memory_bandwidth.value
        read = bandwidth * fit.bandwidth_share
        if bits < _FP8_BITS:
            read = min(read, fit.four_bit_bytes_per_s)
        return fit.start_us + 1e6 * (
            hit * weights * weight_element_bytes(bits) / read
            + 2 * weights * pairs / rate
            + activations / (bandwidth * fit.activation_share)
        )

    def _experts_hit(self, tokens: int) -> float:
        """Return how many experts some of the tokens are routed to, as if all ranks were as busy as the busiest."""
        count, top_k = self.shape.num_global_experts, self.shape.top_k
        if not self.shares:
            return expected_experts_hit(count, top_k, tokens)
        hit = sum(1 - (1 - min(1.0, top_k * share)) ** tokens for share in self.shares)
        return min(count, self.imbalance * hit)


def expert_times(question: LayoutQuestion, layout: Layout) -> ExpertTimes:
    """Return what computes the times of a layout's experts."""
    devices = layout.devices_of_stage
    whole = layout.expert_parallel and devices > 1
    ours = _ours(question, layout)
    shape = _shape(question, layout)
    table = _table(question, shape)
    return ExpertTimes(
        question=question,
        shape=shape,
        num_ranks=devices if whole else 1,
        imbalance=_imbalance(question, layout) if whole else 1.0,
        table=table,
        related=_related(question, shape, ours=ours) if table is None else None,
        ours=ours,
        shares=() if question.load is None else _mean_shares(question.load),
    )


def ours_up_to(question: LayoutQuestion, layout: Layout) -> int:
    """Return the most tokens of a step for which our kernels were measured to be faster; 0: none, or nothing was, or
    ours alone read the experts, of however many tokens.
    """
    if question.expert_bits < _FP8_BITS:
        return 0
    table = _table(question, _shape(question, layout)) if _ours(question, layout) else None
    ranges = token_ranges(table.rows) if table is not None else ()
    return ranges[-1].up_to if ranges else 0


def ours_compute(question: LayoutQuestion, layout: Layout) -> bool:
    """Return whether our kernels compute a layout's experts, of some numbers of tokens at least."""
    alone = _ours(question, layout) and question.expert_bits < _FP8_BITS
    return alone or ours_up_to(question, layout) > 0


def _ours(question: LayoutQuestion, layout: Layout) -> bool:
    # Chosen: ours run for data parallel copies too, but how fast was not measured, so vLLM's are counted there. With
    # ours the fit would take copies where AIConfigurator gives slices 15 % more.
    if not question.our_kernels or layout.data_parallel_size > 1:
        return False
    if not question.ours_where_never_slower:
        return True
    table = _table(question, _shape(question, layout))
    return table is not None and ours_never_slower(table, rounded=question.rounded_activations)


def _shape(question: LayoutQuestion, layout: Layout) -> LayerShape:
    """Return the layer as one GPU holds it."""
    model, devices = question.model, layout.devices_of_stage
    whole = layout.expert_parallel and devices > 1
    return LayerShape(
        hidden_size=model.expert_hidden_size,
        intermediate_size=model.moe_intermediate_size if whole else max(1, _sliced(model, devices)),
        num_experts=-(-model.num_experts // devices) if whole else model.num_experts,
        num_global_experts=model.num_experts,
        top_k=model.top_k,
    )


def _sliced(model: ModelSpec, slices: int) -> int:
    return sliced_width(model.moe_intermediate_size, slices, model.expert_format)


def _related(question: LayoutQuestion, shape: LayerShape, *, ours: bool) -> ExpertTimes | None:
    """Return the layer with all experts in the slices that are next to these in width, of those that a table has."""
    model = question.model
    counts = (count for count in range(1, _MOST_SLICES + 1) if model.moe_intermediate_size % count == 0)
    widths = {_sliced(model, count) for count in counts}
    for width in sorted(widths, key=lambda width: abs(math.log(max(1, width) / shape.intermediate_size))):
        wide = replace(shape, intermediate_size=width, num_experts=model.num_experts)
        table = _table(question, wide)
        if table is not None:
            return ExpertTimes(question, wide, 1, 1.0, table, None, ours)
    return None


def _imbalance(question: LayoutQuestion, layout: Layout) -> float:
    num_ranks = layout.devices_of_stage
    if question.load is not None:
        return _mean_imbalance(question.load, num_ranks, placed=layout.server in question.placed)
    return 1.0 if question.even_routing else 1.0 + UNEVEN_PER_DOUBLING * math.log2(num_ranks)


@lru_cache(maxsize=4)
def _mean_shares(load: ExpertLoad) -> tuple[float, ...]:
    """Return the share of the busiest expert of a layer, the next one's and so on, each a mean over the layers."""
    used = [layer for layer in load.layers if layer.total]
    shares = [sorted((count / layer.total for count in layer.tokens), reverse=True) for layer in used]
    return tuple(sum(each) / len(used) for each in zip(*shares, strict=True))


def _mean_imbalance(load: ExpertLoad, num_ranks: int, *, placed: bool) -> float:
    """Return the tokens of the busiest rank over the mean, over all layers, because they run one after another.

    A placement evens the ranks out, but the busiest expert stays on one.
    """
    used = [layer for layer in load.layers if layer.total]
    if not used or load.num_experts % num_ranks:
        return 1.0
    total = sum(layer.total for layer in used)
    if placed:
        return sum(max(layer.total, max(layer.tokens) * num_ranks) for layer in used) / total
    return sum(layer.total * rank_imbalance(layer.tokens, num_ranks) for layer in used) / total


def _table(question: LayoutQuestion, shape: LayerShape) -> KernelSpeeds | None:
    """Return the last table of this layer, whatever the versions: what was measured on this machine comes last."""
    found = None
    for table in question.speeds.tables:
        if (table.device, table.weights, table.shape) == (question.gpu.name, question.weights, shape):
            found = table
    return found


def _points(table: KernelSpeeds, *, usable: Callable[[str], bool], even: bool) -> list[tuple[int, float]]:
    """Return the least time of each measured number of tokens: of even routing, or the mean over the routings timed."""
    points = []
    for row in table.rows:
        times = row.even_us if even and row.even_us else {STOCK: row.stock_us, **row.ours_us}
        points.append((row.tokens, min((us for name, us in times.items() if usable(name)), default=row.stock_us)))
    return points


def _interpolated(points: Sequence[tuple[int, float]], tokens: float) -> float:
    """Return the time between measured numbers of tokens by a power law; before the first and after the last theirs."""
    if tokens <= points[0][0]:
        return points[0][1]
    for (low, fast), (high, slow) in itertools.pairwise(points):
        if tokens <= high:
            share = math.log(tokens / low) / math.log(high / low)
            return fast * (slow / fast) ** share
    return points[-1][1]
