"""Renders what servers do now as text, a block of lines for each."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moe_optimizer.errors import printable

if TYPE_CHECKING:
    from moe_optimizer.measure.live.activity import Activity, LiveActivity, ServerActivity, Times

_LEVELS = " ▁▂▃▄▅▆▇█"
_BAR = 24


def rendered(shown: LiveActivity, history: Mapping[str, Sequence[float]], *, width: int) -> str:
    """Return the blocks, none wider than `width` columns.

    Args:
        shown: of each server.
        history: URL -> output tokens per second of the intervals until now, oldest first; missing: no curve.
        width: of the terminal.
    """
    return "\n\n".join("\n".join(_block(each, history.get(each.url, ()), width)) for each in shown.servers)


def _block(server: ServerActivity, rates: Sequence[float], width: int) -> list[str]:
    now = server.activity
    lines = [
        f"{server.name}  {server.url}  {printable(now.model)}",
        f"  output    {now.output_tokens_per_s:>10,.0f} tokens/s   prompt {now.prompt_tokens_per_s:>10,.0f} tokens/s",
        f"  requests  {now.running:>10,} running    {now.waiting:>7,} waiting   {now.finished:>7,} finished",
        f"  TTFT      {_times(now.ttft)}",
        f"  TPOT      {_times(now.tpot)}",
        f"  KV cache  [{_bar(now.cache_share)}] {now.cache_share:>4.0%}   {_cache_words(now)}",
    ]
    if now.passes:
        states = ", ".join(f"{name} {state.replace('_', ' ')}" for name, state in now.passes.items())
        lines += textwrap.wrap(states, width, initial_indent="  passes    ", subsequent_indent=" " * 12)
    if now.kernels:
        kernels = ", ".join(f"{tokens}: {kernel}" for tokens, kernel in _by_tokens(now.kernels))
        lines += textwrap.wrap(kernels, width, initial_indent="  kernels   ", subsequent_indent=" " * 12)
    if now.compiled_after_ready is not None:
        lines.append(f"  compiled  {now.compiled_after_ready:>10,} after ready")
    if now.drafts_per_step is not None and now.accepted_per_step is not None:
        lines.append(f"  drafts    {now.accepted_per_step:>10.2f} accepted of {now.drafts_per_step:.2f} in a step")
    if now.worst_imbalance is not None:
        lines.append(f"  experts   {now.worst_imbalance:>10.2f} times the mean: busiest of layer {now.worst_layer}")
    if rates:
        lines.append(f"  tokens/s  {_curve(rates, width - 12)}")
    return [line[:width].rstrip() for line in lines]


def _by_tokens(kernels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return for example "1-8 tokens, bf16" with its kernel, the fewest tokens of each dtype first."""
    return sorted(kernels.items(), key=lambda each: (each[0].split()[-1], int(re.split("[-+]", each[0])[0])))


def _times(times: Times) -> str:
    if times.median_ms is None or times.p99_ms is None:
        return "         - nothing ended in this interval"
    return f"{times.median_ms:>10,.1f} ms median  {times.p99_ms:>10,.1f} ms p99"


def _cache_words(now: Activity) -> str:
    hits = "" if now.prefix_hit_share is None else f"prefix hits {now.prefix_hit_share:.0%}"
    return "   ".join(filter(None, (hits, f"{now.preemptions} preempted" if now.preemptions else "")))


def _bar(share: float) -> str:
    full = round(_BAR * min(max(share, 0.0), 1.0))
    return "#" * full + "." * (_BAR - full)


def _curve(rates: Sequence[float], width: int) -> str:
    """Return one column for each of the latest intervals; the tallest is the fastest of them."""
    latest = list(rates)[-width:]
    top = max(latest) or 1.0
    return "".join(_LEVELS[round((len(_LEVELS) - 1) * rate / top)] for rate in latest)
