"""What is switched on, switched off or required, and what becomes of it."""

from __future__ import annotations

import itertools
import re

import pytest

from moe_optimizer.errors import ExitCode, MoeOptimizerError, RequiredNotAppliedError
from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes, switches
from moe_optimizer.plan.decision import Status, Wish
from tests.builders import (
    cpu_machine,
    deepseek_v3,
    dense_model,
    gpus,
    made_plan,
    placement_load,
    qwen3_30b_a3b,
    request,
    tiny_moe,
)
from tests.unit.planner.refusal import refused


def test_a_required_pass_that_is_not_on_makes_no_plan():
    error = refused(request(qwen3_30b_a3b(), gpus("a100_80gb"), required=frozenset({"fp8"})), RequiredNotAppliedError)
    assert error.exit_code is ExitCode.NOT_APPLIED
    assert re.match(r"fp8 .*--require fp8\).*FP8 ", str(error))
    assert error.hint is not None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "machine"),
    [(tiny_moe, cpu_machine()), (qwen3_30b_a3b, gpus("h100_sxm")), (qwen3_30b_a3b, gpus("h100_sxm", 8))],
    ids=["CPU", "one GPU", "eight GPUs"],
)
def test_any_two_flags_end_in_a_plan_or_in_a_sentence(model, machine):
    pairs = tuple(itertools.combinations_with_replacement(switches(), 2))
    for one, other in pairs:
        for enabled, disabled in (([one, other], []), ([one], [other]), ([other], [one]), ([], [one, other])):
            try:
                wishes = resolve_wishes([switch.flag for switch in enabled], [switch.flag for switch in disabled])
                plan = made_plan(model(), machine, wishes=wishes)
            except MoeOptimizerError:
                continue
            off = [switch.key for switch in disabled if switch.key == switch.pass_name]
            assert all(plan.decision(name).status is Status.OFF for name in off), (enabled, disabled)


WHERE_NOT = {
    "disaggregation": (qwen3_30b_a3b, gpus("h100_sxm")),
    "replicas": (qwen3_30b_a3b, gpus("h100_sxm")),
    "parallelism": (qwen3_30b_a3b, gpus("h100_sxm")),
    "expert-parallel": (qwen3_30b_a3b, gpus("h100_sxm")),
    "fp8": (qwen3_30b_a3b, gpus("a100_80gb")),
    "four-bit": (qwen3_30b_a3b, gpus("h100_sxm")),
    "sparsity": (qwen3_30b_a3b, gpus("h100_sxm")),
    "flash-dmoe": (qwen3_30b_a3b, gpus("a100_80gb")),
    "expert-load": (dense_model, gpus("h100_sxm")),
    "expert-placement": (qwen3_30b_a3b, gpus("h100_sxm")),
    "tuned-configs": (tiny_moe, cpu_machine()),
    "graph-capture": (tiny_moe, cpu_machine()),
    "norm-rope-fusion": (tiny_moe, cpu_machine()),
    "skinny-gemm": (tiny_moe, cpu_machine()),
    "kv-cache": (deepseek_v3, gpus("h200", 8)),
    "kv-tiering": (tiny_moe, cpu_machine()),
    "dual-batch-overlap": (qwen3_30b_a3b, gpus("h100_sxm")),
}
"""Where each switch cannot be carried out; the scheduler's always can, and something to draft with is always there."""


def test_every_switch_but_two_has_a_place_where_it_cannot_be():
    assert WHERE_NOT.keys() | {"scheduler", "speculation"} == {switch.flag for switch in switches()}


@pytest.mark.parametrize("flag", WHERE_NOT)
def test_whatever_is_required_and_cannot_be_makes_no_plan(flag):
    model, machine = WHERE_NOT[flag]
    assert refused(request(model(), machine, required=frozenset({flag})), RequiredNotAppliedError).exit_code == 6


def test_a_required_pass_that_is_on_is_marked():
    plan = made_plan(tiny_moe(), cpu_machine(), required=frozenset({"flash_dmoe"}))
    decision = plan.decision("flash_dmoe")
    assert decision.required
    assert decision.wish_origin == "flag --require flash_dmoe"


def test_a_load_that_nothing_is_placed_by_is_named():
    # A server of one process has no other to give experts to.
    model = tiny_moe()
    plan = made_plan(model, cpu_machine(), expert_load=placement_load(model))
    reason = plan.decision("expert_placement").reason
    assert any(warning.endswith(f"(monday.json): {reason}") for warning in plan.warnings)


def test_everything_off_leaves_a_stock_server():
    off = dict.fromkeys(PASS_NAMES, (Wish.OFF, "environment MOE_OPTIMIZER_DISABLE"))
    plan = made_plan(tiny_moe(), cpu_machine(), wishes=off)
    assert plan.serve_args == plan.plain_args
    assert {decision.status for decision in plan.decisions} == {Status.OFF}


def test_the_kill_switch_leaves_the_users_own_arguments():
    off = dict.fromkeys([*PASS_NAMES, "kv_cache.tiering"], (Wish.OFF, "environment MOE_OPTIMIZER_DISABLE"))
    arguments = ("--kv-cache-dtype", "fp8", "--kv-offloading-size", "4")
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 1), wishes=off, vllm_args=arguments)
    assert plan.serve_args.words[-4:] == arguments


@pytest.mark.parametrize(
    ("required", "machine", "words"),
    [
        ("kv-tiering", cpu_machine(), "tiering of kv_cache .*required"),
        ("expert-parallel", gpus("h200", 1), "expert_parallel of parallelism .*one GPU"),
    ],
)
def test_a_required_setting_that_cannot_be_makes_no_plan(required, machine, words):
    model = tiny_moe() if machine.gpu is None else qwen3_30b_a3b()
    error = refused(request(model, machine, required=frozenset({required})), RequiredNotAppliedError)
    assert re.match(words, str(error))


def test_a_required_setting_is_switched_on_and_its_pass_must_be_seen_running():
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 2), required=frozenset({"kv-tiering", "expert-parallel"}))
    assert plan.serve_args.value("--kv-offloading-size") is not None
    assert "--enable-expert-parallel" in plan.serve_args
    assert {each.pass_name for each in plan.decisions if each.required} == {"kv_cache", "parallelism"}


def test_every_flag_that_is_refused_is_a_warning_that_names_it():
    """On a CPU and on a GPU: what was asked for by flag and is not planned is said, not only listed."""
    for machine in (cpu_machine(), gpus("h100_sxm")):
        for switch in switches():
            try:
                plan = made_plan(tiny_moe(), machine, wishes=resolve_wishes([switch.flag], []))
            except MoeOptimizerError:
                continue  # refused as a whole, by a sentence
            for decision in plan.decisions:
                if decision.wish is Wish.ON and decision.status is Status.REFUSED:
                    said = [line for line in plan.warnings if decision.wish_origin in line or decision.reason in line]
                    assert said, (switch.flag, decision)


def test_a_refused_flag_is_said_with_its_reason():
    plan = made_plan(tiny_moe(), cpu_machine(), wishes=resolve_wishes(["dual-batch-overlap"], []))
    (line,) = [line for line in plan.warnings if "dual_batch_overlap" in line]
    assert "--enable-dual-batch-overlap" in line
    assert plan.decision("dual_batch_overlap").reason in line
