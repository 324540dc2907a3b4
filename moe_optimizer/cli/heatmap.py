"""Renders expert load as text: one row of blocks for each layer, with figures below."""

from __future__ import annotations

import bisect
import heapq
import math
import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime

from moe_optimizer.cli import messages
from moe_optimizer.costs.expert_imbalance import LoadFigures, LoadReport
from moe_optimizer.errors import printable
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad

_BOUNDS = (0.75, 1.25, 2.0)
"""Times a layer's mean where the next darker block begins. Chosen: an even load shows the second block."""
_BLOCKS = " ░▒▓█"
_ASCII = " .-+#"
_MARGINS = 7 + 9
"""Columns left of the blocks (layer number) and right of them (busiest over mean)."""
_NARROWEST = 72
_WIDEST_CELL = 4


def render_load(load: ExpertLoad, report: LoadReport, *, width: int, top: int, unicode: bool = True) -> str:
    """Return heatmap and figures in at most `width` columns (not below 72).

    Args:
        top: how many of the busiest experts to name.
        unicode: whether blocks may be used; ASCII otherwise.
    """
    width = max(width, _NARROWEST)
    lines = textwrap.wrap(_title(load), width, subsequent_indent="  ")
    if report.mean is None:
        return "\n".join([*lines, "", "no token was counted yet"])
    lines += ["", *_heatmap(load, width, _BLOCKS if unicode else _ASCII), "", _figures(report, report.mean)]
    if top:
        lines += ["", "busiest experts", *_busiest(load.layers, top)]
    return "\n".join(lines)


def cell_loads(layer: LayerLoad, experts_per_cell: int) -> list[float]:
    """Return for each cell the load of its busiest expert, as a multiple of the mean over the layer's experts.

    The busiest instead of the sum, so that one overloaded expert stays visible among quiet neighbours.
    """
    mean = layer.total / len(layer.tokens)
    starts = range(0, len(layer.tokens), experts_per_cell)
    return [max(layer.tokens[start : start + experts_per_cell]) / mean if mean else 0.0 for start in starts]


def _title(load: ExpertLoad) -> str:
    since = datetime.fromisoformat(load.since).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    layers = f"{len(load.layers)} MoE layer{'s' if len(load.layers) != 1 else ''}"
    return printable(f"{load.model}: {layers} of {load.num_experts} experts, {load.steps} steps since {since}")


def _heatmap(load: ExpertLoad, width: int, blocks: str) -> Iterator[str]:
    room = width - _MARGINS
    per_cell = math.ceil(load.num_experts / room)
    num_cells = math.ceil(load.num_experts / per_cell)
    cell_width = min(_WIDEST_CELL, room // num_cells)
    shown = f"experts 0 to {load.num_experts - 1}"
    if per_cell > 1:
        shown += f", busiest of {per_cell}"
    yield f"layer  {shown:<{num_cells * cell_width}}  busiest"
    for layer in load.layers:
        shades = (bisect.bisect(_BOUNDS, value) + 1 if value else 0 for value in cell_loads(layer, per_cell))
        cells = "".join(blocks[shade] * cell_width for shade in shades)
        busiest = f"{max(cell_loads(layer, 1)):.1f} x" if layer.total else "unused"
        yield f"{layer.index:>5}  {cells}  {busiest:>7}"
    low, even, high = _BOUNDS
    legend = f"none, {blocks[1]} below {low:g}, {blocks[2]} to {even:g}, {blocks[3]} to {high:g}, {blocks[4]} more"
    yield from textwrap.wrap(f"times the mean of the layer: blank {legend}", width)


def _figures(report: LoadReport, mean: LoadFigures) -> str:
    used = sum(layer.figures is not None for layer in report.layers)
    busiest = max(1, report.num_experts // 10)
    rows = {
        "busiest expert": f"{mean.max_over_mean:.2f} x the mean of its layer",
        "coefficient of variation": f"{mean.variation:.2f}",
        "Gini coefficient": f"{mean.gini:.2f}",
        f"busiest {busiest} of {report.num_experts}": f"{mean.busiest_share:.0%} of the tokens",
        "experts without a token": f"{mean.unused} of {used * report.num_experts}",
    } | {
        f"EP on {ranks} ranks, in order": f"busiest rank {value:.2f} x the mean"
        for ranks, value in mean.rank_imbalance.items()
    }
    title = f"mean of {used} layers" if used > 1 else "figures"
    return f"{title}\n{messages.two_columns((f'  {name}', text) for name, text in rows.items())}"


def _busiest(layers: Sequence[LayerLoad], top: int) -> Iterator[str]:
    """Yield a line for each of the most used experts, relative to their layers."""
    used = (
        (-tokens * len(layer.tokens) / layer.total, layer.index, expert, tokens)
        for layer in layers
        for expert, tokens in enumerate(layer.tokens)
        if tokens
    )
    for times, layer, expert, tokens in heapq.nsmallest(top, used):
        yield f"  layer {layer:>3}, expert {expert:>4}: {-times:.2f} x the mean, {tokens} tokens"
