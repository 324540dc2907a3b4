"""When vLLM's load balancer is certain, every pass must know before it decides."""

from __future__ import annotations

import pytest

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.expert_balancing import load_balancer_runs
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    gpt_oss_120b,
    gpus,
    placement_load,
    profile_with,
    qwen3_30b_a3b,
    tiny_moe,
)

ON = {"expert_placement": (Wish.ON, "flag --enable-expert-placement")}
REPLICAS = {"expert_placement": {"redundant_experts": 8}}


def planned(model=None, hardware=None, *, passes=None, whole=True, **changes):
    parallelism = {"expert_parallel": "on" if whole else "off", "tensor_parallel_size": 2}
    profile = profile_with(passes={"parallelism": parallelism, **(passes or {})})
    ctx = context(model or qwen3_30b_a3b(), hardware or gpus("h200", 2), profile, **changes)
    return decided_by(ctx, "parallelism")


@pytest.mark.parametrize(
    ("ctx", "runs"),
    [
        (planned, False),
        (lambda: planned(wishes=ON), True),
        (lambda: planned(wishes=ON, expert_load=placement_load(qwen3_30b_a3b())), False),
        (lambda: planned(passes=REPLICAS), True),
        (lambda: planned(passes=REPLICAS, wishes={"expert_placement": (Wish.OFF, "flag")}), False),
        (lambda: planned(passes=REPLICAS, whole=False), False),
        (lambda: planned(pinned={"--enable-eplb": ""}), True),
        (lambda: planned(wishes=ON, pinned={"--enable-eplb": "false"}), False),
        (lambda: planned(gpt_oss_120b(), passes=REPLICAS), False),
        (lambda: planned(qwen3_30b_a3b(architecture="OlmoeForCausalLM"), passes=REPLICAS), False),
        (lambda: planned(tiny_moe(), cpu_machine(), passes=REPLICAS), False),
    ],
    ids=[
        "nobody asks", "asked, no load", "asked, with a load", "replicas", "replicas, but off", "replicas, slices",
        "vLLM's flag", "vLLM's flag says no", "experts in mxfp4", "no interface", "cpu",
    ],
)  # fmt: skip
def test_it_runs_where_nothing_else_places_experts(ctx, runs):
    assert load_balancer_runs(ctx()) is runs
