"""Draws what a benchmark measured: speed by load, and how times spread over the requests."""

from __future__ import annotations

from collections.abc import Sequence

from moe_optimizer.measure.bench.result import BenchResult, LoadResult, SideResult
from moe_optimizer.measure.bench.statistics import Spread
from moe_optimizer.measure.bench.trace import Load
from moe_optimizer.measure.report.chart import Point, Series, chart
from moe_optimizer.measure.report.scale import by_rank, fitting, logarithmic
from moe_optimizer.measure.report.svg import Picture

SPEEDS = {
    "output_tokens_per_s": "Output tokens per second",
    "tpot_ms": "Time per output token, ms",
    "ttft_ms": "Time to first token, ms",
}
"""Field of a load -> title of its chart."""
_TIMES = {"ttft_ms": "Time to first token, ms", "tpot_ms": "Time per output token, ms"}


def speed_figures(result: BenchResult) -> list[Picture]:
    """Return a chart for each metric: both sides at every load, with intervals."""
    return [figure for metric, title in SPEEDS.items() if (figure := _speed_figure(result, metric, title))]


def distribution_figures(result: BenchResult) -> list[Picture]:
    """Return a chart for each load and kind of time: the share of requests that stays within it."""
    loads = range(len(result.sides[0].loads))
    figures = [_distribution(result, load, metric, title) for metric, title in _TIMES.items() for load in loads]
    return [figure for figure in figures if figure is not None]


def load_name(load: LoadResult) -> str:
    """Return what a load is called: "16 clients", "2 requests/s" or "trace"."""
    return str(Load(clients=load.clients, rate=load.rate))


def interval(load: LoadResult, metric: str) -> tuple[float, float, float] | None:
    """Return the median of a metric and its interval; None where it was not measured."""
    if metric == "output_tokens_per_s":
        return load.output_tokens_per_s, *load.output_tokens_per_s_interval
    spread: Spread | None = getattr(load, metric)
    return None if spread is None else (spread.median, spread.low, spread.high)


def _speed_figure(result: BenchResult, metric: str, title: str) -> Picture | None:
    series = [Series(name=side.name, points=_points(side, metric)) for side in result.sides]
    values = [value for each in series for point in each.points for value in (point.y, point.low, point.high)]
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    loads = result.sides[0].loads
    closed = all(load.clients is not None for load in loads)
    names = [str(load.clients) if closed else load_name(load) for load in loads]
    return chart(
        title,
        f"{title}, for {', '.join(side.name for side in result.sides)} at {', '.join(map(load_name, loads))}. "
        "The table below has every number.",
        x=by_rank(names),
        y=fitting(numbers),
        x_label="clients at the same time" if closed else "load",
        series=series,
        ranks=True,
    )


def _points(side: SideResult, metric: str) -> tuple[Point, ...]:
    found = [(rank, load, interval(load, metric)) for rank, load in enumerate(side.loads)]
    return tuple(
        Point(
            x=float(rank),
            y=values[0],
            low=values[1],
            high=values[2],
            says=f"{side.name}, {load_name(load)}: {values[0]:.4g} ({values[1]:.4g} to {values[2]:.4g})",
        )
        for rank, load, values in found
        if values is not None
    )


def _distribution(result: BenchResult, load: int, metric: str, title: str) -> Picture | None:
    spreads = [(side.name, getattr(side.loads[load], metric)) for side in result.sides]
    curves = [(name, spread.curve) for name, spread in spreads if spread is not None and spread.curve]
    values = [value for _, curve in curves for value in curve if value > 0]
    if not values:
        return None
    name = load_name(result.sides[0].loads[load])
    return chart(
        f"{title}: {name}",
        f"Share of the requests within a time, at {name}: "
        + "; ".join(f"{who}: half within {curve[len(curve) // 2]:.4g} ms, all within {curve[-1]:.4g} ms"
                    for who, curve in curves) + ".",
        x=logarithmic(min(values), max(values)),
        y=fitting([0.0, 100.0], unit=" %"),
        x_label="ms, logarithmic",
        series=[Series(name=who, points=_curve(curve), marks=False) for who, curve in curves],
        height=230.0,
    )  # fmt: skip


def _curve(values: Sequence[float]) -> tuple[Point, ...]:
    step = 100.0 / (len(values) - 1)
    return tuple(Point(x=value, y=step * number) for number, value in enumerate(values))
