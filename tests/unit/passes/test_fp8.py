from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.specs.quantity import Source
from tests.builders import context, decided_by, deepseek_v3, gpt_oss_120b, gpus, profile_with, qwen3_30b_a3b

ON = {"fp8": (Wish.ON, "flag --enable-fp8")}


def decide(model, hardware="h100_sxm", **changes: Any) -> Decision:
    fields: dict[str, Any] = {"wishes": ON, **changes}
    ctx = context(model, gpus(hardware, 8), **fields)
    return decided_by(ctx, "parallelism", "fp8").decided["fp8"]


def test_converting_a_bf16_checkpoint_is_not_available_and_says_what_it_would_bring():
    decision = decide(qwen3_30b_a3b())
    assert decision.status is Status.UNAVAILABLE
    assert "quality gate" in decision.reason
    assert decision.gain is not None
    assert decision.gain.ratio.value == pytest.approx(2.0, rel=0.001)
    assert decision.gain.ratio.source is Source.MODELLED


def test_an_fp8_checkpoint_is_served_as_it_is_and_no_gain_is_claimed():
    decision = decide(deepseek_v3())
    assert decision.status is Status.ON
    assert decision.value == "as in the checkpoint"
    assert decision.gain is None


def test_a_checkpoint_quantised_otherwise_is_refused():
    decision = decide(gpt_oss_120b())
    assert (decision.status, decision.reason) == (Status.REFUSED, "the checkpoint is quantised already: mxfp4, 4 bits")


def test_a_gpu_without_fp8_units_is_refused_with_what_it_has():
    assert decide(qwen3_30b_a3b(), "a100_80gb").reason == "needs FP8 matrix units (sm_89 or later), found sm_80"


def test_a_profile_with_both_parts_off_asks_for_nothing():
    profile = profile_with("aggressive", {"fp8": {"experts": "off", "linears": "off"}})
    decision = decide(qwen3_30b_a3b(), profile=profile, wishes={})
    assert decision.status is Status.OFF
    assert "both off in profile aggressive" in decision.reason


def test_the_gain_shrinks_with_no_batch_but_never_claims_more_than_half_the_bytes():
    for batch in (1, 64, 4096):
        ctx = context(qwen3_30b_a3b(), gpus("h100_sxm"), wishes=ON)
        ctx = dataclasses.replace(ctx, workload=dataclasses.replace(ctx.workload, batch_size=batch))
        gain = decided_by(ctx, "parallelism", "fp8").decided["fp8"].gain
        assert gain is not None
        assert 1.0 < gain.ratio.value <= 2.0
