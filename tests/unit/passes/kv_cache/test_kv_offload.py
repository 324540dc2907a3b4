"""Cold cache blocks in host memory: how much, through which arguments, and where not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.errors import InputError, RequiredNotAppliedError
from moe_optimizer.passes.kv_cache import KvCache
from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import KvCacheParams
from moe_optimizer.specs.quantity import Quantity, Source
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    gpt_oss_120b,
    gpus,
    profile_with,
    qwen3_30b_a3b,
    request,
    shaped_model,
    software,
    tiny_moe,
)
from tests.unit.planner.refusal import refused

ASKED: dict[str, Any] = {"wishes": resolve_wishes(["kv-tiering"], [])}


def decide(model=None, hardware=None, **changes) -> Decision:
    ctx = context(model or qwen3_30b_a3b(), hardware or gpus("h100_sxm", 2), **(ASKED | changes))
    return decided_by(ctx, *PASS_NAMES[: PASS_NAMES.index("kv_cache") + 1]).decided["kv_cache"]


def host(gib: float, name: str = "h100_sxm", count: int = 2):
    """A machine with GPUs and so much host memory."""
    cpu = cpu_machine().cpu
    assert cpu is not None
    memory = Quantity(gib * 2**30, "bytes", Source.MEASURED, "cgroup")
    return dataclasses.replace(gpus(name, count), cpu=dataclasses.replace(cpu, memory=memory))


def test_the_tier_is_as_large_as_the_cache_of_all_gpus():
    decision = decide(hardware=host(1000))
    size = decision.vllm_args.value("--kv-offloading-size")
    assert size is not None
    # Two H100 hold 61 GB of weights and 0.9 * 2 * 80 GB in all.
    assert 60 < int(size) < 85
    assert decision.params_as(KvCacheParams).offload_gib == int(size)
    assert decision.vllm_args.value("--kv-offloading-backend") == "native"
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)
    assert f"{size} GiB in host" in decision.value
    assert decision.warnings == ()


def test_the_tier_leaves_half_of_the_host():
    assert decide(hardware=host(64)).vllm_args.value("--kv-offloading-size") == "32"


def test_every_engine_of_data_parallel_has_its_own_share():
    profile = profile_with(passes={"parallelism": {"data_parallel_size": 2}})
    decision = decide(hardware=host(64, "h200"), profile=profile)
    assert decision.vllm_args.value("--kv-offloading-size") == "16"


def test_a_host_that_is_not_known_is_said():
    (warning,) = decide().warnings
    assert "host of h100_sxm" in warning


def test_nobody_gets_a_tier_without_asking():
    for mode in ("auto", "off"):
        decision = decide(wishes={}, profile=profile_with(passes={"kv_cache": {"tiering": mode}}))
        assert decision.vllm_args.value("--kv-offloading-size") is None
        assert decision.rejected["tiering"]
        assert decision.warnings == ()


def test_a_pass_that_is_off_has_no_tier():
    decision = decide(wishes={}, profile=profile_with(passes={"kv_cache": {"mode": "off", "tiering": "on"}}))
    assert (decision.status, decision.vllm_args.words) == (Status.OFF, ())


def test_an_fp8_cache_and_a_tier_go_together():
    profile = profile_with(passes={"kv_cache": {"dtype": "fp8", "tiering": "on"}})
    decision = decide(hardware=host(1000), profile=profile, wishes={})
    assert decision.vllm_args.value("--kv-cache-dtype") == "fp8"
    assert decision.vllm_args.value("--kv-offloading-size") is not None


LATENT = host(2000, "h200", 8)


def test_a_tier_beside_an_fp8_cache_that_cannot_be_is_carried_out_as_the_pass():
    asked = resolve_wishes(["kv-cache", "kv-tiering"], [])
    decision = decide(deepseek_v3(), LATENT, wishes=asked)
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)
    assert decision.vllm_args.value("--kv-cache-dtype") is None
    assert decision.vllm_args.value("--kv-offloading-size") is not None
    assert "mla attention" in decision.rejected["FP8"]
    assert "--enable-kv-cache" in decision.warnings[0]
    assert KvCache().unmet(decision) == decision.rejected["FP8"]


def test_a_tier_that_is_required_is_looked_for_also_beside_an_fp8_cache_that_cannot_be():
    wishes = resolve_wishes(["kv-cache"], [], ["kv-tiering"])
    assert decide(deepseek_v3(), LATENT, wishes=wishes, required=frozenset({"kv_cache.tiering"})).required


def test_a_required_fp8_cache_that_cannot_be_is_refused_also_beside_a_tier():
    wishes = resolve_wishes(["kv-tiering"], [], ["kv-cache"])
    error = refused(
        request(deepseek_v3(), LATENT, wishes=wishes, required=frozenset({"kv_cache"})), RequiredNotAppliedError
    )
    assert "mla attention" in str(error)


HYBRID = dataclasses.replace(shaped_model(), attention=dataclasses.replace(shaped_model().attention, kind="hybrid"))


@pytest.mark.parametrize(
    ("model", "hardware", "changes", "why"),
    [
        (tiny_moe(), cpu_machine(), {}, "CPU build"),
        (gpt_oss_120b(), host(100), {}, "different kinds"),
        (HYBRID, host(100), {}, "different kinds"),
        (None, host(1), {}, "host's memory"),
        (None, host(100), {"pinned": {"--kv-transfer-config": "{}"}}, "one KV connector"),
        (None, host(100), {"pinned": {"--enable-prefix-caching": "false"}}, "prefix cache"),
    ],
    ids=["cpu", "windowed", "hybrid", "small host", "connector", "no prefix cache"],
)
def test_where_there_is_none_the_reason_is_said(model, hardware, changes, why):
    decision = decide(model, hardware, **changes)
    assert "--kv-offloading-size" not in decision.vllm_args
    assert why in decision.rejected["tiering"]
    assert why in decision.warnings[0]
    assert decision.params_as(KvCacheParams).offload_gib is None


DISAGGREGATED: dict[str, Any] = {"wishes": {**ASKED["wishes"], "disaggregation": (Wish.ON, "profile")}}


def test_disaggregation_that_is_refused_leaves_the_connector_to_the_tier():
    decision = decide(hardware=host(1000, count=1), **DISAGGREGATED)
    assert decision.vllm_args.value("--kv-offloading-size") == str(decision.params_as(KvCacheParams).offload_gib)


def test_beside_disaggregation_each_server_has_half_of_the_share_and_no_flag_that_replaces_its_connector():
    decision = decide(hardware=host(40), **DISAGGREGATED)
    assert decision.params_as(KvCacheParams).offload_gib == 10
    assert decision.vllm_args.words == ()
    # The workers show it all the same.
    assert (decision.status, decision.applier) == (Status.ON, Applier.FLAGS)


@pytest.mark.parametrize("servers", ["disaggregation", "replicas"])
def test_a_host_that_is_not_known_must_have_room_for_the_tiers_of_all_servers(servers):
    decision = decide(wishes={**ASKED["wishes"], servers: (Wish.ON, "profile")})
    (warning,) = decision.warnings
    assert f"{2 * (decision.params_as(KvCacheParams).offload_gib or 0)} GiB to spare" in warning


def test_lmcache_beside_disaggregation_was_not_tried():
    profile = profile_with(passes={"kv_cache": {"tiering": "on", "tiering_backend": "lmcache"}})
    spec = dataclasses.replace(software(), lmcache=True)
    decision = decide(hardware=host(100), profile=profile, software=spec, **DISAGGREGATED)
    assert "lmcache" in decision.warnings[0]
    assert "(native)" in decision.reason


def test_the_users_own_size_decides():
    decision = decide(hardware=host(100), pinned={"--kv-offloading-size": "7.5"})
    assert decision.vllm_args.words == ("--kv-offloading-size", "7.5")  # the planner leaves the user's own in its place
    assert decision.params_as(KvCacheParams).offload_gib == 8


@pytest.mark.parametrize("text", ["", "many", "0", "-4", "nan", "inf"])
def test_an_impossible_size_is_refused(text):
    with pytest.raises(InputError, match="--kv-offloading-size: got"):
        decide(hardware=host(100), pinned={"--kv-offloading-size": text})


@pytest.mark.parametrize(("installed", "backend", "words"), [(True, "lmcache", "server"), (False, "native", "LMCache")])
def test_lmcache_is_used_where_it_is_asked_for_and_installed(installed, backend, words):
    profile = profile_with(passes={"kv_cache": {"tiering": "on", "tiering_backend": "lmcache"}})
    spec = dataclasses.replace(software(), lmcache=installed)
    decision = decide(hardware=host(100), profile=profile, software=spec, wishes={})
    assert decision.vllm_args.value("--kv-offloading-backend") == backend
    assert words in decision.warnings[0]
