"""Plans whose kernels nobody has measured: what the start will do, and what a server without a measurement does."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.explain import render_plan
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.kernel_speeds import SpeedTables
from tests.builders import cpu_machine, gpus, made_plan, qwen3_30b_a3b, request, software, tiny_moe


def h200(**changes: Any):
    return request(qwen3_30b_a3b(), gpus("h200"), software=software("cuda", cuda_ops=("fused_experts",)), **changes)


def test_what_will_be_measured_is_shown_as_pending():
    plan = make_plan(h200(will_measure=True))
    assert plan.decision("flash_dmoe").status is Status.PENDING
    assert re.search(" pending .*measured", render_plan(plan))
    assert all(decision.pass_name != "flash_dmoe" for decision in plan.plugin_decisions)


def test_a_required_kernel_may_be_pending_but_not_be_left_unmeasured():
    required = frozenset({"flash_dmoe"})
    assert make_plan(h200(required=required, will_measure=True)).decision("flash_dmoe").required
    with pytest.raises(RequiredNotAppliedError, match="not measured"):
        make_plan(h200(required=required))


def test_a_broken_table_is_said_and_vllms_own_kernel_computes():
    broken = dataclasses.replace(software("cpu"), kernel_speeds=SpeedTables(warnings=("mine.json: not JSON",)))
    plan = made_plan(tiny_moe(), cpu_machine(), software=broken)
    assert "mine.json: not JSON" in plan.warnings
    assert plan.decision("flash_dmoe").status is Status.OFF


def test_where_only_ours_can_compute_a_broken_table_changes_nothing():
    broken = dataclasses.replace(software("cpu"), kernel_speeds=SpeedTables(warnings=("mine.json: not JSON",)))
    apart = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    plan = made_plan(tiny_moe(), cpu_machine(), software=broken, vllm_args=apart)
    assert plan.decision("flash_dmoe").status is Status.ON
