"""Both sides decode the same batches over the same contexts."""

from __future__ import annotations

from typing import Any

import pytest

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.measure.decode_step import comparison
from moe_optimizer.measure.decode_step.comparison import compare_steps, profiled_sides, render
from moe_optimizer.measure.decode_step.profiled_steps import KernelTime, ProfiledSteps, StepProfile
from moe_optimizer.planner import make_plan
from tests.builders import gpus, qwen3_30b_a3b
from tests.builders import request as planned

KERNELS = (KernelTime(name="fused_moe_kernel", calls=96.0, us=2200.0),)


def test_the_plan_is_asked_for_what_stock_vllm_could_and_both_show_what_both_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def profile_steps(_plan: Any, side: str, **request: Any) -> ProfiledSteps:
        asked.append({name: request[name] for name in ("batches", "contexts", "shorter")})
        done = ((1, 512), (64, 512), (256, 256)) if side == "stock" else ((1, 512), (256, 256))
        request["on_step"](0.5, "64 sequences")
        return ProfiledSteps(
            device="H100", vllm="0.26.0", torch="2.11.0",
            profiles=tuple(StepProfile(batch=b, context=c, step_us=1.0, kernels=KERNELS) for b, c in done),
            remarks=("256 sequences have 256 tokens each",) if side == "stock" else ("left out: 64 sequences",),
        )  # fmt: skip

    monkeypatch.setattr(comparison, "profile_steps", profile_steps)
    told: list[tuple[float, str]] = []
    plan = make_plan(planned(qwen3_30b_a3b(), gpus("h100_sxm", 1)))
    found = compare_steps(
        plan, batches=(1, 64, 256, 512), context=512, steps=2, timeout_s=1.0,
        on_step=lambda share, text: told.append((share, text)),
    )  # fmt: skip
    assert asked == [
        {"batches": (1, 64, 256, 512), "contexts": (512,) * 4, "shorter": True},
        {"batches": (1, 64, 256), "contexts": (512, 512, 256), "shorter": False},
    ]
    for side in (found.stock, found.ours):
        assert [(each.batch, each.context) for each in side.profiles] == [(1, 512), (256, 256)]
        assert [each.batch for each in side.ledgers] == [1, 256]
    assert found.remarks == ("stock vLLM: 256 sequences have 256 tokens each", "the plan: left out: 64 sequences")
    assert render(found).endswith("\n\n".join(found.remarks))
    assert told[1] == (0.25, "stock vLLM: 64 sequences")
    assert told[3] == (0.75, "the plan: 64 sequences")


def test_a_side_is_handed_over_before_the_next_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile_steps(_plan: Any, side: str, **_request: Any) -> ProfiledSteps:
        if side == "ours":
            raise ServerFailedError("it took too long")
        return ProfiledSteps(device="H100", vllm="0.26.0", torch="2.11.0", profiles=(), remarks=())

    monkeypatch.setattr(comparison, "profile_steps", profile_steps)
    plan = make_plan(planned(qwen3_30b_a3b(), gpus("h100_sxm", 1)))
    sides = profiled_sides(
        plan,
        comparison.SIDES,
        batches=(1,),
        contexts=(512,),
        steps=2,
        timeout_s=1.0,
        on_step=lambda _share, _text: None,
    )
    assert next(sides)[0] == "stock"
    with pytest.raises(ServerFailedError):
        next(sides)
