"""Computes from the samples of rounds what a benchmark says: a distribution for each load, and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_optimizer.measure.bench.api_servers import BUSY, SATURATED, ApiServers, use_of
from moe_optimizer.measure.bench.samples import RoundSamples
from moe_optimizer.measure.bench.statistics import Spread, Word, gain, spread
from moe_optimizer.measure.bench.trace import Load
from moe_optimizer.measure.expected_gains import ExpectedGain
from moe_optimizer.specs.front_end import FrontEndTime

RESULT_FILE = "bench.json"
"""The result of a benchmark, in its folder."""
_MS = 1000.0
IN_PAIRS = 1.2
"""Chosen, between the 1.39 of one start and the 1.10 that others reach, which have one client: a gap so many times as
long as the time of a token has two tokens at its end."""
_METRICS = {"tpot_ms": False, "ttft_ms": False, "output_tokens_per_s": True}
"""What verdicts are about -> whether higher is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times that a good request keeps, in milliseconds; None: any."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One side under one load; latencies over the requests of all counted rounds, rates as medians of the rounds."""

    clients: int | None
    rate: float | None
    """Requests per second; None with `clients`: a closed loop, and without: a trace's own times."""
    rounds: int
    """Those that count."""
    discarded: int = 0
    """Rounds that were thrown away and sent again, because a kernel was compiled meanwhile on one of the sides."""
    completed: int
    failed: int
    """Always 0: a failed request ends a benchmark."""
    tpot_ms: Spread | None
    """Time per output token; None when no completion has two tokens."""
    ttft_ms: Spread
    itl_ms: Spread | None
    e2e_ms: Spread
    output_tokens_per_s: float
    output_tokens_per_s_interval: tuple[float, float]
    """Of the median of the rounds: bootstrap, 95 %."""
    total_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float | None
    """Requests per second within the limits; None without limits."""
    joules_per_token: float | None
    """Energy of all GPUs over the output tokens; None where GPUs do not count it."""
    api_servers: ApiServers | None = None
    """None where their processes cannot be read, as those of a server that was only named by its URL."""

    @property
    def front_end_saturated(self) -> bool:
        """Whether tokens waited for API servers."""
        return self.api_servers is not None and self.api_servers.core_share >= SATURATED

    def front_end_time(self, found: str) -> FrontEndTime | None:
        """Return the most that an API server can have taken for a token, and what it took where it was saturated: the
        gap between two tokens of a request, over the requests that each answers.

        Args:
            found: when and by whom, in words.

        Returns: None in open loops, and where tokens came in pairs.
        """
        use = self.api_servers
        if use is None or self.clients is None or self.itl_ms is None or self.tpot_ms is None:
            return None
        if self.itl_ms.median > IN_PAIRS * self.tpot_ms.median:
            return None
        answered = self.clients / (use.processes * use.servers)
        us = 1000 * self.itl_ms.median / answered
        return FrontEndTime(clients=max(1, round(answered)), us_per_token=us, found=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The requests before the counted ones, in the first minute of a server, all loads together."""

    ttft_ms: Spread
    compilations: int | None
    """Kernels compiled after the server said it was ready; None where nobody counts them."""
    compiled: tuple[str, ...] = ()
    """The last of them, with the step that needed each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One part of the memory plan of the fullest device, and what was found there."""

    part: Literal["weights", "cache", "activations", "workspace", "activations and workspace"]
    planned_bytes: int
    found_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes in use at the end, of the GPUs together and of the server's processes."""

    gpu_bytes: int | None
    process_bytes: int | None
    parts: tuple[MemoryPart, ...] = ()
    """Where workers tell them: those of our servers do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    """One of the two servers that were compared."""

    name: str
    plan_digest: str | None
    """None for a server that was only named by its URL."""
    passes: tuple[str, ...]
    """Those that are on by the plan, and proven to run."""
    expected: tuple[ExpectedGain, ...] = ()
    """What the plan expects of each of them; the verdicts say what all bring together."""
    ready_s: tuple[float, ...]
    """Seconds from start to ready, one for each start."""
    warm: WarmUp
    memory: MemoryUse
    most_api_servers: int = 1
    """As many as a plan may give each server; 1 where vLLM starts one only, as its CPU build does."""
    loads: tuple[LoadResult, ...]

    @property
    def held_up(self) -> LoadResult | None:
        """The load whose API servers were busiest, of those where they were busy and there may be more of them."""
        use = [
            (each.api_servers.core_share, each)
            for each in self.loads
            if each.api_servers
            and each.api_servers.core_share > BUSY
            and each.api_servers.processes < self.most_api_servers
        ]
        return max(use, key=lambda pair: pair[0])[1] if use else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the first side is faster than the second; the interval holds for all verdicts of a run together."""

    metric: str
    load: str
    ratio: float
    """Above 1: the first side is faster, or has more tokens per second."""
    low: float
    high: float
    verdict: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """What `moe-optimizer bench --json` prints."""

    command: tuple[str, ...]
    """That made it."""
    date: str
    """When it was finished: ISO 8601 with a UTC offset."""
    workload: str
    description: str
    repetitions: int
    together: bool
    """Both servers up at the same time, loaded in turns; else started in turns."""
    sides: tuple[SideResult, ...]
    verdicts: tuple[Verdict, ...]
    environment: Mapping[str, str]


def load_result(load: Load, rounds: Sequence[RoundSamples], limits: Limits, *, discarded: int = 0) -> LoadResult:
    """Return what the counted rounds of one load say."""
    tpot = [each for samples in rounds for each in samples.tpot_s]
    itl = [each for samples in rounds for each in samples.itl_s]
    energies = [samples.energy_j for samples in rounds if samples.energy_j is not None]
    tokens = sum(sum(samples.output_tokens) for samples in rounds)
    output_rate = spread([_output_rate(samples) for samples in rounds])
    return LoadResult(
        clients=load.clients,
        rate=load.rate,
        rounds=len(rounds),
        discarded=discarded,
        completed=sum(len(samples.errors) for samples in rounds),
        failed=0,
        tpot_ms=spread([_MS * each for each in tpot]) if tpot else None,
        ttft_ms=spread([_MS * each for samples in rounds for each in samples.ttft_s]),
        itl_ms=spread([_MS * each for each in itl]) if itl else None,
        e2e_ms=spread([_MS * each for samples in rounds for each in samples.e2e_s]),
        output_tokens_per_s=output_rate.median,
        output_tokens_per_s_interval=(output_rate.low, output_rate.high),
        total_tokens_per_s=statistics.median(
            (sum(samples.input_tokens) + sum(samples.output_tokens)) / samples.duration_s for samples in rounds
        ),
        requests_per_s=statistics.median(len(samples.errors) / samples.duration_s for samples in rounds),
        goodput_per_s=_goodput(rounds, limits),
        joules_per_token=sum(energies) / tokens if len(energies) == len(rounds) else None,
        api_servers=use_of(rounds),
    )


def warm_up(rounds: Sequence[RoundSamples], compilations: int | None, compiled: Sequence[str] = ()) -> WarmUp:
    """Return what users of the first minute see."""
    first = [_MS * each for samples in rounds for each in samples.ttft_s]
    return WarmUp(ttft_ms=spread(first), compilations=compilations, compiled=tuple(compiled))


def verdicts(
    ours: Mapping[Load, Sequence[RoundSamples]], theirs: Mapping[Load, Sequence[RoundSamples]]
) -> list[Verdict]:
    """Compare two sides under each load, round by round."""
    found = []
    for load, rounds in ours.items():
        for metric, higher in _METRICS.items():
            mine, other = _by_round(metric, rounds), _by_round(metric, theirs[load])
            # A client that was starved reads a whole short answer at once: then there is no time between tokens.
            if mine and other and min(*mine, *other) > 0:
                one = gain(mine, other, higher_is_better=higher, comparisons=len(ours) * len(_METRICS))
                found.append(
                    Verdict(
                        metric=metric, load=str(load), ratio=one.ratio, low=one.low, high=one.high, verdict=one.verdict
                    )
                )
    return found


def _by_round(metric: str, rounds: Sequence[RoundSamples]) -> list[float]:
    if metric == "output_tokens_per_s":
        return [_output_rate(samples) for samples in rounds]
    values = [samples.tpot_s if metric == "tpot_ms" else samples.ttft_s for samples in rounds]
    return [_MS * statistics.median(each) for each in values if each]


def _output_rate(samples: RoundSamples) -> float:
    return sum(samples.output_tokens) / samples.duration_s


def _goodput(rounds: Sequence[RoundSamples], limits: Limits) -> float | None:
    if limits == Limits():
        return None
    return statistics.median(_good(samples, limits) / samples.duration_s for samples in rounds)


def _good(samples: RoundSamples, limits: Limits) -> int:
    rows = zip(samples.ttft_s, samples.e2e_s, samples.output_tokens, strict=True)
    return sum(
        (limits.ttft_ms is None or _MS * first <= limits.ttft_ms)
        and (limits.tpot_ms is None or tokens < 2 or _MS * (end - first) / (tokens - 1) <= limits.tpot_ms)
        for first, end, tokens in rows
    )
