"""Two half batches: only with data and expert parallel over DeepEP, and only where it is asked for."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Decision, Status
from moe_optimizer.plan.pass_params import DualBatchOverlapParams
from tests.builders import context, cpu_machine, decided_by, dense_model, gpus, profile_with, qwen3_30b_a3b, software
from tests.builders import tiny_moe as tiny

EIGHT = gpus("h100_sxm", 8)
DP_EP = {"parallelism": {"expert_parallel": "on", "data_parallel_size": 2}}
ASKED = resolve_wishes(["dual-batch-overlap"], [])


def decide(model=None, hardware=EIGHT, passes=None, **changes) -> Decision:
    profile = profile_with(passes=DP_EP if passes is None else passes)
    ctx = context(model or qwen3_30b_a3b(), hardware, profile, **({"wishes": ASKED} | changes))
    return decided_by(ctx, "parallelism", "dual_batch_overlap").decided["dual_batch_overlap"]


def test_asked_for_with_data_and_expert_parallel_it_is_on():
    decision = decide()
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)
    assert decision.vllm_args.words == ("--enable-dbo", "--all2all-backend", "deepep_low_latency")
    assert "with this version" in decision.warnings[0]


def test_the_profile_names_the_kernels():
    passes = DP_EP | {"dual_batch_overlap": {"all2all_backend": "deepep_high_throughput"}}
    assert decide(passes=passes).params_as(DualBatchOverlapParams).all2all_backend == "deepep_high_throughput"


def test_without_asking_it_stays_off():
    decision = decide(wishes={}, passes=DP_EP | {"dual_batch_overlap": {"mode": "auto"}})
    assert (decision.status, decision.vllm_args.words) == (Status.OFF, ())


def test_the_users_own_flag_is_left_where_it_is_and_said():
    decision = decide(wishes={}, pinned={"--enable-dbo": ""})
    assert (decision.status, decision.vllm_args.words) == (Status.OFF, ())
    assert "--enable-dbo " in decision.reason


PROBED = dataclasses.replace(EIGHT, origin="probed")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"passes": {"parallelism": {"expert_parallel": "on"}}}, "needs data parallel"),
        ({"passes": {"parallelism": {"expert_parallel": "off", "data_parallel_size": 2}}}, "with expert parallel"),
        ({"hardware": gpus("h100_sxm", 1), "passes": {}}, " 2 GPUs"),
        ({"model": tiny(), "hardware": cpu_machine(), "passes": {}}, "on CUDA only"),
        ({"model": dense_model()}, "no experts"),
        ({"hardware": PROBED}, "deep_ep), "),
        ({"pinned": {"--all2all-backend": "naive"}}, "--all2all-backend naive "),
    ],
    ids=["EP alone", "DP alone", "one GPU", "CPU", "dense", "no DeepEP", "another all-to-all"],
)
def test_where_it_cannot_be_it_is_refused_with_the_reason(fields, why):
    decision = decide(**fields)
    assert decision.status is Status.REFUSED
    assert why in decision.reason


def test_an_installed_deepep_is_enough_on_this_machine():
    decision = decide(hardware=PROBED, software=dataclasses.replace(software(), deep_ep=True))
    assert decision.status is Status.ON
    assert len(decision.warnings) == 1
