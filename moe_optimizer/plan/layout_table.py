"""Renders the choice of a layout for people: a table of the five best with a bar each, and the parts of a step."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from moe_optimizer.plan.layout_choice import LayoutChoice, LayoutEstimate
from moe_optimizer.specs.quantity import bytes_in_words

_WIDTH = 79
_BAR = 12
_SHOWN_WHY = 24


def layout_lines(choice: LayoutChoice) -> Iterator[str]:
    """Yield the lines of a section, at most 79 columns wide: what was asked, the table, the parts of a step."""
    limits = [
        f"{name} <= {limit:g} ms"
        for name, limit in (("TTFT", choice.ttft_limit_ms), ("TPOT", choice.tpot_limit_ms))
        if limit is not None
    ]
    clients = f"{choice.clients} client{'s' if choice.clients > 1 else ''}"
    aim = f"pinned by {choice.pinned_by}" if choice.pinned_by else f"goal {choice.goal}, {choice.num_layouts} compared"
    yield f"  {', '.join([aim, clients, *limits])}; predicted, not measured"
    yield f"  {'layout':<12}{'GPUs':>5}{'TPOT ms':>9}{'TTFT ms':>9}{'tokens/s':>10}  {'':<{_BAR}}  against the first"
    most = max(each.tokens_per_s for each in choice.estimates)
    for each in choice.estimates:
        yield _row(each, most)
    if choice.other is not None:
        other = choice.other
        warning = ", more than 25 % from ours" if other.differs else ""
        yield f"  {other.name}: TPOT {other.tpot_ms:.4g} ms, {other.tokens_per_s:,.0f} tokens/s{warning}"
    yield from _parts(choice)
    best = choice.estimate
    yield (
        f"  each GPU: {bytes_in_words(best.weight_bytes)} of weights; the cache of a copy holds "
        f"{best.kv_tokens:,} tokens"
    )


def _row(each: LayoutEstimate, most: float) -> str:
    filled = max(1, round(_BAR * each.tokens_per_s / most))
    bar = "#" * filled + "." * (_BAR - filled)
    why = each.why_not or "planned"
    figures = f"{each.num_gpus:>5}{each.tpot_ms:>9.2f}{each.ttft_ms:>9.0f}{each.tokens_per_s:>10,.0f}"
    return f"  {each.layout:<12}{figures}  {bar}  {why[:_SHOWN_WHY]}".rstrip()


def _parts(choice: LayoutChoice) -> Iterator[str]:
    total = sum(part.value for part in choice.parts_us.values())
    if not total:
        return
    words = [f"{name} {part.value / total:.0%}" for name, part in choice.parts_us.items()]
    text = f"a decode step of {total / 1e3:.2f} ms: {', '.join(words)}"
    yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
