"""Shows the ledger of a tuning as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import get_args

from moe_optimizer.measure.bench.statistics import ratio_in_words
from moe_optimizer.measure.tune.ledger import Entry, Step, TuneResult

_WIDTH = 80
_ENDED = {
    "done": "everything was tried",
    "budget": "the budget ended it",
    "interrupted": "interrupted",
}


def render(result: TuneResult) -> str:
    """Return what was tried, what was kept and why, and where the plan is."""
    lines = [f"{'step':<13}{'gain (interval)':<24}{'kept':<5}what, and why", *map(_line, result.entries), ""]
    lines += textwrap.wrap(f"result: {result.plan}", _WIDTH, subsequent_indent="  ")
    if result.passes:
        lines += textwrap.wrap(f"on: {', '.join(result.passes)}", _WIDTH, subsequent_indent="  ")
    by_step: dict[str, float] = dict.fromkeys(get_args(Step), 0.0)
    for each in result.entries:
        by_step[each.step] += each.seconds
    by_step["else"] = result.spent_s - sum(by_step.values())
    shares = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in by_step.items() if seconds >= 0.5)
    ended = f"{_ENDED[result.ended]}: {result.spent_s:.0f} of {result.budget_s:.0f} s"
    lines += textwrap.wrap(f"{ended} ({shares})" if shares else ended, _WIDTH, subsequent_indent="  ")
    lines += _goal(result)
    if result.plan_file is not None:
        lines += ["", f"Written: {result.plan_file}", f"  python run_optimizer.py --plan {result.plan_file}"]
    return "\n".join(lines)


def _line(entry: Entry) -> str:
    gain = "-"
    if entry.ratio is not None and entry.low is not None and entry.high is not None:
        low, high = ratio_in_words(entry.low), ratio_in_words(entry.high)
        gain = f"{ratio_in_words(entry.ratio)}x ({low}-{high})"
    elif entry.score is not None:
        gain = f"{entry.score:.4g}"
    against = f" against {entry.against}" if entry.against else ""
    text = f"{entry.what}{against}: {entry.reason}"
    if entry.predicted is not None:
        text += f"; modelled: {entry.predicted:.2f}x {entry.predicted_metric}"
    elif entry.no_prediction:
        text += f"; not modelled: {entry.no_prediction}"
    head = f"{entry.step:<13}{gain:<24}{'yes' if entry.kept else 'no':<5}"
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _goal(result: TuneResult) -> Iterator[str]:
    if result.met:
        return
    if result.plan_file is not None:
        yield f"goal missed: {result.goal}"
    miss = result.nearest_miss
    if miss is not None:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in miss.figures.items())
        yield from textwrap.wrap(
            f"nearest: {miss.what}: {miss.score:.2f} times the limit ({shown})", _WIDTH, subsequent_indent="  "
        )
