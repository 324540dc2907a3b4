"""What a warm-up leaves to vLLM's graphs is what they hold, with the user's arguments."""

from __future__ import annotations

import pytest

from moe_optimizer.launcher.warm_up_deployment import captured_up_to
from moe_optimizer.plan.pass_params import GraphCaptureParams
from moe_optimizer.planner import make_plan
from tests.builders import gpus, profile_with, qwen3_30b_a3b, request, tiny_moe


@pytest.mark.parametrize(
    ("words", "captured"),
    [
        ((), 512),
        (("--max-cudagraph-capture-size", "128"), 128),
        (("-cc.cudagraph_mode=FULL_AND_PIECEWISE",), 512),
        (("-cc.cudagraph_mode=FULL_DECODE_ONLY",), 0),
        (("-cc.cudagraph_mode=NONE",), 0),
        (("--enforce-eager",), 0),
    ],
)
def test_prompts_are_sent_at_every_length_unless_graphs_hold_them(words: tuple[str, ...], captured: int) -> None:
    batches_alone = profile_with(passes={"graph_capture": {"prompts": "off"}})
    plan = make_plan(request(tiny_moe(), gpus("h100_sxm"), profile=batches_alone, vllm_args=words))
    assert captured_up_to(plan) == captured


def test_graphs_of_prompts_hold_what_steps_up_to_their_largest_need() -> None:
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm")))
    assert captured_up_to(plan) == plan.decision("graph_capture").params_as(GraphCaptureParams).max_capture_size > 1024
