"""Switched off, a pass leaves nothing behind: the plan is that of stock vLLM, and no process is patched."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes, switches
from moe_optimizer.plan.plan import Plan
from moe_optimizer.profiles import profile_names
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.vllm_plugin import patch as patches
from moe_optimizer.vllm_plugin.install import install_plan
from tests.builders import cpu_machine, gpus, made_plan, profile_with, qwen3_30b_a3b, tiny_moe
from tests.plugin_state import own_patches, own_session

EVERYTHING = {
    "parallelism": {"data_parallel_size": 2, "expert_parallel": "on"},
    "dual_batch_overlap": {"mode": "on"},
    "kv_cache": {"dtype": "fp8", "tiering": "on"},
    "fp8": {"mode": "on"},
    "expert_load": {"mode": "on"},
    "graph_capture": {"max_capture_size": 64},
}
MACHINES = {"eight H200": gpus("h200", 8), "CPU": cpu_machine(isa=("avx2", "avx512f"))}


def plan(machine: HardwareSpec, profile: Any = "aggressive", *, off: tuple[str, ...] = ()) -> Plan:
    model = tiny_moe() if machine.gpu is None else qwen3_30b_a3b()
    return made_plan(model, machine, profile, wishes=resolve_wishes([], off))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("profile", profile_names())
def test_with_every_pass_off_the_command_is_that_of_plain_vllm(profile: str, machine: str) -> None:
    stock = plan(MACHINES[machine], profile, off=tuple(switch.flag for switch in switches()))
    # The share of memory is the profile's own and not a pass's; a length only where the profile states one.
    assert stock.serve_args.without("--gpu-memory-utilization") == stock.plain_args
    assert {name for decision in stock.decisions for name in decision.env} == set()


FLAGS = {switch.key: switch.flag for switch in switches()}


@pytest.mark.parametrize("name", PASS_NAMES)
def test_one_pass_off_takes_its_arguments_and_its_environment_out(name: str) -> None:
    profile = profile_with(passes=EVERYTHING)
    both = plan(MACHINES["eight H200"], profile), plan(MACHINES["eight H200"], profile, off=(FLAGS[name],))
    given = {argument.flag for argument in both[0].decision(name).vllm_args.arguments}
    left = {argument.flag for argument in both[1].serve_args.arguments}
    assert not given & left
    assert not both[0].decision(name).env.keys() & both[1].serve_env.keys()


def test_everything_is_really_on_before_it_is_switched_off() -> None:
    on: Mapping[str, bool] = {
        decision.pass_name: bool(decision.vllm_args)
        for decision in plan(MACHINES["eight H200"], profile_with(passes=EVERYTHING)).decisions
    }
    assert {name for name, has_arguments in on.items() if has_arguments} == {
        "parallelism", "fp8", "dual_batch_overlap", "scheduler", "graph_capture", "kv_cache",
    }  # fmt: skip


def test_a_plan_with_every_pass_off_patches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_session(monkeypatch)
    own_patches(monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    stock = plan(MACHINES["CPU"], off=tuple(switch.flag for switch in switches()))
    applied = install_plan(stock, run_dir=tmp_path)
    assert patches.patch_reports() == ()
    assert applied.proof.passes == {}
