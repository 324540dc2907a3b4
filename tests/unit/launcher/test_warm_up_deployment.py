"""What a warm-up leaves to vLLM's graphs is what they hold, with the user's arguments."""

from __future__ import annotations

import pytest

from moe_optimizer.launcher.warm_up_deployment import captured_up_to
from moe_optimizer.planner import make_plan
from tests.builders import gpus, request, tiny_moe


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
    plan = make_plan(request(tiny_moe(), gpus("h100_sxm"), vllm_args=words))
    assert captured_up_to(plan) == captured
