"""What a quality run found is told by later plans that serve the same, and by no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli import judgement
from moe_optimizer.cli.planning import planned
from moe_optimizer.measure.quality.intervals import Estimate
from moe_optimizer.plan.decision import UNJUDGED, Status, Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.request import PlanRequest
from tests.builders import cpu_machine, gpus, made_plan, profile_with, qwen3_30b_a3b, request, tiny_moe
from tests.builders.quality import failure, quality_result


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def aggressive() -> Plan:
    return made_plan(qwen3_30b_a3b(), gpus("h100_sxm"), "aggressive")


def reasons(plan: Plan) -> str:
    return "\n".join(each.reason for each in plan.decisions)


def test_a_plan_that_nobody_judged_says_so(aggressive: Plan) -> None:
    assert UNJUDGED in reasons(aggressive)
    assert judgement.with_judgement(aggressive) == aggressive


def test_the_same_plan_names_the_result_that_judged_it(aggressive: Plan) -> None:
    path = judgement.keep(aggressive, quality_result())
    judged = judgement.with_judgement(aggressive)
    assert UNJUDGED not in reasons(judged)
    assert "kept every threshold" in judged.decision("fp8").reason
    assert str(path) in judged.decision("fp8").evidence
    assert Plan.from_json(judged.to_json(), origin="here") == judged


def test_what_was_not_kept_is_told_too(aggressive: Plan) -> None:
    judgement.keep(aggressive, quality_result(failed=(failure(), failure(where="decode"))))
    assert "did not keep kl_mean" in judgement.with_judgement(aggressive).decision("fp8").reason


def test_a_result_by_other_thresholds_is_told_as_such() -> None:
    judgement.keep(planned(tiny(wishes=BY_FLAG)), quality_result())
    stricter = profile_with("throughput", quality={"kl_mean": 0.001})
    same, other = (judgement.with_judgement(planned(tiny(each, wishes=BY_FLAG))) for each in ("throughput", stricter))
    assert "thresholds" not in same.decision("four_bit").reason
    assert "thresholds" in other.decision("four_bit").reason


def test_another_port_is_the_same_and_other_arguments_are_not(aggressive: Plan) -> None:
    judgement.keep(aggressive, quality_result())
    elsewhere = aggressive.replace(
        serve_args=aggressive.serve_args.without("--port") + ServeArguments("--port", "8123")
    )
    assert UNJUDGED not in reasons(judgement.with_judgement(elsewhere))
    longer = aggressive.replace(serve_args=aggressive.serve_args + ServeArguments("--max-num-seqs", "7"))
    assert UNJUDGED in reasons(judgement.with_judgement(longer))


def test_a_damaged_file_is_passed_over(aggressive: Plan) -> None:
    judgement.keep(aggressive, quality_result()).write_text("{")
    assert UNJUDGED in reasons(judgement.with_judgement(aggressive))


BY_FLAG = {"four_bit": (Wish.ON, "flag --enable-four-bit")}


def tiny(profile: Any = "throughput", **changes: Any) -> PlanRequest:
    return request(tiny_moe(), cpu_machine(), profile, **changes)


def test_four_bits_that_are_left_to_auto_wait_for_a_quality_run_that_allows_them() -> None:
    before = planned(tiny())
    assert before.decision("four_bit").status is Status.OFF
    assert "moe-optimizer quality" in before.decision("four_bit").reason
    judgement.keep(planned(tiny(wishes=BY_FLAG)), quality_result())
    after = planned(tiny())
    assert after.decision("four_bit").status is Status.ON
    assert "quality" in after.decision("four_bit").wish_origin
    assert "kept every threshold" in judgement.with_judgement(after).decision("four_bit").reason


@pytest.mark.parametrize(
    ("judged", "asked", "found"),
    [
        (tiny(wishes=BY_FLAG), tiny(), {"failed": (failure(),)}),
        (tiny("balanced", wishes=BY_FLAG), tiny(), {}),
        (tiny(wishes=BY_FLAG), tiny(profile_with("throughput", quality={"kl_mean": 0.001})), {}),
        (tiny(wishes=BY_FLAG), tiny(batch_size=7), {}),
        (tiny(wishes=BY_FLAG), tiny(wishes={"four_bit": (Wish.OFF, "flag --disable-four-bit")}), {}),
        (tiny("aggressive", wishes=BY_FLAG), tiny("aggressive"), {}),
    ],
    ids=["failed", "by another profile", "by other thresholds", "another plan", "switched off", "off in the profile"],
)
def test_nothing_else_switches_them_on(judged: PlanRequest, asked: PlanRequest, found: dict[str, Any]) -> None:
    judgement.keep(planned(judged), quality_result(**found))
    assert planned(asked).decision("four_bit").status is Status.OFF


@pytest.mark.parametrize(
    "section",
    [{"group": 128}, {"keep_bf16_layers": ["layers.0"]}, {"max_layer_error": 0.01}],
    ids=", ".join,
)
def test_a_judgement_of_other_weights_is_of_another_plan(section: dict[str, Any]) -> None:
    four_bit = {"mode": "on", "format": "int4", "group": 32}
    judgement.keep(planned(tiny(profile_with("throughput", {"four_bit": four_bit}))), quality_result())
    same, other = (
        judgement.with_judgement(planned(tiny(profile_with("throughput", {"four_bit": four_bit | each}))))
        for each in ({}, section)
    )
    assert UNJUDGED not in same.decision("four_bit").reason
    assert UNJUDGED in other.decision("four_bit").reason


def test_a_result_without_numbers_allows_nothing() -> None:
    judgement.keep(planned(tiny(wishes=BY_FLAG)), quality_result(kl_mean=Estimate(None, None, None)))
    assert planned(tiny()).decision("four_bit").status is Status.OFF


@pytest.mark.parametrize(
    "changes",
    [
        {"wishes": {"fp8": (Wish.ON, "flag --enable-fp8")}},
        {"wishes": {"flash_dmoe": (Wish.OFF, "flag --disable-flash-dmoe")}, "strict": True},
    ],
    ids=["fp8 by flag", "strict without the kernel"],
)
def test_a_plan_that_cannot_have_them_is_made_without(changes: dict[str, Any]) -> None:
    assert planned(tiny(**changes)).decision("four_bit").status is Status.OFF
