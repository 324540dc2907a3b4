from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan.pass_params import GraphCaptureParams
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import context, cpu_machine, decided_by, gpus, profile_with, qwen3_30b_a3b, tiny_moe

BEFORE = ("parallelism", "dual_batch_overlap", "scheduler")


def decide(batch: int = 64, hardware=None, **changes) -> Decision:
    ctx = context(qwen3_30b_a3b() if hardware is None else tiny_moe(), hardware or gpus("h100_sxm"), **changes)
    ctx = dataclasses.replace(ctx, workload=dataclasses.replace(ctx.workload, batch_size=batch))
    return decided_by(ctx, *BEFORE, "graph_capture").decided["graph_capture"]


@pytest.mark.parametrize("batch", [1, 64, 512])
def test_vllms_own_sizes_are_left_alone_where_they_cover_the_batch(batch):
    decision = decide(batch)
    assert (decision.status, decision.vllm_args.words) == (Status.ON, ())


def test_a_batch_beyond_vllms_sizes_gets_a_graph_too():
    flag, *sizes = decide(1000).vllm_args.words
    assert flag == "--cudagraph-capture-sizes"
    assert sizes[:5] == ["1", "2", "4", "8", "16"]
    assert sizes[-1] == "1008"
    assert decide(1000).value == "graphs up to 1008"


@pytest.mark.parametrize("batch", [513, 700, 1000, 1024])
def test_of_vllms_sizes_some_are_captured_and_none_pads_a_batch_by_more_than_a_hundredth_of_a_step(batch):
    decision = decide(batch)
    sizes = [int(word) for word in decision.vllm_args.words[1:]]
    assert all(upper - lower <= max(8, upper / 8) for lower, upper in itertools.pairwise(sizes))
    ((rejected, cost),) = decision.rejected.items()
    # vLLM told the largest alone: 1, 2, 4, each 8th below 256, each 16th from there on.
    vllms = 3 + 31 + (sizes[-1] - 256) // 16 + 1
    assert str(vllms) in rejected
    assert len(sizes) < 0.9 * vllms
    assert f"{len(sizes)} sizes" in decision.reason
    assert "capturing" in cost
    (padding,) = re.findall(r"at most (\d\.\d)% of a step", decision.reason)
    assert 0.5 < float(padding) <= 1.0


def test_fewer_sizes_than_vllms_own_are_weighed_by_their_padding():
    # At 129 requests 8 tokens more: 8 * 21.2 us of a step of 23,570 + 129 * 21.2 us.
    ((rejected, cost),) = decide(512).rejected.items()
    assert rejected == "43 of its 51 sizes"
    assert "up to 0.6% of a step" in cost
    assert decide(64).rejected == {}, "there vLLM captures no more"


def test_requests_that_a_step_has_no_tokens_for_need_no_graph():
    decision = decide(512, pinned={"--max-num-batched-tokens": "128"})
    assert decision.value == "graphs up to 128"
    assert decision.reason.endswith(" batch of 128")
    assert decision.warnings == ()


def test_the_profiles_size_is_taken():
    profile = profile_with(passes={"graph_capture": {"max_capture_size": 32}})
    assert decide(profile=profile).vllm_args.words == ("--max-cudagraph-capture-size", "32")


@pytest.mark.parametrize("hardware", [None, cpu_machine()], ids=["gpu", "cpu"])
def test_eager_is_a_setting_and_counts_no_graphs_in_memory(hardware):
    profile = profile_with(passes={"graph_capture": {"eager": True}})
    decision = decide(hardware=hardware, profile=profile)
    assert decision.vllm_args.words == ("--enforce-eager",)
    assert decision.params == GraphCaptureParams(cuda_graphs=False, max_capture_size=0)


@pytest.mark.parametrize("origin", ["flag --enable-graph-capture", "flag --require graph-capture"])
def test_graphs_asked_for_by_flag_go_before_a_profile_that_is_eager(origin):
    eager = profile_with(passes={"graph_capture": {"eager": True}})
    wishes = {"graph_capture": (Wish.ON, origin)}
    decision = decide(64, profile=eager, wishes=wishes)
    assert (decision.vllm_args.words, decision.value) == ((), "graphs up to 128")
    assert decide(hardware=cpu_machine(), profile=eager, wishes=wishes).status is Status.REFUSED


@pytest.mark.parametrize(
    "words",
    [
        ("--enforce-eager",),
        ("-O0",),
        ("--max-cudagraph-capture-size", "0"),
        ("-cc.cudagraph_mode=NONE",),
        ("--compilation-config", '{"cudagraph_mode": "none"}'),
    ],
)
def test_the_users_own_arguments_against_graphs_count_none_in_memory(words):
    decision = decide(pinned=ServeArguments(*words))
    assert (decision.status, decision.value) == (Status.OFF, "no graphs")
    assert decision.reason.endswith("is given after --")
    assert decision.params_as(GraphCaptureParams).cuda_graphs is False


@pytest.mark.parametrize(
    "words",
    [
        ("--max-cudagraph-capture-size", "64"),
        ("--cudagraph-capture-sizes", "1", "64"),
        ("--compilation-config", '{"cudagraph_capture_sizes": [64, 8]}'),
    ],
)
def test_the_users_own_sizes_are_what_is_captured_and_a_larger_batch_is_said(words):
    # vLLM does not start with a largest size beside sizes that end elsewhere.
    decision = decide(600, pinned=ServeArguments(*words))
    assert (decision.status, decision.vllm_args.words, decision.value) == (Status.ON, (), "graphs up to 64")
    assert re.search(" batch of 600.* 64", decision.warnings[0])
    assert decide(64, pinned=ServeArguments(*words)).warnings == ()


@pytest.mark.parametrize(("size", "captured"), [(1, 1), (3, 2), (7, 4), (100, 96), (255, 248), (256, 256), (300, 288)])
def test_what_is_captured_of_a_size_is_what_vllm_makes_of_it(size, captured):
    profile = profile_with(passes={"graph_capture": {"max_capture_size": size}})
    assert decide(1, profile=profile).params_as(GraphCaptureParams).max_capture_size == captured


def test_nothing_is_captured_beyond_the_tokens_of_a_step():
    decision = decide(64, pinned=ServeArguments("--max-num-batched-tokens", "100"))
    assert decision.params_as(GraphCaptureParams).max_capture_size == 100


def test_with_the_scheduler_off_vllm_captures_for_its_own_number_of_requests():
    off = {"scheduler": (Wish.OFF, "flag --disable-scheduler")}
    assert decide(8, wishes=off).params_as(GraphCaptureParams).max_capture_size == 512


def test_the_cpu_build_has_no_graphs():
    decision = decide(hardware=cpu_machine())
    assert (decision.status, decision.vllm_args.words) == (Status.OFF, ())
    assert "need a GPU" in decision.reason
