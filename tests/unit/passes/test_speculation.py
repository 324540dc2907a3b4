"""Drafts: off until they are asked for or predicted to win, with a method that model and files allow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.passes.speculation.step_costs import StepCosts, accepted_on_average
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.pass_params import SpeculationParams
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.specs.draft import DraftSpec
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    dense_model,
    gpus,
    made_plan,
    profile_with,
    qwen3_30b_a3b,
    software,
    tiny_moe,
)

ASKED = resolve_wishes(["speculation"], [])
H100 = gpus("h100_sxm")
BEFORE = ("disaggregation", "replicas", "parallelism", "fp8", "sparsity_24", "flash_dmoe")
EAGLE = DraftSpec(
    name="org/eagle",
    path="/eagle",
    method="eagle3",
    vocab_size=151936,
    num_layers=1,
    weight_bytes=400_000_000,
    kv_bytes_per_token=2048,
)
ASYNC = "--async-scheduling"
RECORDS = Path(__file__).resolve().parents[3] / "benchmarks" / "records"
SMALL = dataclasses.replace(EAGLE, name="org/small", path="/small", method="draft", num_layers=28)
SMALL_OF_TINY = dataclasses.replace(SMALL, vocab_size=tiny_moe().vocab_size)


SHORT = {"input_tokens": 128, "output_tokens": 128}


def before(
    model=None, hardware=H100, section: dict[str, Any] | None = None, *, workload: Any = None, **changes: Any
) -> PlanContext:
    profile = profile_with(passes={"speculation": section or {}}, **({"workload": workload} if workload else {}))
    ctx = context(model or qwen3_30b_a3b(), hardware, profile, **({"wishes": ASKED} | changes))
    return decided_by(ctx, *BEFORE)


def decide(model=None, hardware=H100, section: dict[str, Any] | None = None, **changes: Any) -> Decision:
    return decided_by(before(model, hardware, section, **changes), "speculation").decided["speculation"]


def config(decision: Decision) -> dict[str, Any]:
    return json.loads(decision.vllm_args.values["--speculative-config"])


def test_nobody_asked_so_it_is_off_and_says_from_where_on_it_pays():
    decision = decide(wishes={})
    assert (decision.status, decision.vllm_args.words) == (Status.OFF, ())
    assert "acceptance" in decision.reason
    (said,) = decision.evidence
    assert "1 / 4 / 16 / 64 / 256 requests" in said


def test_asked_for_a_model_without_layers_of_its_own_drafts_from_the_prompt():
    decision = decide()
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)
    assert config(decision)["method"] == "ngram"
    assert decision.no_gain


MTP = {"mtp_layers": 1, "mtp_weight_bytes": 12_000_000_000}


def test_a_models_own_layers_draft_where_the_files_hold_them():
    decision = decide(deepseek_v3(**MTP), gpus("h200", 8))
    assert config(decision) == {"method": "mtp", "num_speculative_tokens": 1}
    assert decision.params_as(SpeculationParams).weight_bytes == 12_000_000_000


def test_layers_of_a_model_that_vllm_does_not_draft_with_are_only_taken_when_asked_for():
    unknown = deepseek_v3(**MTP, model_type="another")
    assert config(decide(unknown, gpus("h200", 8)))["method"] == "ngram"
    assert config(decide(unknown, gpus("h200", 8), {"method": "mtp"}))["method"] == "mtp"


def test_layers_that_the_files_lack_do_not_draft():
    without = deepseek_v3(mtp_layers=1, mtp_weight_bytes=0)
    assert config(decide(without, gpus("h200", 8)))["method"] == "ngram"
    asked = decide(without, gpus("h200", 8), {"method": "mtp"})
    assert (asked.status, "hold none" in asked.reason) == (Status.REFUSED, True)


@pytest.mark.parametrize(("draft", "method"), [(EAGLE, "eagle3"), (SMALL, "draft_model")])
def test_a_named_model_drafts(draft, method):
    named = config(decide(draft=draft))
    assert (named["method"], named["model"]) == (method, draft.path)


@pytest.mark.parametrize(("own", "asked"), [({}, True), ({ASYNC: ""}, False), ({ASYNC: "false"}, False)])
def test_with_a_drafting_model_vllm_is_asked_to_prepare_steps_ahead_unless_the_user_says_what(own, asked):
    assert (ASYNC in decide(draft=SMALL, pinned=own).vllm_args) is asked


def test_where_vllm_refuses_or_does_so_by_itself_it_is_not_asked():
    for decision in (decide(), decide(draft=EAGLE), decide(tiny_moe(), cpu_machine(), draft=SMALL_OF_TINY)):
        assert decision.status is Status.ON
        assert ASYNC not in decision.vllm_args


@pytest.mark.parametrize(
    ("section", "changes", "why"),
    [
        ({"method": "mtp"}, {}, "states no"),
        ({"method": "eagle3"}, {}, "needs a drafting model"),
        ({"method": "eagle3"}, {"draft": SMALL}, "drafts by draft"),
        ({"method": "draft"}, {"draft": dataclasses.replace(SMALL, vocab_size=32000)}, "32000"),
        ({"method": "suffix"}, {"hardware": dataclasses.replace(H100, origin="probed")}, "arctic_inference"),
        ({"method": "mtp", "draft_tokens": 3}, {"model": deepseek_v3(mtp_layers=2, mtp_weight_bytes=1)}, "multiple"),
    ],
)
def test_what_cannot_draft_is_refused_with_the_reason(section, changes, why):
    decision = decide(section=section, **changes)
    assert (decision.status, decision.vllm_args.words) == (Status.REFUSED, ())
    assert why in decision.reason


def test_suffixes_draft_where_their_package_is():
    installed = dataclasses.replace(software("cuda"), arctic_inference=True)
    probed = dataclasses.replace(H100, origin="probed")
    assert config(decide(None, probed, {"method": "suffix"}, software=installed))["method"] == "suffix"


def test_the_users_own_drafts_are_left_to_vllm():
    decision = decide(pinned={"--speculative-config": '{"method": "ngram"}'})
    assert decision.status is Status.REFUSED
    assert decision.vllm_args.words == ()


def test_with_a_known_acceptance_the_drafts_follow_the_number_of_requests():
    decision = decide(section={"acceptance": 0.6}, wishes={})
    params = decision.params_as(SpeculationParams)
    assert decision.status is Status.ON
    assert decision.gain is not None
    assert decision.gain.ratio.value > 1
    assert len(params.by_requests) > 1
    assert [list(each) for each in params.by_requests] == config(decision)["num_speculative_tokens_per_batch_size"]
    # vLLM takes ranges that begin at 1 and follow each other.
    assert params.by_requests[0][0] == 1
    assert all(one[1] + 1 == other[0] for one, other in zip(params.by_requests, params.by_requests[1:], strict=False))
    assert params.draft_tokens == max(drafts for _, _, drafts in params.by_requests)


def test_under_data_parallelism_the_number_of_drafts_is_one_for_all():
    eight = gpus("h200", 8)
    passes = {
        "parallelism": {"tensor_parallel_size": 1, "data_parallel_size": 8, "expert_parallel": "on"},
        "speculation": {"acceptance": 0.6},
    }
    ctx = context(deepseek_v3(**MTP), eight, profile_with(passes=passes), wishes=ASKED)
    decision = decided_by(ctx, *BEFORE, "speculation").decided["speculation"]
    assert decision.params_as(SpeculationParams).by_requests == ()


def test_drafts_that_are_predicted_to_lose_stay_off_unless_they_are_asked_for():
    # At one request a step reads the experts of every draft, and hardly one is accepted.
    profile = profile_with(passes={"speculation": {"acceptance": 0.05}}, workload={"batch_size": 1})
    ctx = context(qwen3_30b_a3b(), H100, profile, wishes={})
    decision = decided_by(ctx, *BEFORE, "speculation").decided["speculation"]
    assert (decision.status, "1.00x" in decision.reason) == (Status.OFF, True)
    asked = decided_by(dataclasses.replace(ctx, request=dataclasses.replace(ctx.request, wishes=ASKED)), *BEFORE)
    asked = decided_by(asked, "speculation").decided["speculation"]
    assert (asked.status, "lose" in asked.warnings[0]) == (Status.ON, True)


def test_on_the_cpu_nothing_is_predicted():
    known = decide(tiny_moe(), cpu_machine(), {"acceptance": 0.9}, wishes={})
    assert (known.status, known.evidence) == (Status.OFF, ())
    assert decide(tiny_moe(), cpu_machine()).status is Status.ON


def test_a_model_without_experts_reads_the_same_weights_for_drafts():
    dense, moe = before(dense_model()), before(qwen3_30b_a3b())

    def two_more(ctx: PlanContext) -> float:
        costs = StepCosts(ctx, "ngram", None)
        return costs.ratio(1, 3) - costs.ratio(1, 1)

    assert 0 < two_more(dense) < 0.1 < two_more(moe)


@pytest.mark.parametrize("drafts", ["1", "3"])
def test_a_step_with_drafts_costs_what_was_measured(drafts: str):
    record = json.loads((RECORDS / "2026-11-25_h100_verify_steps.json").read_text())
    sides = record["runs"]["bf16"]["sides"]
    draft = dataclasses.replace(SMALL, num_layers=1, weight_bytes=80_000_000)
    one_after_another = before(workload=SHORT, pinned={ASYNC: "false"})
    costs = StepCosts(one_after_another, "draft_model", draft)
    for requests, load in sides[drafts]["loads"].items():
        measured = load["step_ms"] / sides["0"]["loads"][requests]["step_ms"]
        assert costs.ratio(int(requests), int(drafts)) == pytest.approx(measured, rel=0.2), requests


@pytest.mark.parametrize(("side", "ahead"), [("drafts-async", ""), ("drafts", "false")])
def test_a_step_that_is_prepared_ahead_costs_what_was_measured(side: str, ahead: str):
    benches = json.loads((RECORDS / "2026-11-26_h200_verify_two_drafts.json").read_text())["benches"]
    sides = next(bench["sides"] for bench in benches if bench["sides"][1]["name"] == side)
    loads = {each["name"]: each["loads"] for each in sides}
    installed = software("cuda", cuda_ops=("fused_experts", "flash_dmoe"))
    wishes = resolve_wishes(["speculation", "four-bit", "fp8"], [])
    ctx = context(
        qwen3_30b_a3b(), gpus("h200"), profile_with(workload=SHORT), wishes=wishes, software=installed,
        pinned={ASYNC: ahead},
    )  # fmt: skip
    draft = dataclasses.replace(SMALL, num_layers=1, weight_bytes=80_000_000)
    costs = StepCosts(decided_by(ctx, *BEFORE[:4], "four_bit", *BEFORE[4:]), "draft_model", draft)
    tokens = 1 + accepted_on_average(0.7, 2)
    for plain, drafted in zip(loads["plain"], loads[side], strict=True):
        measured = tokens * drafted["tpot_ms"]["median"] / plain["tpot_ms"]["median"]
        assert costs.ratio(plain["clients"], 2) == pytest.approx(measured, rel=0.15), plain["clients"]


def test_what_computes_to_draft_makes_a_step_longer():
    # Not ahead, which ngram never is.
    ctx = before(pinned={ASYNC: "false"})
    plain = StepCosts(ctx, "ngram", None).ratio(4, 3)
    assert StepCosts(ctx, "mtp", None).ratio(4, 3) > plain
    head, model = (StepCosts(ctx, draft.method, draft).ratio(4, 3) for draft in (EAGLE, SMALL))
    assert model > head > plain


def test_servers_that_share_a_request_do_not_speculate():
    apart = made_plan(
        qwen3_30b_a3b(), gpus("h200", 2), profile_with(passes={"disaggregation": {"mode": "on"}}), wishes=ASKED
    )
    assert apart.decision("disaggregation").status is Status.ON
    assert "disaggregation" in apart.decision("speculation").reason
    piped = profile_with(passes={"parallelism": {"across_nodes": "pipeline"}})
    stages = made_plan(deepseek_v3(**MTP), gpus("h200", 8), piped, wishes=ASKED, num_nodes=2)
    assert stages.decision("speculation").status is Status.REFUSED
    assert "pipeline" in stages.decision("speculation").reason


@given(requests=st.integers(1, 512), drafts=st.integers(1, 15), acceptance=st.floats(0.01, 0.99))
def test_more_drafts_never_take_less_time_and_the_best_number_never_loses(requests, drafts, acceptance):
    costs = StepCosts(COSTS_CONTEXT, "mtp", None)
    assert costs.ratio(requests, drafts + 1) >= costs.ratio(requests, drafts) >= 1
    best = costs.best(requests, range(1, 9), acceptance)
    assert costs.speed_up(requests, best, acceptance) >= max(1, costs.speed_up(requests, 3, acceptance))


COSTS_CONTEXT = before(qwen3_30b_a3b())


def test_accepted_drafts_follow_from_the_acceptance():
    assert accepted_on_average(0.5, 3) == pytest.approx(0.875)


def test_the_plan_makes_room_for_what_drafts_and_for_its_steps():
    def planned(**section: Any):
        profile = profile_with(passes={"speculation": section})
        return made_plan(deepseek_v3(**MTP), gpus("h200", 8), profile, layout="tp8")

    off, on = planned(), planned(mode="on", draft_tokens=3)
    assert on.memory.weight_bytes - off.memory.weight_bytes == pytest.approx(12e9 / 8, rel=0.01)
    assert on.memory.kv_bytes_per_token == pytest.approx(off.memory.kv_bytes_per_token * 62 / 61)


def test_a_step_has_the_tokens_of_its_requests_and_their_drafts():
    params = SpeculationParams(method="ngram", draft_tokens=4, by_requests=((1, 7, 4), (8, 64, 1)))
    assert [params.step_tokens(requests) for requests in (1, 7, 8, 64)] == [5, 35, 35, 128]
    assert SpeculationParams(method="ngram", draft_tokens=3).step_tokens(10) == 40
