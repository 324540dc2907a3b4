"""Computes what a server did between two moments: rates, and quantiles of the times in that interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from moe_optimizer.measure.live.moment import RUNNING, Moment

TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"
_PROMPT, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_DRAFTED, _DRAFT_TOKENS = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Quantiles of a time, in milliseconds; None where nothing ended in the interval."""

    median_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a server did in an interval, and how it stood at its end."""

    model: str
    seconds: float
    """Length of the interval."""
    running: int
    waiting: int
    finished: int
    """Requests that ended in the interval."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Times
    tpot: Times
    """Per request that ended, as vLLM counts it."""
    cache_share: float
    """Of the KV cache, 0 to 1; the mean over the engines of a server."""
    prefix_hit_share: float | None
    """Of the prompt tokens in the interval, found in the prefix cache; None without prompts."""
    drafts_per_step: float | None
    """Tokens that speculation drafted for a request in a step, on average; None without drafts."""
    accepted_per_step: float | None
    """Of those, how many the model kept."""
    preemptions: int
    passes: Mapping[str, str]
    """Pass -> state; empty without our plugin."""
    kernels: Mapping[str, str]
    """Tokens of a step and dtype of the weights -> kernel of the experts; empty where ours compute none."""
    compiled_after_ready: int | None
    """Since the start."""
    worst_layer: int | None
    """The MoE layer whose tokens are the most uneven over its experts since the start; None if nobody counts them."""
    worst_imbalance: float | None
    """Tokens of that layer's busiest expert over the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerActivity:
    """One server of several."""

    name: str
    url: str
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveActivity:
    """What all servers of a run did in one interval."""

    servers: tuple[ServerActivity, ...]


def activity(before: Moment, after: Moment) -> Activity:
    """Return what happened between two moments of one server.

    A counter that fell was started anew: what it counts since then is what is known.

    Args:
        before: the earlier.
        after: the later.
    """
    seconds = max(after.seconds - before.seconds, 1e-9)

    def gained(name: str) -> float:
        now, then = after.total(name), before.total(name)
        return now - then if now >= then else now

    queries, drafted = gained(_QUERIES), gained(_DRAFTED)
    worst = max(after.imbalance.items(), key=lambda each: each[1], default=(None, None))
    return Activity(
        model=after.model,
        seconds=seconds,
        running=round(after.total(RUNNING)),
        waiting=round(after.total("vllm:num_requests_waiting")),
        finished=round(gained("vllm:request_success_total")),
        prompt_tokens_per_s=gained(_PROMPT) / seconds,
        output_tokens_per_s=gained(_GENERATED) / seconds,
        ttft=_times(before, after, TTFT),
        tpot=_times(before, after, TPOT),
        cache_share=after.total("vllm:kv_cache_usage_perc") / after.engines,
        prefix_hit_share=gained(_HITS) / queries if queries else None,
        drafts_per_step=gained(_DRAFT_TOKENS) / drafted if drafted else None,
        accepted_per_step=gained(_ACCEPTED) / drafted if drafted else None,
        preemptions=round(gained("vllm:num_preemptions_total")),
        passes=after.passes,
        kernels=after.kernels,
        compiled_after_ready=after.after_ready,
        worst_layer=worst[0],
        worst_imbalance=worst[1],
    )


def _times(before: Moment, after: Moment, name: str) -> Times:
    now, then = after.buckets.get(name, {}), before.buckets.get(name, {})
    gained = {bound: count - then.get(bound, 0.0) for bound, count in sorted(now.items())}
    # Counts up to a bound never fall and never shrink from bound to bound: else the server was started anew.
    restarted = any(more < less for less, more in pairwise([0.0, *gained.values()]))
    counts = now if restarted else gained
    median, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
    return Times(
        median_ms=None if median is None else 1000 * median,
        p99_ms=None if p99 is None else 1000 * p99,
    )


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of a histogram as Prometheus' `histogram_quantile` does: linear within a bucket.

    Args:
        counts: upper bound -> observations up to it; the last bound is infinite.
        share: 0 to 1.

    Returns:
        In the unit of the bounds; the last finite bound where the quantile lies above it; None without observations.
    """
    bounds = sorted(counts)
    if not bounds or not counts[bounds[-1]] > 0:
        return None
    wanted = share * counts[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted and counts[bound] > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (counts[bound] - below)
        if not math.isinf(bound):
            lower, below = bound, counts[bound]
    return lower
