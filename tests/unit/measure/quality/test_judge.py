"""Which threshold is not kept, and which pass is named for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_optimizer.measure.quality.intervals import Estimate
from moe_optimizer.measure.quality.judge import THE_PLAN, attainable, judge, judge_batch, judge_tasks, named
from moe_optimizer.measure.quality.result import BatchResult, Failure, Metrics
from tests.builders.quality import task_result

LIMITS = {"kl_mean": 0.01, "kl_p99": 0.1, "top1_agreement": 0.98, "perplexity_ratio": 1.01, "batch_kl_mean": None}


def at(value: float | None) -> Estimate:
    return Estimate(value, value, value)


GOOD = Metrics(
    positions=5000, not_numbers=0, kl_mean=at(0.001), kl_p99=at(0.01), top1_agreement=at(0.99),
    perplexity_ratio=at(1.0), greedy_match_tokens=at(3.0), generated=32,
)  # fmt: skip


def test_what_keeps_every_threshold_has_no_failure() -> None:
    assert judge(GOOD, "all", LIMITS) == []


@pytest.mark.parametrize(
    ("metric", "value"), [("kl_mean", 0.02), ("kl_p99", 0.2), ("top1_agreement", 0.97), ("perplexity_ratio", 1.02)]
)
def test_each_metric_has_a_threshold_of_its_own(metric: str, value: float) -> None:
    worse: dict[str, Any] = {metric: at(value)}
    (failure,) = judge(replace(GOOD, **worse), "all", LIMITS)
    assert (failure.metric, failure.value, failure.limit) == (metric, value, LIMITS[metric])


def test_without_a_threshold_nothing_is_judged() -> None:
    assert judge(replace(GOOD, greedy_match_tokens=at(0.0)), "all", LIMITS) == []
    assert judge(replace(GOOD, greedy_match_tokens=at(0.0)), "all", {"greedy_match_tokens": 1})


def test_no_number_keeps_no_threshold_however_few_positions_there_are() -> None:
    nothing = replace(GOOD, positions=4, not_numbers=1, kl_mean=at(None), kl_p99=at(None), perplexity_ratio=at(None))
    assert {each.metric for each in judge(nothing, "decode, 8 at once", LIMITS)} >= {"kl_mean", "kl_p99"}


def test_of_few_positions_only_the_mean_is_judged() -> None:
    few = replace(GOOD, positions=64, kl_p99=at(0.2), top1_agreement=at(0.9), perplexity_ratio=at(1.1))
    assert judge(few, "decode, 8 at once", LIMITS) == []
    assert judge(replace(few, kl_mean=at(0.02)), "decode, 8 at once", LIMITS)


def test_the_batch_is_judged_only_where_it_is_asked_for_and_only_the_plans() -> None:
    found = [
        BatchResult(side=side, tokens=64, kl_mean=at(value), greedy_match_tokens=at(1), generated=32)
        for side, value in (("stock", 0.5), ("balanced", 0.2))
    ]
    assert judge_batch(found, "balanced", LIMITS) == []
    (failure,) = judge_batch(found, "balanced", LIMITS | {"batch_kl_mean": 0.1})
    assert failure.value == 0.2


def test_what_stock_vllm_itself_changes_in_a_batch_is_allowed_twice() -> None:
    own = BatchResult(side="stock", tokens=64, kl_mean=at(0.2), greedy_match_tokens=at(1), generated=32)
    limits = attainable({"kl_mean": 0.01, "batch_kl_mean": 0.01}, [own], "stock")
    assert limits == {"kl_mean": 0.4, "batch_kl_mean": 0.4}
    assert attainable({"kl_mean": None, "batch_kl_mean": None}, [own], "stock") == {
        "kl_mean": None, "batch_kl_mean": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("difference", "fails"),
    [
        (Estimate(-0.05, -0.08, -0.02), True),
        (Estimate(-0.05, -0.11, 0.01), False),  # may be chance
        (Estimate(-0.008, -0.009, -0.007), False),  # is allowed
        (Estimate(0.05, 0.02, 0.08), False),  # is a gain
        (Estimate(None, None, None), True),
    ],
)
def test_a_task_fails_where_its_whole_interval_is_beyond_the_threshold(difference: Estimate, fails: bool) -> None:
    found = judge_tasks([task_result(difference=difference)], {"task_drop": 0.01}, pass_name="fp8")
    assert [(each.pass_name, each.where, each.metric, each.limit) for each in found] == [
        ("fp8", "mmlu acc", "task_drop", 0.01)
    ] * fails
    assert judge_tasks([task_result(difference=difference)], {"task_drop": None}) == []


def failure(pass_name: str, where: str = "all") -> Failure:
    return Failure(pass_name=pass_name, where=where, metric="kl_mean", value=1.0, limit=0.1)


def test_the_pass_that_fails_alone_is_named() -> None:
    found = named([failure(THE_PLAN)], [("fp8", [failure("fp8")]), ("flash_dmoe", [])], ("fp8", "flash_dmoe"))
    assert [each.pass_name for each in found] == ["fp8"]


def test_the_only_pass_is_named_without_a_further_measurement() -> None:
    assert [each.pass_name for each in named([failure(THE_PLAN)], [], ("kv_cache",))] == ["kv_cache"]


def test_where_no_pass_fails_alone_the_plan_does() -> None:
    found = named([failure(THE_PLAN)], [("fp8", []), ("kv_cache", [])], ("fp8", "kv_cache"))
    assert [each.pass_name for each in found] == [THE_PLAN]


def test_a_failure_that_no_culprit_shows_stays() -> None:
    found = named(
        [failure(THE_PLAN), failure(THE_PLAN, "decode, 64 at once")], [("fp8", [failure("fp8")])], ("fp8", "x")
    )
    assert [(each.pass_name, each.where) for each in found] == [("fp8", "all"), (THE_PLAN, "decode, 64 at once")]
