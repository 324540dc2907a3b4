"""What a warm-up leaves to vLLM's graphs is what they hold, with the user's arguments."""

from __future__ import annotations

import pytest

from moe_optimizer.launcher.warm_up_deployment import captured_up_to
from moe_optimizer.plan.pass_params import GraphCaptureParams
from tests.builders import gpus, made_plan, profile_with, qwen3_30b_a3b, tiny_moe


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
    plan = made_plan(tiny_moe(), gpus("h100_sxm"), profile=batches_alone, vllm_args=words)
    assert captured_up_to(plan) == captured


def test_graphs_of_prompts_hold_what_steps_up_to_their_largest_need() -> None:
    plan = made_plan(qwen3_30b_a3b(), gpus("h100_sxm"))
    assert captured_up_to(plan) == plan.decision("graph_capture").params_as(GraphCaptureParams).max_capture_size > 1024
