"""Ranks the layouts of a question by what the user aims at, within the user's limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moe_optimizer.layouts.candidates import candidates
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.layouts.serving import Prediction, memory_of, predict
from moe_optimizer.specs.layout import Layout

_EQUAL = 0.01
"""Chosen: the step model is wrong by more."""
Goal = Literal["latency", "balanced", "throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a layout must keep; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def why_not(self, prediction: Prediction) -> str:
        """Return which limit a prediction does not keep, or ""."""
        broken = [
            f"{name} {value:.4g} ms, above {limit:g}"
            for name, value, limit in (
                ("TPOT", prediction.tpot_ms, self.tpot_ms),
                ("TTFT", prediction.ttft_ms, self.ttft_ms),
            )
            if limit is not None and value > limit
        ]
        return "; ".join(broken)

    def excess(self, prediction: Prediction) -> float:
        """Return how many times the limits a prediction takes, at most one for those that it keeps."""
        pairs = ((prediction.tpot_ms, self.tpot_ms), (prediction.ttft_ms, self.ttft_ms))
        return max((value / limit for value, limit in pairs if limit is not None), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The layouts that fit, the best first."""

    within: tuple[Prediction, ...]
    """That keep the limits."""
    beyond: tuple[Prediction, ...]
    """That do not, the nearest first."""
    do_not_fit: tuple[Layout, ...]
    """For which a GPU has too little memory."""


def rank(
    question: LayoutQuestion,
    goal: Goal,
    limits: Limits,
    *,
    allowed: Callable[[Layout], bool] = lambda _: True,
) -> Ranking:
    """Return the layouts that are allowed, ranked.

    Servers over several machines are looked at only where no server in one fits: between machines the network is
    slower than any link within.

    Equal questions give equal rankings: ties go to the plainer layout, then to fewer GPUs in a server and the name.
    """
    fitting: list[Prediction] = []
    too_large: list[Layout] = []
    each = question.gpus_per_machine
    possible = [layout for layout in candidates(question) if allowed(layout)]
    for over_machines in (False, True):
        if fitting:
            break
        for layout in possible:
            if (layout.devices_of_server > each) is not over_machines:
                continue
            memory = memory_of(question, layout)
            if memory.fits:
                fitting.append(predict(question, layout, memory))
            else:
                too_large.append(layout)
    within = [each for each in fitting if not limits.why_not(each)]
    beyond = [each for each in fitting if limits.why_not(each)]
    return Ranking(
        within=tuple(sorted(within, key=lambda each: order(each, goal))),
        beyond=tuple(sorted(beyond, key=lambda each: (limits.excess(each), *order(each, goal)))),
        do_not_fit=tuple(too_large),
    )


def order(prediction: Prediction, goal: Goal) -> tuple[bool, bool, int, bool, bool, int, str]:
    """Return the sort key of a prediction: smaller is better.

    latency: the least time per output token, of layouts in which no request waits for room if there are any;
    throughput: the most tokens a second; balanced: the most of tokens a second divided by the time per output token.
    Differences of one hundredth are none: then slices go before whole experts, and those before copies. Prefill and
    decode apart come last: they need a connector between the servers, which nothing else does.
    """
    score = {
        "latency": prediction.tpot_ms,
        "throughput": 1 / prediction.tokens_per_s,
        "balanced": prediction.tpot_ms / prediction.tokens_per_s,
    }[goal]
    layout = prediction.layout
    waits = goal == "latency" and prediction.waiting > 0
    steps = round(math.log(score) / _EQUAL)
    plain = (layout.data_parallel_size > 1, layout.expert_parallel)
    return layout.disaggregated, waits, steps, *plain, layout.devices_of_server, layout.name
