"""Norms of queries and keys with RoPE: vLLM's flag, only where it is asked for and the kernel fits."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Decision, Status
from tests.builders import context, cpu_machine, decided_by, gpus, mixtral_8x7b, profile_with, qwen3_30b_a3b

WORDS = ("--compilation-config.pass_config.enable_qk_norm_rope_fusion", "true")
ASKED = resolve_wishes(["norm-rope-fusion"], [])
QWEN = qwen3_30b_a3b()


def decide(model=QWEN, hardware=None, passes=None, **changes) -> Decision:
    ctx = context(
        model, hardware or gpus("h100_sxm", 1), profile_with(passes=passes or {}), **({"wishes": ASKED} | changes)
    )
    return decided_by(ctx, "norm_rope_fusion").decided["norm_rope_fusion"]


def test_asked_for_it_is_one_key_of_vllms_configuration():
    decision = decide()
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)
    assert decision.vllm_args.words == WORDS
    assert decision.vllm_args.json_object("--compilation-config") == {
        "pass_config": {"enable_qk_norm_rope_fusion": True}
    }


def test_not_asked_for_it_is_off_until_tune_has_measured_it():
    decision = decide(wishes={})
    assert (decision.status, decision.vllm_args.words) == (Status.OFF, ())
    assert "tune" in decision.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": cpu_machine()}, "GPUs"),
        ({"model": mixtral_8x7b()}, "norms"),
        ({"model": dataclasses.replace(QWEN, attention=dataclasses.replace(QWEN.attention, head_dim=80))}, "80"),
        ({"dtype": "float32"}, "float32"),
        ({"pinned": {"--enforce-eager": ""}}, "compiler"),
        ({"pinned": {"--optimization-level": "0"}}, "compiler"),
        ({"passes": {"graph_capture": {"eager": True}}}, "compiler"),
        ({"pinned": {"--compilation-config": '{"mode": 3}'}}, "--compilation-config"),
    ],
    ids=["CPU", "no norms", "width", "FP32", "eager argument", "level 0", "eager profile", "user's configuration"],
)
def test_where_it_cannot_be_the_reason_is_said(changes, reason):
    decision = decide(**changes)
    assert decision.status is Status.REFUSED
    assert reason in decision.reason
