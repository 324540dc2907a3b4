"""Turns tables of kernel speeds into the kernels of a plan, and says them in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from moe_optimizer.plan.decision import Gain
from moe_optimizer.specs.expert_formats import INT4, MXFP4
from moe_optimizer.specs.kernel_speeds import (
    ANY_NUMBER,
    MARGIN,
    STOCK,
    KernelSpeeds,
    TokenRange,
    TokenSpeeds,
    kernel_for,
    rounds_activations,
    token_ranges,
)
from moe_optimizer.specs.quantity import Quantity, Source

_DIRECT_TOKENS = {MXFP4: 8, INT4: 64}
"""Up to how many tokens the direct kernels were as fast as the grouped ones on an H100 (Qwen3-30B-A3B's layer,
benchmarks/records/2026-11-23_h100_mxfp4_experts.json and 2026-11-24_h100_int4_experts.json)."""


_MXFP4_IN_E4M3 = "grouped-mxfp4"
"""Rounds the activations."""
_E4M3_FROM_TOKENS_PER_EXPERT = 32
"""Slower at 8 and 16 tokens per expert, faster at 32 (gpt-oss-120b's layer) and from 64 on (Qwen3-30B-A3B's), on an
H100 (benchmarks/records/2026-11-26_h100_mxfp4_in_e4m3.json)."""


def unmeasured(weights: str, *, rounded_from: int | None = None) -> tuple[TokenRange, ...]:
    """Return which kernels read weights that only ours read, where nothing was measured: the tile is chosen by the
    tokens of an expert. From `rounded_from` tokens in a step on, kernels that round activations; None: nowhere.
    """
    four_bits, _, _ = weights.partition("_")
    ranges = (
        TokenRange(up_to=_DIRECT_TOKENS[four_bits], use="direct"),
        TokenRange(up_to=ANY_NUMBER, use=f"grouped-{four_bits}_weights"),
    )
    return ranges if rounded_from is None or four_bits != MXFP4 else with_rounded(ranges, rounded_from)


def rounded_from(experts: int, top_k: int) -> int:
    """Return the tokens in a step from which E4M3 pays for MXFP4 weights, where nothing else is known."""
    return -(-_E4M3_FROM_TOKENS_PER_EXPERT * experts // top_k)


def with_rounded(ranges: Sequence[TokenRange], from_tokens: int) -> tuple[TokenRange, ...]:
    """Return the ranges with the kernel that rounds activations from so many tokens on, if it is nowhere yet."""
    if any(rounds_activations(each.use) for each in ranges):
        return tuple(ranges)
    below = [each for each in ranges if each.up_to < from_tokens]
    cut = replace(ranges[len(below)], up_to=from_tokens - 1)
    last = TokenRange(up_to=ANY_NUMBER, use=_MXFP4_IN_E4M3)
    return (*below, *([cut] if cut.up_to > (below[-1].up_to if below else 0) else []), last)


def with_allowed_kernels(rows: Sequence[TokenSpeeds], *, rounded: bool) -> tuple[TokenSpeeds, ...]:
    """Return the rows with the kernels that may compute, and none that have none.

    Args:
        rows: of a table of experts that ours alone read.
        rounded: whether activations may be rounded. They are where that is faster by more than medians differ from run
            to run.
    """
    kept = []
    for row in rows:
        exact = {use: us for use, us in row.ours_us.items() if not rounds_activations(use)}
        enough = (1 - MARGIN) * min(exact.values(), default=math.inf)
        pays = {use: us for use, us in row.ours_us.items() if rounded and use not in exact and us <= enough}
        kept.append(replace(row, ours_us=exact | pays))
    return tuple(row for row in kept if row.ours_us)


def rounding_in_words(ranges: Sequence[TokenRange]) -> str:
    """Return from how many tokens on kernels round activations: "; from 513 tokens on ..."; "": nowhere."""
    starts = [below.up_to + 1 for below, each in pairwise(ranges) if rounds_activations(each.use)]
    return f"; from {starts[0]} tokens on activations are rounded to E4M3 (four_bit.activations)" if starts else ""


def uses_in_words(ranges: Sequence[TokenRange]) -> str:
    """Return which kernel computes how many tokens: "direct up to 8 tokens, grouped-... above"."""
    *limited, last = ranges
    parts = [f"{each.use} up to {'1 token' if each.up_to == 1 else f'{each.up_to} tokens'}" for each in limited]
    return ", ".join([*parts, f"{last.use} above"])


def in_plain_words(table: KernelSpeeds, ranges: Sequence[TokenRange]) -> str:
    """Return which kernel computes how many tokens, with the gains: "1-8 tokens ours (direct, 1.05-1.10x), ..."."""
    parts, start = [], 1
    for each in ranges:
        span = f"{start}" if start == each.up_to else f"{start}-{each.up_to}"
        # Those it was measured at, in the range or beside it: it may end before the next measured number.
        gains = [row.stock_us / row.ours_us[each.use] for row in table.rows
                 if each.use in row.ours_us and start - 1 <= row.tokens <= each.up_to + 1]  # fmt: skip
        parts.append(f"{span}: {_kernel(each.use, gains)}")
        start = each.up_to + 1
    parts.append(f"above {start - 1}: vLLM's")
    return "tokens in a step " + ", ".join(parts)


def _kernel(name: str, gains: Sequence[float]) -> str:
    if name == STOCK:
        return "vLLM's"
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return f"ours, {name} ({low}x)" if low == high else f"ours, {name} ({low}-{high}x)"


def measured_gain(table: KernelSpeeds, ranges: Sequence[TokenRange], batch: int) -> Gain | None:
    """Return the gain of the experts in a decode step of so many requests; None where none was measured there."""
    row = nearest_row(table.rows, batch)
    use = kernel_for(ranges, row.tokens)
    return None if use == STOCK else gain_over_stock(table, lambda row: row.ours_us[use], batch)


def gain_over_stock(table: KernelSpeeds, times: Callable[[TokenSpeeds], float], batch: int) -> Gain:
    """Return what another way than vLLM's Triton gains in a decode step of so many requests."""
    row = nearest_row(table.rows, batch)
    ratio = Quantity(row.stock_us / times(row), "ratio", Source.MEASURED, table.source)
    at = "1 token" if row.tokens == 1 else f"{row.tokens} tokens"
    return Gain(metric=f"expert kernels of one layer at {at}", ratio=ratio)


def nearest_row(rows: Sequence[TokenSpeeds], tokens: int) -> TokenSpeeds:
    """Return the row measured nearest to this many tokens, by ratio."""
    return min(rows, key=lambda row: max(row.tokens / tokens, tokens / row.tokens))


def all_ranges(tables: dict[str, KernelSpeeds]) -> dict[str, tuple[TokenRange, ...]]:
    """Return the dispatch of each table in which a kernel of ours wins anywhere."""
    ranges = {weights: token_ranges(table.rows) for weights, table in tables.items()}
    return {weights: each for weights, each in ranges.items() if each}


def why_vllms(tables: Sequence[KernelSpeeds]) -> str:
    """Return where vLLM's own kernel was measured to be faster than the best of ours, most of all first."""
    table = tables[0]
    ratios = {row.tokens: min(row.ours_us.values()) / row.stock_us for row in table.rows if row.ours_us}
    if not ratios:
        return "no kernel of ours covers this layer"
    worst = max(ratios, key=lambda tokens: ratios[tokens])
    if ratios[worst] <= 1:
        return f"ours gained less than can be told from noise ({1 / min(ratios.values()):.2f}x at best)"
    at = "1 token" if worst == 1 else f"{worst} tokens"
    best = 1 / min(ratios.values())
    rest = f", ours up to {best:.2f}x faster elsewhere" if best > 1 else ""
    return f"vLLM's kernel measured {ratios[worst]:.{1 if ratios[worst] >= 1.1 else 2}f}x faster at {at}{rest}"
