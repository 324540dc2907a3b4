"""What a quality run found is told by later plans that serve the same, and by no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.cli import judgement
from moe_optimizer.plan.decision import UNJUDGED
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.planner import make_plan
from tests.builders import gpus, qwen3_30b_a3b, request
from tests.builders.quality import failure, quality_result


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def aggressive() -> Plan:
    return make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm"), "aggressive"))


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
