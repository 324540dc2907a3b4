"""Judges metrics by the thresholds of a profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from moe_optimizer.measure.quality.intervals import Estimate
from moe_optimizer.measure.quality.result import BatchResult, Failure, Metrics, TaskResult

THE_PLAN = "plan"
_LEAST = frozenset({"top1_agreement", "greedy_match_tokens"})
"""Metrics of which a plan must have at least so much; of all others at most."""
_OF_DISTRIBUTIONS = ("kl_mean", "kl_p99", "top1_agreement", "perplexity_ratio", "greedy_match_tokens")
_TIMES_OWN = 2.0
"""Chosen: the divergences of two independent roundings add up."""
_LEAST_POSITIONS = 1000
"""Chosen: below, the share of positions and the 99th percentile hang on a handful of them."""
_NEED_POSITIONS = frozenset({"kl_p99", "top1_agreement", "perplexity_ratio"})

Thresholds = Mapping[str, float | None]


def attainable(thresholds: Thresholds, found: Sequence[BatchResult], reference: str) -> Thresholds:
    """Return thresholds that two right servers can keep.

    A reference that is this far from itself when it batches differs by rounding alone: no plan can be nearer to it than
    twice that.
    """
    own = max((each.kl_mean.value or 0.0 for each in found if each.side == reference), default=0.0)
    stated = {metric: thresholds.get(metric) for metric in ("kl_mean", "batch_kl_mean")}
    return {**thresholds, **{key: max(limit, _TIMES_OWN * own) for key, limit in stated.items() if limit is not None}}


def judge(found: Metrics, where: str, thresholds: Thresholds, *, pass_name: str = THE_PLAN) -> list[Failure]:
    """Return the thresholds that metrics do not keep; something that is no number keeps none."""
    values = {metric: getattr(found, metric) for metric in _OF_DISTRIBUTIONS}
    if found.positions < _LEAST_POSITIONS and not found.not_numbers:
        values = {metric: value for metric, value in values.items() if metric not in _NEED_POSITIONS}
    return list(_failures(values, where, thresholds, pass_name))


def judge_batch(
    found: Sequence[BatchResult], side: str, thresholds: Thresholds, *, pass_name: str = THE_PLAN
) -> list[Failure]:
    """Return whether a side's server continues prompts in a batch too differently from the same prompts alone."""
    limit = thresholds.get("batch_kl_mean")
    values = [each.kl_mean.value for each in found if each.side == side]
    return [
        Failure(pass_name=pass_name, where="batch", metric="batch_kl_mean", value=value, limit=limit)
        for value in values
        if limit is not None and (value is None or value > limit)
    ]


def judge_tasks(found: Sequence[TaskResult], thresholds: Thresholds, *, pass_name: str = THE_PLAN) -> list[Failure]:
    """Return the tasks whose score drops too far: by more than the limit with the whole interval of the difference."""
    limit = thresholds.get("task_drop")
    if limit is None:
        return []
    failed = []
    for each in found:
        value, high = each.difference.value, each.difference.high
        if value is None or high is None or -high > limit:
            drop = None if value is None else -value
            where = f"{each.task} {each.metric}"
            failed.append(Failure(pass_name=pass_name, where=where, metric="task_drop", value=drop, limit=limit))
    return failed


def named(
    failed: Sequence[Failure], alone: Iterable[tuple[str, Sequence[Failure]]], on: Sequence[str]
) -> list[Failure]:
    """Return a plan's failures with the passes that cause them.

    Args:
        failed: of the plan as a whole.
        alone: each pass that was measured alone, with its failures.
        on: the passes that may change an output; where it is one, there is nobody else to blame.
    """
    culprits = [failure for _, failures in alone for failure in failures]
    if failed and not culprits and len(on) == 1:
        return [dataclasses.replace(failure, pass_name=on[0]) for failure in failed]
    explained = {(each.where, each.metric) for each in culprits}
    return [*culprits, *(each for each in failed if (each.where, each.metric) not in explained)]


def _failures(
    values: Mapping[str, Estimate | None], where: str, thresholds: Thresholds, pass_name: str
) -> Iterable[Failure]:
    for metric, found in values.items():
        limit = thresholds.get(metric)
        if found is None or limit is None:
            continue
        value = found.value
        kept = value is not None and (value >= limit if metric in _LEAST else value <= limit)
        if not kept:
            yield Failure(pass_name=pass_name, where=where, metric=metric, value=value, limit=limit)
