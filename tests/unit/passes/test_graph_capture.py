from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.plan.decision import Decision, Status, Wish
from moe_optimizer.plan.pass_params import GraphCaptureParams
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import context, cpu_machine, decided_by, gpus, mixtral_8x7b, profile_with, qwen3_30b_a3b, tiny_moe

ROOT = Path(__file__).resolve().parents[3]
BEFORE = ("parallelism", "dual_batch_overlap", "scheduler")


def decide(batch: int = 64, hardware=None, model=None, prompt: int = 1024, **changes) -> Decision:
    """Decide for a batch; of steps that read prompts nothing is captured unless `changes` have a profile."""
    changes.setdefault("profile", profile_with(passes={"graph_capture": {"prompts": "off"}}))
    model = model or (qwen3_30b_a3b() if hardware is None else tiny_moe())
    ctx = context(model, hardware or gpus("h100_sxm"), **changes)
    ctx = dataclasses.replace(ctx, workload=dataclasses.replace(ctx.workload, batch_size=batch, input_tokens=prompt))
    return decided_by(ctx, *BEFORE, "graph_capture").decided["graph_capture"]


def decide_with_prompts(batch: int = 64, **changes) -> Decision:
    every: dict[str, Any] = {"hardware": gpus("h100_sxm", 1), "model": qwen3_30b_a3b(), "profile": profile_with()}
    return decide(batch, **(every | changes))


def sizes_of(decision: Decision) -> list[int]:
    flag, *sizes = decision.vllm_args.words
    assert flag == "--cudagraph-capture-sizes"
    return [int(size) for size in sizes]


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
    assert " batch of 128; " in decision.reason
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
    eager = profile_with(passes={"graph_capture": {"eager": True, "prompts": "off"}})
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


def drafting(drafts: int) -> dict[str, Any]:
    """Return the user's own drafts, which vLLM carries out."""
    return {"pinned": ServeArguments("--speculative-config", json.dumps({"num_speculative_tokens": drafts}))}


@pytest.mark.parametrize(("drafts", "batch", "captured"), [(1, 128, 512), (2, 128, 498), (3, 128, 512), (4, 100, 500)])
def test_with_drafts_vllms_own_sizes_end_where_rounded_up_to_whole_requests_they_go_no_further(drafts, batch, captured):
    decision = decide(batch, **drafting(drafts))
    assert (decision.vllm_args.words, decision.value) == ((), f"graphs up to {captured}")


@given(st.integers(1, 8), st.integers(1, 512), st.sampled_from([512, 1000, 8192]))
def test_sizes_for_drafts_are_of_whole_requests_and_within_a_step(drafts, batch, tokens):
    own = drafting(drafts)["pinned"] + ServeArguments("--max-num-batched-tokens", str(tokens))
    decision = decide_with_prompts(batch, pinned=own)
    if not decision.vllm_args.words:
        return
    sizes = sizes_of(decision)
    assert all(size % (1 + drafts) == 0 for size in sizes)
    assert decision.params_as(GraphCaptureParams).max_capture_size == sizes[-1] <= tokens
    assert min(batch * (1 + drafts), tokens // (1 + drafts) * (1 + drafts)) <= sizes[-1]


def test_of_the_users_own_sizes_vllm_leaves_out_what_drafts_round_up_beyond_the_largest():
    own = drafting(2)["pinned"] + ServeArguments("--cudagraph-capture-sizes", "1", "2", "64", "3584", "4096")
    assert decide(64, pinned=own).value == "graphs up to 3585"


def test_with_the_scheduler_off_vllm_captures_for_its_own_number_of_requests():
    off = {"scheduler": (Wish.OFF, "flag --disable-scheduler")}
    assert decide(8, wishes=off).params_as(GraphCaptureParams).max_capture_size == 512


def test_the_cpu_build_has_no_graphs():
    decision = decide(hardware=cpu_machine())
    assert (decision.status, decision.vllm_args.words) == (Status.OFF, ())
    assert "need a GPU" in decision.reason


def test_steps_that_read_prompts_get_graphs_while_they_are_shorter_than_their_launches():
    decision = decide_with_prompts(256)
    sizes = sizes_of(decision)
    assert sizes == sorted(set(sizes))
    assert {256, 512, 1024, 2048} <= set(sizes)
    # 8192 tokens take 161 ms of kernels, launched or not.
    assert 2048 < sizes[-1] < 8192
    assert decision.params_as(GraphCaptureParams).max_capture_size == sizes[-1]
    assert all(upper - lower <= max(16, lower / 4) for lower, upper in itertools.pairwise(sizes))


def test_the_gain_of_a_prompt_is_about_what_was_measured():
    without, captured = (
        json.loads((ROOT / f"benchmarks/records/2026-11-26_h100_prompt_step{which}.json").read_text(encoding="utf-8"))
        for which in ("", "_graphs")
    )
    measured = without["prompts"]["1024"]["us"] / captured["prompts"]["1024"]["us"]
    gain = decide_with_prompts(256, prompt=1024).gain
    assert gain is not None
    assert gain.ratio.value == pytest.approx(measured, rel=0.2)
    assert decide_with_prompts(256, prompt=300).gain is None, "such a prompt alone has a graph in stock vLLM"


@given(batch=st.integers(1, 1024), tokens=st.integers(64, 16384))
def test_every_step_up_to_the_largest_graph_is_padded_by_at_most_a_quarter(batch, tokens):
    decision = decide_with_prompts(batch, pinned=ServeArguments("--max-num-batched-tokens", str(tokens)))
    if decision.vllm_args.words:
        sizes = sizes_of(decision)
        assert all(upper - lower <= max(16, lower / 4) for lower, upper in itertools.pairwise(sizes))
        assert min(batch, tokens) <= sizes[-1] <= tokens


def test_a_small_batch_gets_graphs_for_short_prompts_too():
    # vLLM would capture up to twice the requests: 32 tokens.
    assert {64, 128, 512, 1024} <= set(sizes_of(decide_with_prompts(16)))


def test_a_model_whose_layers_take_longer_than_their_launches_gets_fewer():
    qwen, mixtral = (decide_with_prompts(256, model=each) for each in (qwen3_30b_a3b(), mixtral_8x7b()))
    largest = [each.params_as(GraphCaptureParams).max_capture_size for each in (qwen, mixtral)]
    assert largest[1] < largest[0]


def test_parts_of_attention_have_room_in_what_the_server_leaves_alone():
    # Of a token 32 parts of 32 heads, 128 wide, in FP32: 0.5 MB; half of 2 % of 85.5 GB is 0.85 GB.
    profile = profile_with(gpu_memory_utilization=0.98)
    largest = decide_with_prompts(256, profile=profile).params_as(GraphCaptureParams).max_capture_size
    assert 1024 <= largest <= 0.855e9 / (4 * 32 * 32 * 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"pinned": ServeArguments("--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}')},
        {"pinned": ServeArguments("--max-num-batched-tokens", "512")},
        {"profile": profile_with(passes={"graph_capture": {"prompts": "off"}})},
        {"inside_vllm": True},
    ],
    ids=["mode", "short steps", "profile", "a server that runs"],
)
def test_prompts_get_no_graphs_where_none_would_be_used(changes):
    decision = decide_with_prompts(256, **changes)
    assert (decision.status, decision.vllm_args.words) == (Status.ON, ())


EXCHANGED = {"parallelism": {"expert_parallel": "on", "data_parallel_size": 2}}
HIGH_THROUGHPUT = {"dual_batch_overlap": {"mode": "on", "all2all_backend": "deepep_high_throughput"}}


@pytest.mark.parametrize(
    ("passes", "pinned"),
    [(EXCHANGED | HIGH_THROUGHPUT, {}), (EXCHANGED, {"--all2all-backend": "deepep_high_throughput"})],
    ids=["by the overlap", "by the user"],
)
def test_with_deepeps_kernels_for_many_tokens_vllm_captures_nothing_and_the_plan_says_so(passes, pinned):
    profile = profile_with(passes=passes)
    decision = decide(hardware=gpus("h100_sxm", 2), model=qwen3_30b_a3b(), profile=profile, pinned=pinned)
    assert (decision.status, decision.value) == (Status.OFF, "no graphs")
    assert decision.params_as(GraphCaptureParams).cuda_graphs is False
    assert "deepep_high_throughput" in decision.reason


@pytest.mark.parametrize(
    ("passes", "backend"),
    [
        ({"parallelism": {"expert_parallel": "on", "tensor_parallel_size": 2}}, "deepep_high_throughput"),
        (EXCHANGED, "deepep_low_latency"),
    ],
    ids=["one copy", "kernels for few tokens"],
)
def test_with_other_exchanges_it_does(passes, backend):
    profile = profile_with(passes=passes | {"graph_capture": {"prompts": "off"}})
    decision = decide(
        hardware=gpus("h100_sxm", 2), model=qwen3_30b_a3b(), profile=profile, pinned={"--all2all-backend": backend}
    )
    assert decision.params_as(GraphCaptureParams).cuda_graphs is True
