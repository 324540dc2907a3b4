from __future__ import annotations

import dataclasses
import re

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Decision, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams, SchedulerParams
from moe_optimizer.specs.kernel_speeds import TokenRange
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    gpus,
    mixtral_8x7b,
    profile_with,
    qwen3_30b_a3b,
    shaped_model,
    tiny_moe,
)

BEFORE = ("parallelism", "dual_batch_overlap", "scheduler")


def decide(model=None, hardware=None, batch: int | None = None, **changes) -> Decision:
    ctx = context(model or qwen3_30b_a3b(), hardware or gpus("h100_sxm"), **changes)
    if batch is not None:
        ctx = dataclasses.replace(ctx, workload=dataclasses.replace(ctx.workload, batch_size=batch))
    return decided_by(ctx, *BEFORE).decided["scheduler"]


def value(decision: Decision, flag: str) -> int:
    return int(decision.vllm_args.values[flag])


@pytest.mark.parametrize("batch", [1, 32, 1024])
def test_max_num_seqs_is_the_batch_size(batch):
    assert value(decide(batch=batch), "--max-num-seqs") == batch


def test_every_running_request_has_a_token_of_a_step():
    decision = decide(tiny_moe(), cpu_machine(), batch=5000)
    assert value(decision, "--max-num-batched-tokens") >= 5000


@pytest.mark.parametrize(
    ("performance", "tokens"), [("balanced", 8192), ("throughput", 16384), ("interactivity", 4096)]
)
def test_tokens_follow_vllms_default_for_the_gpu_and_the_mode(performance, tokens):
    decision = decide(hardware=gpus("h100_sxm", 8), profile=profile_with(performance=performance))
    assert value(decision, "--max-num-batched-tokens") == tokens
    assert ("--performance-mode" in decision.vllm_args) == (performance != "balanced")


@pytest.mark.parametrize(
    ("ours_up_to", "copies", "tokens"), [(8192, 1, 8192), (64, 1, 16384), (32768, 1, 16384), (8192, 8, 16384)]
)
def test_a_step_is_no_larger_than_the_kernels_reach_that_were_measured_faster(ours_up_to, copies, tokens):
    # With the tables of a release that end at 8192, vLLM's kernels computed steps above it, and slower.
    wide = {"tensor_parallel_size": 8 // copies, "data_parallel_size": copies}
    profile = profile_with(performance="throughput", passes={"parallelism": wide})
    ctx = decided_by(context(qwen3_30b_a3b(), gpus("h200", 8), profile=profile), "parallelism", "flash_dmoe")
    dispatch = {"bf16": (TokenRange(up_to=ours_up_to, use="grouped"),)}
    ours = dataclasses.replace(
        ctx.decided["flash_dmoe"], params=FlashDmoeParams(kernel="cuda", dispatch=dispatch)
    )  # fmt: skip
    decision = decided_by(ctx.with_decision(ours), "dual_batch_overlap", "scheduler").decided["scheduler"]
    assert value(decision, "--max-num-batched-tokens") == tokens
    assert list(decision.rejected) == ([] if tokens == 16384 else ["16384 tokens"])


@pytest.mark.parametrize(("name", "tokens"), [("l4", 2048), ("a100_80gb", 2048), ("b200", 16384)])
def test_other_gpus_have_other_defaults(name, tokens):
    assert value(decide(tiny_moe(), gpus(name)), "--max-num-batched-tokens") == tokens


def test_tokens_shrink_where_they_would_eat_the_cache():
    # 61 GB of weights on 80 GB, and activations of 1 MB a token: a step of 16384 tokens would take a quarter.
    wide = shaped_model(top_k=64, width=768)
    decision = decide(wide, profile=profile_with("aggressive"), batch=64)
    assert value(decision, "--max-num-batched-tokens") < 16384
    assert "of the cache" in decision.rejected["16384 tokens"]


def test_copies_that_share_the_experts_leave_a_cache_to_size_the_step_by():
    # By itself each of the 8 GPUs would need 673 GB; of the experts it holds an eighth.
    shared = profile_with(passes={"parallelism": {"tensor_parallel_size": 1, "data_parallel_size": 8}})
    decision = decide(deepseek_v3(), gpus("h200", 8), profile=shared)
    assert value(decision, "--max-num-batched-tokens") == 8192
    assert decision.rejected == {}


def test_a_model_that_does_not_fit_still_gets_the_smallest_step():
    assert value(decide(mixtral_8x7b()), "--max-num-batched-tokens") == 1024


def test_the_users_own_values_are_what_memory_is_planned_with():
    decision = decide(pinned={"--max-num-seqs": "7", "--max-num-batched-tokens": "2K"})
    assert decision.params == SchedulerParams(max_num_seqs=7, max_num_batched_tokens=2048)


def test_fewer_tokens_than_requests_are_so_many_requests_and_said():
    # vLLM does not start with more requests than tokens of a step.
    decision = decide(batch=64, pinned={"--max-num-batched-tokens": "16"})
    assert decision.params == SchedulerParams(max_num_seqs=16, max_num_batched_tokens=16)
    assert re.match("16 requests.* 64", decision.warnings[0])


def test_fewer_tokens_than_requests_by_the_user_are_a_contradiction():
    with pytest.raises(InputError, match="--max-num-batched-tokens 4 and --max-num-seqs 8 "):
        decide(pinned={"--max-num-seqs": "8", "--max-num-batched-tokens": "4"})


def test_a_prompt_that_may_not_be_read_in_parts_fits_into_a_step():
    whole = {"--enable-chunked-prefill": "false"}
    assert decide(hardware=gpus("h200", 8), pinned=whole).params_as(SchedulerParams).max_num_batched_tokens == 40960
    off = {"scheduler": (Wish.OFF, "flag --disable-scheduler")}
    assert (
        decide(hardware=gpus("h200", 8), pinned=whole, wishes=off).params_as(SchedulerParams).max_num_batched_tokens
        == 40960
    )


def test_the_users_own_mode_goes_before_the_profiles():
    decision = decide(hardware=gpus("h100_sxm", 8), pinned={"--performance-mode": "throughput"})
    assert value(decision, "--max-num-batched-tokens") == 16384
    assert "performance mode throughput" in decision.reason
    off = {"scheduler": (Wish.OFF, "flag --disable-scheduler")}
    decision = decide(hardware=gpus("h100_sxm", 8), pinned={"--performance-mode": "throughput"}, wishes=off)
    assert decision.params == SchedulerParams(max_num_seqs=2048, max_num_batched_tokens=16384)


def test_the_profiles_tokens_are_taken_but_never_fewer_than_requests():
    profile = profile_with(passes={"scheduler": {"max_num_batched_tokens": 16}})
    assert value(decide(profile=profile, batch=64), "--max-num-batched-tokens") == 64


def test_the_floor_of_a_decode_step_is_evidence_with_its_source():
    (evidence,) = decide(batch=64).evidence
    # 64 tokens hit 125.9 of 128 experts: 57 GB of experts, 3 GB of the rest, 9.7 GB of cache at 3.35 TB/s.
    assert re.search(r" 64 .* 1536 .* 20\.\d ms.*\(modelled: ", evidence)
    (on_eight,) = decide(hardware=gpus("h100_sxm", 8), batch=64).evidence
    assert "96 all-reduces" in on_eight


def test_the_floor_is_that_of_the_weights_cache_and_requests_of_the_plan():
    ctx = context(mixtral_8x7b(), gpus("h100_sxm"), profile_with("aggressive"))
    (evidence,) = decided_by(ctx, "parallelism", "fp8", "dual_batch_overlap", "scheduler").decided["scheduler"].evidence
    found = re.search(r" (\d+) requests at 1536 .* ([\d.]+) ms", evidence)
    assert found is not None
    # The cache holds so many of the 1024. Weights in FP8 and a full cache are the 77 GB at hand, read at 3.35 TB/s.
    assert 280 < int(found[1]) < 310
    assert float(found[2]) == pytest.approx(77 / 3.35, rel=0.03)


def test_the_floor_of_copies_is_that_of_the_experts_they_share():
    shared = profile_with(passes={"parallelism": {"tensor_parallel_size": 1, "data_parallel_size": 8}})
    (evidence,) = decide(deepseek_v3(), gpus("h200", 8), profile=shared, batch=8).evidence
    # An eighth of 654 GB of experts, 63 of 64 tokens' worth of them hit, 16 GB of the rest, at 4.8 TB/s.
    assert re.search(r" 8 .* 1536 .* 8 copies.* 1\d\.\d ms", evidence)


def test_several_machines_have_no_floor_of_one_step():
    pipeline = profile_with(passes={"parallelism": {"across_nodes": "pipeline"}})
    assert decide(hardware=gpus("h100_sxm", 8), profile=pipeline, num_nodes=2).evidence == ()


def test_a_gpu_of_unknown_speed_has_no_floor_but_a_plan():
    hardware = gpus("h100_sxm")
    assert hardware.gpu is not None
    unknown = dataclasses.replace(hardware.gpu.memory_bandwidth, value=0.0)
    hardware = dataclasses.replace(hardware, gpu=dataclasses.replace(hardware.gpu, memory_bandwidth=unknown))
    assert decide(hardware=hardware).evidence[0].startswith("no floor ")


def test_off_leaves_vllms_defaults_and_plans_memory_for_them():
    off = {"scheduler": (Wish.OFF, "flag --disable-scheduler")}
    assert decide(wishes=off).params == SchedulerParams(max_num_seqs=1024, max_num_batched_tokens=8192)
    on_cpu = decide(tiny_moe(), cpu_machine(), wishes=off)
    assert on_cpu.params == SchedulerParams(max_num_seqs=128, max_num_batched_tokens=2048)


EXCHANGED = {"parallelism": {"data_parallel_size": 2, "expert_parallel": "on"}}


@pytest.mark.parametrize(
    ("passes", "pinned", "tokens"),
    [
        ({"dual_batch_overlap": {"mode": "on"}}, {}, 256),
        ({"dual_batch_overlap": {"mode": "on", "all2all_backend": "deepep_high_throughput"}}, {}, 8192),
        ({"dual_batch_overlap": {"mode": "auto"}}, {}, 8192),
        ({}, {"--all2all-backend": "deepep_low_latency"}, 256),
        ({"parallelism": {"expert_parallel": "on"}}, {"--all2all-backend": "deepep_low_latency"}, 8192),
    ],
)
def test_low_latency_exchange_gets_the_few_tokens_that_its_buffers_hold(passes, pinned, tokens):
    decision = decide(hardware=gpus("h100_sxm", 8), profile=profile_with(passes=EXCHANGED | passes), pinned=pinned)
    assert value(decision, "--max-num-batched-tokens") == tokens


def test_an_overlap_that_is_refused_leaves_the_tokens_alone():
    # On this machine DeepEP is not installed, so that vLLM exchanges through other kernels.
    probed = dataclasses.replace(gpus("h100_sxm", 8), origin="probed")
    profile = profile_with(passes=EXCHANGED | {"dual_batch_overlap": {"mode": "on"}})
    assert value(decide(hardware=probed, profile=profile), "--max-num-batched-tokens") == 8192


def test_low_latency_exchange_still_gives_every_request_its_token():
    profile = profile_with(passes=EXCHANGED | {"dual_batch_overlap": {"mode": "on"}})
    assert value(decide(hardware=gpus("h100_sxm", 8), profile=profile, batch=700), "--max-num-batched-tokens") == 700
