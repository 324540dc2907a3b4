"""Draws series of points over two axes: the one kind of chart that speed, distributions and rooflines share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_optimizer.measure.report.scale import Scale
from moe_optimizer.measure.report.svg import Picture

WIDTH, HEIGHT = 420.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 20.0, 50.0, 40.0
_Place = Callable[[float, float], tuple[float, float]]
"""Values on both axes -> point of the picture."""
_APART = 0.12
"""Of the room between two ranks: how far apart two series stand, so that intervals do not cover each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value, with its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    says: str = ""
    """The exact values, shown under the pointer and read aloud."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points that belong together, in the order of a line."""

    name: str
    points: tuple[Point, ...]
    line: bool = True
    marks: bool = True
    number: int | None = None
    """Of its colour and mark; None: its place among the series."""


def chart(
    title: str,
    description: str,
    *,
    x: Scale,
    y: Scale,
    x_label: str,
    series: Sequence[Series],
    guide: Sequence[tuple[float, float]] = (),
    ranks: bool = False,
    width: float = WIDTH,
    height: float = HEIGHT,
) -> Picture:
    """Return a chart with grid, axes and legend.

    Args:
        title: what the y axis measures, with its unit.
        description: in words what a reader who does not see it has to know.
        x: from left to right.
        y: from bottom to top.
        x_label: what the x axis measures.
        series: at most four are told apart.
        guide: points of a line that is no series, such as a limit.
        ranks: whether `x` places names; series then stand beside each other.
        width: of the picture.
        height: of the picture.
    """
    picture = Picture(width, height, title=title, description=description)
    across, down = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def place(at_x: float, at_y: float) -> tuple[float, float]:
        return _LEFT + across * x.place(at_x), _TOP + down * (1 - y.place(at_y))

    for value, name in y.ticks:
        _, level = place(x.low, value)
        picture.line([(_LEFT, level), (width - _RIGHT, level)], kind="rule")
        picture.text(_LEFT - 8, level + 4, name, anchor="end")
    picture.line([(_LEFT, _TOP + down), (width - _RIGHT, _TOP + down)], kind="axis")
    for value, name in _readable(x, across):
        column, _ = place(value, y.low)
        picture.line([(column, _TOP + down), (column, _TOP + down + 4)], kind="axis")
        picture.text(column, _TOP + down + 18, name, anchor="middle")
    picture.text(_LEFT + across / 2, height - 5, x_label, anchor="middle")
    if guide:
        picture.line([place(*each) for each in guide], kind="guide")
    _draw_legend(picture, series)
    for index, each in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * _APART if ranks else 0.0
        _draw_series(picture, each, index if each.number is None else each.number, shift, place)
    return picture


def _draw_series(picture: Picture, series: Series, number: int, shift: float, place: _Place) -> None:
    at = [place(point.x + shift, point.y) for point in series.points]
    if series.line and len(at) > 1:
        picture.line(at, kind=f"line series-{number}")
    for point, (column, level) in zip(series.points, at, strict=True):
        if point.low is not None and point.high is not None:
            top, bottom = (place(point.x + shift, bound)[1] for bound in (point.high, point.low))
            picture.path(
                f"M{column - 4:.1f},{top:.1f}h8M{column:.1f},{top:.1f}V{bottom:.1f}M{column - 4:.1f},{bottom:.1f}h8",
                kind=f"interval series-{number}",
            )
        if series.marks:
            picture.marker(column, level, number, says=point.says)


def _draw_legend(picture: Picture, series: Sequence[Series]) -> None:
    column = 0.0
    for index, each in enumerate(series):
        number = index if each.number is None else each.number
        if each.marks:
            picture.marker(column + 6, 31, number, says="")
        else:
            picture.line([(column, 31), (column + 14, 31)], kind=f"line series-{number}")
        picture.text(column + 18, 35, each.name, kind="strong")
        column += 18 + 7.0 * len(each.name) + 16


def _readable(scale: Scale, room: float) -> Sequence[tuple[float, str]]:
    """Return the ticks whose names do not touch: all of them, or every second, third ..."""
    needed = 6.5 * max(len(name) for _, name in scale.ticks) + 7
    every = max(1, round(needed * len(scale.ticks) / room + 0.499))
    return scale.ticks[::every]
