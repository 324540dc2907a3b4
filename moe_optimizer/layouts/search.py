"""Ranks the layouts of a question by what the user aims at, within the user's limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moe_optimizer.layouts.candidates import candidates, fewer_servers
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.layouts.serving import Prediction, api_servers_at_most, memory_of, predict
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.specs.layout import Layout

_EQUAL = 0.01
"""Chosen: the step model is wrong by more."""
_COPIES = 0.05
"""Chosen, about the model's error: what copies must bring more than layouts without. Each copy reads its prompts alone,
so first tokens come up to seven times as late as with slices, and loads of copies were predicted with up to 18 % too
many tokens a second."""
_FAR = 0.1
"""Chosen: the same for latency of copies over several machines, of which nothing was measured and AIConfigurator has
twice the time per output token that the model has."""
_FEW = 0.05
"""Chosen: of the clients, that may wait for room, or beyond what prefill servers can read, without that counting
against a layout. Room for them all is seldom needed, because requests are of all lengths between a prompt's and their
last."""
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

    Between machines the network is slower than any link within. So pipelines over several are looked at only where no
    server in one fits, or more than a few of its clients wait for room there; copies only where more than half do.

    Equal questions give equal rankings.
    """
    fitting: list[Prediction] = []
    too_large: list[Layout] = []

    def look_at(layouts: Sequence[Layout]) -> None:
        for layout in layouts:
            memory = memory_of(question, layout)
            if not memory.fits:
                too_large.append(layout)
                continue
            fitting.append(_within_if_possible(question, layout, memory, limits))
            if limits.why_not(fitting[-1]):
                fewer = filter(allowed, fewer_servers(question, layout))
                fitting.extend(_first_within(question, fewer, limits))

    in_machine: list[Layout] = []
    over_machines: list[Layout] = []
    for layout in filter(allowed, candidates(question)):
        (over_machines if layout.devices_of_server > question.gpus_per_machine else in_machine).append(layout)
    look_at(in_machine)
    if any(found.waiting <= found.running for found in fitting):
        over_machines = [layout for layout in over_machines if layout.data_parallel_size == 1]
    if all(_waits_for_room(found) for found in fitting):
        look_at(over_machines)
    within = [each for each in fitting if not limits.why_not(each)]
    beyond = [each for each in fitting if limits.why_not(each)]
    return Ranking(
        within=tuple(ordered(within, goal)),
        beyond=tuple(sorted(ordered(beyond, goal), key=limits.excess)),
        do_not_fit=tuple(too_large),
    )


def _within_if_possible(question: LayoutQuestion, layout: Layout, memory: MemoryPlan, limits: Limits) -> Prediction:
    """Return what a layout does, with the fewest API servers with which it keeps the limits, if it may have more."""
    by_rule = predict(question, layout, memory)
    if limits.why_not(by_rule):
        for count in range(by_rule.api_servers + 1, api_servers_at_most(question, layout) + 1):
            more = predict(replace(question, api_servers=count), layout, memory)
            if not limits.why_not(more):
                return more
    return by_rule


def _first_within(question: LayoutQuestion, layouts: Iterable[Layout], limits: Limits) -> Iterator[Prediction]:
    """Yield what the first of some layouts does that keeps the limits, if one does."""
    for layout in layouts:
        memory = memory_of(question, layout)
        found = _within_if_possible(question, layout, memory, limits) if memory.fits else None
        if found is not None and not limits.why_not(found):
            yield found
            return


def ordered(predictions: Sequence[Prediction], goal: Goal) -> list[Prediction]:
    """Return predictions, the best for a goal first.

    latency: the least time per output token, of layouts in which hardly a request waits for room, or prefill servers
    keep up with the decode servers. One in which they wait is as good where its first tokens come no later than those
    of the best of these. The others come last, as for throughput: of a fixed number of clients each then has its whole
    answer soonest, while the time per token alone would take what lets the fewest in;
    throughput: the most tokens a second; balanced: the most of tokens a second divided by the time per output token.
    Differences of one hundredth from the best are none: then slices go before whole experts, those before copies, and
    fewer GPUs in a server before more. Copies count as `_COPIES` worse than predicted, for latency over several
    machines as `_FAR`. Prefill and decode apart come last: they need a connector between the servers, which nothing
    else does.
    """
    found: list[Prediction] = []
    for apart in (False, True):
        kind = [each for each in predictions if each.layout.disaggregated is apart]
        late = _late(kind) if goal == "latency" else []
        found += _near_ones_alike([each for each in kind if each not in late], goal)
        found += _near_ones_alike(late, "throughput")
    return found


def _near_ones_alike(predictions: Sequence[Prediction], goal: Goal) -> list[Prediction]:
    """Return predictions, the best for a goal first; those that differ by `_EQUAL` at most by how plain they are."""
    best = min((_counted(each, goal) for each in predictions), default=1.0)

    def key(prediction: Prediction) -> tuple[int, bool, bool, int, str]:
        layout = prediction.layout
        steps = math.floor(math.log(_counted(prediction, goal) / best) / _EQUAL)
        return steps, layout.data_parallel_size > 1, layout.expert_parallel, layout.devices_of_server, layout.name

    return sorted(predictions, key=key)


def why_behind(prediction: Prediction, chosen: Prediction, goal: Goal) -> str:
    """Return why a layout that is predicted to be better for a goal than the chosen one is not taken; "": it is not."""
    if _score(prediction, goal) >= _score(chosen, goal):
        return ""
    if prediction.layout.disaggregated and not chosen.layout.disaggregated:
        return "prefill and decode apart come last"
    if goal == "latency" and _waits(prediction) and prediction.ttft_ms > chosen.ttft_ms:
        return f"more requests wait {'for room in the cache' if _waits_for_room(prediction) else 'to be read'}"
    more, near = _more(prediction, goal), _counted(prediction, goal) < _counted(chosen, goal)
    if not more:
        return f"less than {_EQUAL:.0%} counts as none"
    why = "copies over machines were not measured" if more == _FAR else "copies have later first tokens"
    return f"{why}: less than {more + _EQUAL * near:.0%} does not count"


def _late(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return those in which requests wait and first tokens come later than in the best one for latency in which none
    wait, or where they do in all of them, than in the one that answers most.
    """
    at_once = [each for each in predictions if not _waits(each)]
    if at_once:
        latest = min(at_once, key=lambda each: _counted(each, "latency")).ttft_ms
    else:
        latest = max(predictions, key=lambda each: each.tokens_per_s).ttft_ms if predictions else 0.0
    return [each for each in predictions if _waits(each) and each.ttft_ms > latest]


def _waits(prediction: Prediction) -> bool:
    """Return whether more than a few requests wait for room, or to be read."""
    return _waits_for_room(prediction) or prediction.reading_share > 1 + _FEW


def _waits_for_room(prediction: Prediction) -> bool:
    return prediction.waiting / (prediction.waiting + prediction.running) > _FEW


def _counted(prediction: Prediction, goal: Goal) -> float:
    """Return what a goal wants least of, as it counts in the order."""
    return _score(prediction, goal) * (1 + _more(prediction, goal))


def _more(prediction: Prediction, goal: Goal) -> float:
    """Return what a layout must bring more than others to count as good as they do."""
    if prediction.layout.data_parallel_size == 1:
        return 0.0
    return _FAR if goal == "latency" and prediction.over_machines else _COPIES


def _score(prediction: Prediction, goal: Goal) -> float:
    """Return what a goal wants least of."""
    return {
        "latency": prediction.tpot_ms,
        "throughput": 1 / prediction.tokens_per_s,
        "balanced": prediction.tpot_ms / prediction.tokens_per_s,
    }[goal]
