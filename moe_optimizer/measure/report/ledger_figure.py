"""Draws where the time of a decode step goes: a bar for each group of kernels, beside the least that its bytes take."""

from __future__ import annotations

from moe_optimizer.measure.decode_step.ledger import Ledger
from moe_optimizer.measure.report.scale import fitting
from moe_optimizer.measure.report.svg import Picture

_WIDTH, _LEFT, _RIGHT, _TOP = 460.0, 84.0, 52.0, 48.0
_BAR, _ROW = 12.0, 36.0
WAITING = "no kernel"


def ledger_figure(stock: Ledger, ours: Ledger) -> Picture:
    """Return the ledgers of one batch, both sides; a black line marks the least time of a group's bytes."""
    by_side = [_times(stock), _times(ours)]
    groups = list(dict.fromkeys((*by_side[1], *by_side[0])))
    least = {row.group: row.least_us for ledger in (stock, ours) for row in ledger.rows}
    longest = max(time for times in by_side for time in times.values())
    scale = fitting([0.0, longest])
    height = _TOP + _ROW * len(groups) + 26
    picture = Picture(
        _WIDTH,
        height,
        title=f"Decode step, us: {ours.batch} sequence{'s' if ours.batch != 1 else ''} of {ours.context} tokens",
        description=f"A step takes {ours.step_us:.0f} us with the plan and {stock.step_us:.0f} us with stock vLLM. "
        "The table below has the time of each group of kernels.",
    )
    for number, name in enumerate((f"stock vLLM, {stock.step_us:,.0f} us", f"the plan, {ours.step_us:,.0f} us")):
        picture.rectangle(160.0 * number, 25, 10, 10, kind=f"bar series-{1 - number}")
        picture.text(160.0 * number + 16, 34, name, kind="strong")
    picture.line([(_WIDTH - 122, 24), (_WIDTH - 122, 37)], kind="least")
    picture.text(_WIDTH, 34, "least for the bytes", anchor="end")
    room = _WIDTH - _LEFT - _RIGHT
    for value, name in scale.ticks:
        column = _LEFT + room * scale.place(value)
        picture.line([(column, _TOP), (column, height - 22)], kind="rule")
        picture.text(column, height - 6, name, anchor="middle")
    for row, group in enumerate(groups):
        top = _TOP + _ROW * row + 5
        picture.text(_LEFT - 8, top + 17, group, kind="strong", anchor="end")
        for number, times in enumerate(by_side):
            if group in times:
                length = room * scale.place(times[group])
                bar = top + number * (_BAR + 1)
                picture.rectangle(_LEFT, bar, length, _BAR, kind=f"bar series-{1 - number}",
                                  says=f"{group}: {times[group]:.1f} us")  # fmt: skip
                picture.text(_LEFT + length + 5, bar + 10, f"{times[group]:,.0f}")
        floor = least.get(group)
        if floor is not None:
            column = _LEFT + room * scale.place(floor)
            picture.line([(column, top - 2), (column, top + 2 * _BAR + 3)], kind="least")
    return picture


def _times(ledger: Ledger) -> dict[str, float]:
    """Return the time of each group, the longest first, and of the step that no kernel fills."""
    times = {row.group: row.us for row in ledger.rows}
    waiting = ledger.step_us - ledger.kernels_us
    return times | ({WAITING: waiting} if waiting > 0 else {})
