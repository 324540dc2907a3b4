"""Parses the goal of a tuning, and scores rounds of requests by it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.result import Limits
from moe_optimizer.measure.bench.samples import RoundSamples

_MS = 1000.0
_LIMIT = re.compile(r"(ttft|tpot)\s*<\s*(\d+(?:\.\d+)?)\s*(ms|s)")
_EXPECTED = 'expected throughput, latency, or limits such as "ttft<200ms,tpot<30ms"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be better, or the times that 99 of 100 requests must keep."""

    text: str
    kind: Literal["throughput", "latency", "limits"]
    limits: Limits = field(default_factory=Limits)

    @property
    def higher_is_better(self) -> bool:
        """Of a score."""
        return self.kind == "throughput"

    @property
    def metric(self) -> str:
        """What a score is, with its unit."""
        return {
            "throughput": "output tokens/s",
            "latency": "median time to the last token, ms",
            "limits": "worst p99 over its limit",
        }[self.kind]

    def score(self, loads: Sequence[RoundSamples]) -> float:
        """Return one number for one repetition, from its round under each load.

        Throughput and latency are geometric means over the loads; limits are as bad as the worst of them.
        """
        if self.kind == "limits":
            return max(share for samples in loads for share in self._shares(samples))
        if self.kind == "throughput":
            values = [sum(samples.output_tokens) / samples.duration_s for samples in loads]
        else:
            values = [_MS * statistics.median(samples.e2e_s) for samples in loads]
        return math.exp(statistics.fmean(math.log(each) for each in values))

    def _shares(self, samples: RoundSamples) -> list[float]:
        limited = ((samples.ttft_s, self.limits.ttft_ms), (samples.tpot_s, self.limits.tpot_ms))
        return [_p99_ms(values) / limit for values, limit in limited if limit is not None and values]

    def is_met(self, scores: Sequence[float]) -> bool:
        """Return whether the repetitions keep the limits; a goal without limits is always met."""
        return self.kind != "limits" or (bool(scores) and statistics.median(scores) <= 1)


def figures(repetitions: Sequence[Sequence[RoundSamples]]) -> Mapping[str, float]:
    """Return what a reader wants to know of a side, over all loads: tokens per second, and times of requests in ms."""
    rounds = [samples for each in repetitions for samples in each]
    tpot = [each for samples in rounds for each in samples.tpot_s]
    ttft = [each for samples in rounds for each in samples.ttft_s]
    tokens = sum(sum(each.output_tokens) for each in rounds)
    found = {
        "output_tokens_per_s": tokens / sum(each.duration_s for each in rounds),
        "ttft_p99_ms": _p99_ms(ttft),
        "e2e_median_ms": _MS * statistics.median(each for samples in rounds for each in samples.e2e_s),
    }
    return found | ({"tpot_p99_ms": _p99_ms(tpot)} if tpot else {})


def _p99_ms(values: Sequence[float]) -> float:
    return _MS * float(np.quantile(values, 0.99))


def parse_goal(text: str) -> Goal:
    """Read a goal.

    Raises:
        InputError: it is none.
    """
    plain = text.strip().lower()
    if plain == "throughput":
        return Goal(text=plain, kind="throughput")
    if plain == "latency":
        return Goal(text=plain, kind="latency")
    found: dict[str, float] = {}
    for part in plain.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None or match[1] in found or float(match[2]) == 0:
            raise InputError(f"--goal: got {text!r:.80}, {_EXPECTED}")
        found[match[1]] = float(match[2]) * (_MS if match[3] == "s" else 1)
    return Goal(text=plain, kind="limits", limits=Limits(ttft_ms=found.get("ttft"), tpot_ms=found.get("tpot")))
