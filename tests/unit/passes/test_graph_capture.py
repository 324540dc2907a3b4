from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.plan.decision import Decision, Status
from tests.builders import context, cpu_machine, decided_by, gpus, profile_with, qwen3_30b_a3b, tiny_moe


def decide(batch: int = 64, hardware=None, **changes) -> Decision:
    ctx = context(qwen3_30b_a3b() if hardware is None else tiny_moe(), hardware or gpus("h100_sxm"), **changes)
    ctx = dataclasses.replace(ctx, workload=dataclasses.replace(ctx.workload, batch_size=batch))
    return decided_by(ctx, "graph_capture").decided["graph_capture"]


@pytest.mark.parametrize("batch", [1, 64, 512])
def test_vllms_own_sizes_are_left_alone_where_they_cover_the_batch(batch):
    decision = decide(batch)
    assert (decision.status, decision.vllm_args) == (Status.ON, ())


def test_a_batch_beyond_vllms_sizes_gets_a_graph_too():
    assert decide(1000).vllm_args == ("--max-cudagraph-capture-size", "1008")


def test_the_profiles_size_is_taken():
    profile = profile_with(passes={"graph_capture": {"max_capture_size": 32}})
    assert decide(profile=profile).vllm_args == ("--max-cudagraph-capture-size", "32")


@pytest.mark.parametrize("hardware", [None, cpu_machine()], ids=["gpu", "cpu"])
def test_eager_is_a_setting_and_counts_no_graphs_in_memory(hardware):
    profile = profile_with(passes={"graph_capture": {"eager": True}})
    decision = decide(hardware=hardware, profile=profile)
    assert decision.vllm_args == ("--enforce-eager",)
    assert decision.params == {"cuda_graphs": False}


def test_the_users_own_eager_counts_no_graphs_in_memory():
    decision = decide(pinned={"--enforce-eager": ""})
    assert decision.status is Status.OFF
    assert decision.params == {"cuda_graphs": False}


def test_the_cpu_build_has_no_graphs():
    decision = decide(hardware=cpu_machine())
    assert (decision.status, decision.vllm_args) == (Status.OFF, ())
    assert "need a GPU" in decision.reason
