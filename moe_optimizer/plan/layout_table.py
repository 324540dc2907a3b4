"""Renders the choice of a layout for people: a table of the five best with a bar each, and the parts of a step.

GB/GPU are weights. The bars are tokens/s, in percent of the most; they begin not far below the least that is shown.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from moe_optimizer.plan.layout_choice import LayoutChoice, LayoutEstimate, OtherEstimate, waiting_in_words
from moe_optimizer.specs.quantity import Quantity, Source, bytes_in_words

_BARS = (6, 20)
"""The shortest and the longest one."""
_BESIDE_BARS = 74
"""Columns of the figures, and of what two percentages take."""
_SCALE_STEP = 0.05
_LEAST_SCALE = 0.1
"""Chosen: differences of a hundredth stay small."""
_LEAST_SHARE = 0.005
"""Of a step: a smaller part is not listed."""


def layout_lines(choice: LayoutChoice, width: int, *, explain: bool = False) -> Iterator[str]:
    """Yield the lines of a section: what was asked, the table, the parts of a step, with `explain` each with its
    source.
    """
    limits = [
        f"{name} <= {limit:g} ms"
        for name, limit in (("TTFT", choice.ttft_limit_ms), ("TPOT", choice.tpot_limit_ms))
        if limit is not None
    ]
    clients = f"{choice.clients} client{'s' if choice.clients > 1 else ''}"
    aim = f"pinned by {choice.pinned_by}" if choice.pinned_by else f"goal {choice.goal}, {choice.num_layouts} compared"
    yield from _wrapped(f"{', '.join([aim, clients, *limits])}; predicted, not measured", width)
    most = max(each.tokens_per_s for each in choice.estimates)
    shares = [each.tokens_per_s / most for each in choice.estimates]
    start = min(_SCALE_STEP * math.floor(min(shares) / _SCALE_STEP), 1 - _LEAST_SCALE)
    scale = f"{100 * start:.0f} to 100%"
    yield f"  {'layout':<12}{'TPOT ms':>8}{'TTFT ms':>8}{'tokens/s':>10}{'GB/GPU':>7}  {scale}"
    for each, share in zip(choice.estimates, shares, strict=True):
        bar = _bar((share - start) / (1 - start), width)
        yield from _rows(each, bar, each.why_not or _planned(choice), width)
    if choice.other is not None:
        yield from _wrapped(_told(choice.other), width)
    yield from _parts(choice, width, explain=explain)
    best = choice.estimate
    servers = f"{best.api_servers} API servers, each" if best.api_servers > 1 else "one API server,"
    busy = f"front end: {servers} busy {best.front_end_share:.0%} of a decode step"
    alone = best.api_servers <= choice.layout.data_parallel_size
    yield from _wrapped(f"{busy}{_of_this_machine(choice.front_end_us, alone=alone)}", width)
    weights = bytes_in_words(best.weight_bytes)
    yield from _wrapped(f"each GPU: {weights} of weights; the cache of a copy holds {best.kv_tokens:,} tokens", width)


def _told(other: OtherEstimate) -> str:
    if other.tpot_ms is None or other.tokens_per_s is None:
        return f"{other.name} has no estimate to compare with: {other.why_none}"
    warning = ", more than 25 % from ours" if other.differs else ""
    asked = f" ({other.formats})" if other.formats else ""
    return f"{other.name}{asked}: TPOT {other.tpot_ms:.4g} ms, {other.tokens_per_s:,.0f} tokens/s{warning}"


def _bar(share: float, width: int) -> str:
    """Return a bar that is longer where there are more columns."""
    shortest, longest = _BARS
    length = min(max(width - _BESIDE_BARS, shortest), longest)
    filled = round(length * share)
    return "#" * filled + "." * (length - filled)


def _rows(each: LayoutEstimate, bar: str, why: str, width: int) -> Iterator[str]:
    figures = f"{each.tpot_ms:>8.2f}{each.ttft_ms:>8.0f}{each.tokens_per_s:>10,.0f}{each.weight_bytes / 1e9:>7.1f}"
    yield from _row_with_note(f"  {each.layout:<12}{figures}  {bar}", why, width)


def _planned(choice: LayoutChoice) -> str:
    chosen = choice.estimate
    copies = choice.layout.num_engines
    notes = [waiting_in_words(chosen.waiting, chosen.running, copies=copies)] if chosen.waiting else []
    notes += ["prompts wait to be read by too few servers"] if chosen.reading_share > 1 else []
    # Only what is pinned is planned all the same.
    notes += ["TTFT above its limit"] if chosen.ttft_ms > (choice.ttft_limit_ms or math.inf) else []
    notes += ["TPOT above its limit"] if chosen.tpot_ms > (choice.tpot_limit_ms or math.inf) else []
    notes += ["bound by the front end"] if chosen.front_end_share == 1 else []
    return "; ".join(["planned", *notes])


def _of_this_machine(front_end_us: Quantity | None, *, alone: bool) -> str:
    """Return what was found of this machine's API servers; "": nothing was, or it is another machine."""
    if front_end_us is None or front_end_us.source is not Source.MEASURED:
        return ""
    told = f"{front_end_us.value:.0f} us a token ({front_end_us.ref})"
    return f", at {told}" if alone else f"; one for all would take {told}"


def _parts(choice: LayoutChoice, width: int, *, explain: bool) -> Iterator[str]:
    total = sum(part.value for part in choice.parts_us.values())
    if not total:
        return
    shares = {name: part.value / total for name, part in choice.parts_us.items()}
    words = [f"{name} {share:.0%}" for name, share in shares.items() if share >= _LEAST_SHARE]
    yield from _wrapped(f"a decode step of {total / 1e3:.2f} ms: {', '.join(words)}", width)
    if explain:
        column = max(map(len, choice.parts_us))
        yield f"    {'part':<{column}}{'us':>10}  {'source':<9} from"
        for name, part in choice.parts_us.items():
            row = f"    {name:<{column}}{part.value:>10.1f}  {part.source.value:<9}"
            yield from _row_with_note(row, part.ref, width)


def _row_with_note(row: str, note: str, width: int) -> Iterator[str]:
    """Yield a row of a table and what is said of it, below it where it does not fit beside it."""
    if len(row) + 1 + len(note) <= width:
        yield f"{row} {note}"
    else:
        yield row.rstrip()
        yield from textwrap.wrap(note, width, initial_indent="      ", subsequent_indent="      ")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
