"""When experts are placed, in which of the two ways, and what is claimed for it."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import ExpertPlacementParams, FlashDmoeParams
from tests.builders import (
    context,
    cpu_machine,
    dense_model,
    expert_load,
    gpt_oss_120b,
    gpus,
    placement_load,
    profile_with,
    qwen3_30b_a3b,
    tiny_moe,
)

EP = {"expert_parallel": "on"}
ON = {"expert_placement": (Wish.ON, "flag --enable-expert-placement")}


def decided(
    model, hardware, *, load=None, parallelism=EP, section=None, flash_dmoe=Status.ON, kernel: Any = "cuda", **changes
) -> Decision:
    """Return the decision after one of flash_dmoe: its status, and which kernel of ours it takes."""
    from moe_optimizer.passes.registry import all_passes

    if hardware.gpu is None:
        parallelism = {"tensor_parallel_size": 2, **parallelism}
    profile = profile_with(passes={"parallelism": parallelism, "expert_placement": section or {}})
    ctx = context(model, hardware, profile, expert_load=load, **changes)
    passes = {each.name: each for each in all_passes()}
    ctx = dataclasses.replace(ctx, decided={"parallelism": passes["parallelism"].decide(ctx)})
    experts = dataclasses.replace(
        passes["flash_dmoe"].when_off(ctx, "for the test"), status=flash_dmoe, params=FlashDmoeParams(kernel=kernel)
    )
    ctx = dataclasses.replace(ctx, decided={**ctx.decided, "flash_dmoe": experts})
    return passes["expert_placement"].decide(ctx)


def on_cpu(load=None, **changes) -> Decision:
    return decided(tiny_moe(), cpu_machine(), load=load, **changes)


def on_gpus(load=None, model=None, **changes) -> Decision:
    return decided(model or qwen3_30b_a3b(), gpus("h100_sxm", 8), load=load, **changes)


def test_a_measured_load_places_the_experts_of_every_layer():
    decision = on_cpu(placement_load(tiny_moe()))
    assert (decision.status, decision.applier) == (Status.ON, Applier.PLUGIN)
    assert decision.value.endswith("EP=2")
    assert not decision.vllm_args
    params = decision.params_as(ExpertPlacementParams)
    assert (params.mode, params.num_ranks, params.num_experts) == ("initial", 2, 16)
    assert list(params.experts) == [0, 1, 2, 3]
    rows = [[int(expert) for expert in row.split()] for row in params.experts.values()]
    for row in rows:
        assert sorted(row) == list(range(16))
        assert row[:8] == sorted(row[:8]), "vLLM's loaders want the experts of a rank in ascending order"
    assert any(row != list(range(16)) for row in rows)
    assert len(params.digest) == 16


def test_the_gain_is_that_on_load_that_was_not_used_to_place():
    model = tiny_moe()
    decision = on_cpu(placement_load(model))
    assert decision.gain is not None
    assert decision.gain.ratio.value > 1.02
    assert "tuesday.json" in decision.gain.ratio.ref
    assert re.search(r"not used .*\(tuesday\.json\)", decision.reason)
    assert [text.split()[0] for text in decision.evidence] == ["monday.json", "tuesday.json"]
    # Placed by the same Monday but judged by another Tuesday, the claim is another one.
    load = placement_load(model)
    assert load.checked_on is not None
    other = dataclasses.replace(load.checked_on, load=expert_load(model, seed=3))
    changed = on_cpu(dataclasses.replace(load, checked_on=other))
    assert changed.params == decision.params
    assert changed.gain is not None
    assert changed.gain.ratio.value != decision.gain.ratio.value


def test_without_a_second_load_no_gain_is_claimed():
    decision = on_cpu(placement_load(tiny_moe(), checked=False))
    assert decision.status is Status.ON
    assert decision.gain is None
    assert re.search(r"very load .*\(monday\.json\)", decision.reason)


def test_an_even_load_is_left_alone_unless_asked_for():
    even = placement_load(tiny_moe(), checked=False, skew=0.0)
    flat = dataclasses.replace(
        even.placed_by.load,
        layers=tuple(dataclasses.replace(layer, tokens=(7,) * 16) for layer in even.placed_by.load.layers),
    )
    load = dataclasses.replace(even, placed_by=dataclasses.replace(even.placed_by, load=flat))
    assert on_cpu(load).status is Status.OFF
    assert re.match(r"would not pay:.* 1\.00.* 1\.00", on_cpu(load).reason)
    assert on_cpu(load, wishes=ON).status is Status.ON


@pytest.mark.parametrize(
    ("decision", "why"),
    [
        (lambda: on_cpu(wishes=ON), "the load of "),
        (lambda: decided(dense_model(), cpu_machine(), wishes=ON), "no experts"),
        (lambda: decided(qwen3_30b_a3b(), gpus("h100_sxm", 1), wishes=ON), " 2 GPUs, found 1"),
        (
            lambda: on_gpus(wishes=ON, parallelism={}),
            "(--enable-expert-parallel)",
        ),
        (
            lambda: on_cpu(placement_load(tiny_moe()), wishes=ON, flash_dmoe=Status.OFF),
            "only our expert",
        ),
        (
            lambda: on_cpu(placement_load(tiny_moe()), wishes=ON, kernel=None),
            "only our expert",
        ),
        (
            lambda: on_cpu(placement_load(tiny_moe()), wishes=ON, pinned={"--enable-ep-weight-filter": ""}),
            "by expert number",
        ),
        (
            lambda: on_cpu(
                placement_load(tiny_moe()), wishes=ON, pinned={"--expert-placement-strategy": "round_robin"}
            ),
            "--expert-placement-strategy round_robin ",
        ),
        (lambda: on_cpu(wishes=ON, pinned={"--enable-eplb": ""}), "vLLM's EPLB is CUDA only"),
        (lambda: on_gpus(model=gpt_oss_120b(), wishes=ON), "experts in mxfp4"),
        (
            lambda: on_gpus(model=qwen3_30b_a3b(architecture="OlmoeForCausalLM"), wishes=ON),
            "EPLB: OlmoeForCausalLM ",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(decision, why):
    assert decision().status is Status.REFUSED
    assert why in decision().reason


@pytest.mark.parametrize("wishes", [{}, ON], ids=["auto", "asked"])
def test_the_users_own_flag_for_a_model_without_the_interface_is_a_warning(wishes):
    olmoe = qwen3_30b_a3b(architecture="OlmoeForCausalLM")
    decision = on_gpus(model=olmoe, wishes=wishes, pinned={"--enable-eplb": ""})
    assert decision.status is (Status.REFUSED if wishes else Status.OFF)
    (warning,) = decision.warnings
    assert warning.startswith("--enable-eplb ")
    assert warning.endswith(decision.reason)
    assert on_gpus(model=olmoe, wishes=wishes).warnings == ()


def test_without_a_load_nobody_gets_vllms_load_balancer_unasked():
    assert on_gpus().status is Status.OFF
    assert "--expert-load FILE" in on_gpus().reason


def test_our_kernel_and_a_load_place_at_the_start_on_gpus_too():
    decision = on_gpus(placement_load(qwen3_30b_a3b()))
    assert decision.params_as(ExpertPlacementParams).mode == "initial"
    assert "EPLB" in decision.rejected


def test_asked_for_without_a_load_it_is_vllms_load_balancer_with_our_policy():
    decision = on_gpus(wishes=ON)
    assert decision.params == ExpertPlacementParams(mode="eplb", num_redundant_experts=0)
    assert decision.vllm_args.words == ("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 0}')
    assert decision.gain is None


def test_redundant_experts_are_replicas_under_the_load_balancer():
    model = qwen3_30b_a3b()
    decision = on_gpus(placement_load(model), section={"redundant_experts": 16}, flash_dmoe=Status.OFF)
    assert json.loads(decision.vllm_args.words[2]) == {"num_redundant_experts": 16}
    assert decision.value == "EPLB, 16 replicas"
    without = on_gpus(placement_load(model), wishes=ON, flash_dmoe=Status.OFF)
    assert decision.gain is not None
    assert without.gain is not None
    assert decision.gain.ratio.value > without.gain.ratio.value


def test_replicas_are_rounded_up_to_as_many_on_every_gpu():
    decision = on_gpus(section={"redundant_experts": 3})
    assert decision.params_as(ExpertPlacementParams).num_redundant_experts == 8
    assert any(re.search("redundant_experts.* 8 .* 3:?", warning) for warning in decision.warnings)


def test_the_users_own_replicas_are_those_of_the_plan():
    pinned = {"--enable-eplb": "", "--eplb-config": '{"window_size": 100, "num_redundant_experts": 8}'}
    decision = on_gpus(section={"redundant_experts": 16}, pinned=pinned)
    assert decision.params_as(ExpertPlacementParams).num_redundant_experts == 8
    assert decision.value == "EPLB, 8 replicas"
    # Without a number vLLM takes none, whatever the profile says.
    assert on_gpus(section={"redundant_experts": 16}, pinned={"--eplb-config": "{}"}).value == "EPLB, 0 replicas"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"num_redundant_experts": 3}', "got 3, .*128 .*8 GPUs"),
        ('{"num_redundant_experts": -8}', "num_redundant_experts: got -8"),
        ('{"num_redundant_experts": "8"}', "num_redundant_experts: got '8'"),
        ("[8]", r"--eplb-config: got '\[8\]'"),
        ("8}", "--eplb-config: got '8}'"),
    ],
)
def test_replicas_that_vllm_would_end_on_are_an_error(config, message):
    with pytest.raises(InputError, match=message):
        on_gpus(wishes=ON, pinned={"--eplb-config": config})


def test_replicas_are_not_promised_on_the_cpu():
    decision = on_cpu(placement_load(tiny_moe()), section={"redundant_experts": 4})
    assert decision.params_as(ExpertPlacementParams).mode == "initial"
    assert any("redundant_experts" in warning for warning in decision.warnings)


@pytest.mark.parametrize("empty", ["placed_by", "checked_on"])
def test_a_load_without_tokens_places_nothing_and_judges_nothing(empty):
    given = placement_load(tiny_moe())
    file = getattr(given, empty)
    assert file is not None
    idle = tuple(dataclasses.replace(layer, tokens=(0,) * 16) for layer in file.load.layers)
    idle_file = dataclasses.replace(file, load=dataclasses.replace(file.load, layers=idle))
    with pytest.raises(InputError, match=rf"{file.path}: no tokens"):
        on_cpu(dataclasses.replace(given, **{empty: idle_file}))


def test_a_load_of_another_model_is_an_error_or_a_warning():
    with pytest.raises(InputError, match=r"monday\.json: 128.* 16.*tiny-moe"):
        on_cpu(placement_load(qwen3_30b_a3b()))
    load = placement_load(tiny_moe())
    short = dataclasses.replace(load.placed_by.load, layers=load.placed_by.load.layers[1:])
    with pytest.raises(InputError, match=r"monday\.json: 3.*\(1 to 3\),.*\(0 to 3\)"):
        on_cpu(dataclasses.replace(load, placed_by=dataclasses.replace(load.placed_by, load=short)))
    named = on_cpu(placement_load(tiny_moe(), model="/models/other"))
    (warning,) = named.warnings
    assert re.search("/models/other.*tiny-moe", warning)
