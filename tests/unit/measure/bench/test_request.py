"""What a benchmark measures, and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_optimizer.measure.bench.request import BenchRequest
from moe_optimizer.measure.bench.result import Limits
from moe_optimizer.measure.bench.side import Side
from tests.builders import cpu_machine, gpus, made_plan, qwen3_30b_a3b, tiny_moe

GIB = 2**30


def asked(*plans, tmp_path: Path) -> BenchRequest:
    return BenchRequest(
        command=(), sides=tuple(Side(name=str(number), plan=plan) for number, plan in enumerate(plans)),
        workload_name="", workload=None, repetitions=1, limits=Limits(), folder=tmp_path, tokenizer="",
        trust_remote_code=False, ready_timeout_s=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(("cache_gib", "together"), [(4, True), (40, False)])
def test_servers_on_a_cpu_run_side_by_side_where_what_both_need_fits(cache_gib: int, together: bool, tmp_path: Path):
    plan = made_plan(tiny_moe(), cpu_machine())
    memory = dataclasses.replace(
        plan.memory, total_bytes=64 * GIB, budget_bytes=58 * GIB, kv_cache_bytes=cache_gib * GIB
    )
    plan = plan.replace(memory=memory)
    assert asked(plan, plan, tmp_path=tmp_path).side_by_side is together


@pytest.mark.parametrize(("share", "together"), [(0.9, False), (0.45, True)])
def test_servers_on_a_gpu_run_side_by_side_where_each_is_given_a_part_of_it(
    share: float, together: bool, tmp_path: Path
):
    plan = made_plan(qwen3_30b_a3b(), gpus("h200"), vllm_args=("--gpu-memory-utilization", str(share)))
    assert asked(plan, plan, tmp_path=tmp_path).side_by_side is together
    assert asked(plan, tmp_path=tmp_path).side_by_side
