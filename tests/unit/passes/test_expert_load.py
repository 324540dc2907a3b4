from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_optimizer.passes.expert_load import ExpertLoad
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from tests.builders import (
    asking,
    context,
    cpu_machine,
    decided_by,
    dense_model,
    gpt_oss_20b,
    gpus,
    profile_with,
    qwen3_30b_a3b,
    software,
    tiny_moe,
)

ROOT = Path(__file__).parents[3]


def decide(ctx: PlanContext, *, wish: Wish = Wish.AUTO, **changes: object) -> Decision:
    ctx = asking(ctx, wishes={"expert_load": (wish, "flag --test")}, **changes)
    return ExpertLoad().decide(decided_by(ctx, "parallelism"))


@pytest.mark.parametrize(
    "ctx",
    [context(tiny_moe(), cpu_machine()), context(qwen3_30b_a3b(), gpus("h100_sxm", 1))],
    ids=["cpu", "gpu"],
)
def test_it_counts_and_names_the_record_of_its_cost_on_such_a_device(ctx: PlanContext):
    decision = decide(ctx)
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.vllm_args.words == ()
    (path,) = decision.evidence
    record = json.loads((ROOT / path).read_text(encoding="utf-8"))
    assert record["environment"]["device"].startswith("NVIDIA") == (ctx.device == "cuda")
    medians = [result["quantiles"]["50%"]["ratio"] for result in record["results"].values()]
    if ctx.device == "cuda":
        assert max(medians) < record["goal_ratio"]
    else:
        assert all(result["added_work"]["share_compiled"] < 0.01 for result in record["results"].values())


def test_a_model_on_several_machines_is_counted_when_asked_for():
    # Every machine writes the layers that it holds into a folder of its own.
    pipeline = profile_with(passes={"parallelism": {"across_nodes": "pipeline"}})
    ctx = context(qwen3_30b_a3b(), gpus("h200", 8), pipeline, num_gpus=16, num_nodes=2)
    decision = decide(ctx)
    assert (decision.status, decision.evidence) == (Status.OFF, ())
    assert "several machines" in decision.reason
    assert decide(ctx, wish=Wish.ON).status is Status.ON


def test_a_dense_model_has_no_experts_to_count():
    assert "no experts" in decide(context(dense_model(), cpu_machine(gib=64)), wish=Wish.ON).reason


def test_data_parallelism_is_refused():
    ctx = context(qwen3_30b_a3b(), gpus("h100_sxm", 2))
    decision = decide(ctx, wish=Wish.ON, vllm_args=ServeArguments("-dp", "2", "-tp", "1"))
    assert decision.status is Status.REFUSED
    assert "data parallelism (2)" in decision.reason


@pytest.mark.parametrize("flag", ["--enable-dbo", "--enable-return-routed-experts"])
def test_arguments_that_take_its_place_are_named(flag: str):
    ctx = context(tiny_moe(), cpu_machine())
    assert decide(ctx, wish=Wish.ON, vllm_args=ServeArguments(flag)).reason.startswith(flag)
    assert decide(ctx, vllm_args=ServeArguments(f"--no-{flag[2:]}")).status is Status.ON


@pytest.mark.parametrize(
    ("version", "ours", "status"),
    [("0.26.0", Wish.AUTO, Status.OFF), ("0.26.0", Wish.ON, Status.ON), ("0.32.0", Wish.AUTO, Status.ON)],
)
def test_gpt_oss_is_counted_where_something_tells_the_routing(version: str, ours: Wish, status: Status):
    """vLLM's kernels of gpt-oss route tokens themselves; a bench of such a plan ended because the pass did not run."""
    ctx = context(
        gpt_oss_20b(), gpus("h100_sxm", 1), software=software(version=version, cuda_ops=("fused_experts",)),
        wishes={"flash_dmoe": (ours, "flag --test")},
    )  # fmt: skip
    ctx = decided_by(ctx, "parallelism", "fp8", "four_bit", "sparsity_24", "flash_dmoe")
    assert ctx.decided["flash_dmoe"].status is (Status.ON if ours is Wish.ON else Status.OFF)
    decision = ExpertLoad().decide(ctx)
    assert decision.status is status
    assert ("vLLM before 0.28" in decision.reason) == (status is Status.OFF)
