from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_optimizer import env
from moe_optimizer.cli import planning
from moe_optimizer.cli.options import PlanOptions, ServeOptions
from moe_optimizer.errors import DoesNotFitError, InputError, UnsupportedError
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.software import VllmInstallation
from tests.builders import cpu_machine, deepseek_v3, gpus, request, tiny_moe

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")


def test_memory_of_a_switched_off_server_is_planned_with_vllms_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(model=TINY_MOE, hardware="h100_sxm", gpus=1, profile="aggressive")
    on = planning.make(options)
    monkeypatch.setenv(env.DISABLE, "1")
    off = planning.make(options)
    # Plain vLLM is not told the 0.95 of the profile, so neither cache nor length may be planned with them.
    assert on.memory.budget_bytes == pytest.approx(0.95 * on.memory.total_bytes, rel=1e-6)
    assert off.memory.budget_bytes == pytest.approx(0.90 * off.memory.total_bytes, rel=1e-6)
    assert "--gpu-memory-utilization" not in off.serve_args


def test_switched_off_tuned_configurations_of_the_users_own_environment_do_not_reach_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    options = PlanOptions(model=TINY_MOE, hardware="h100_sxm", gpus=1)
    assert "VLLM_TUNED_CONFIG_FOLDER" not in planning.make(options).serve_env
    off = planning.make(dataclasses.replace(options, switches={"tuned-configs": False}))
    assert off.serve_env["VLLM_TUNED_CONFIG_FOLDER"] == ""
    assert any("VLLM_TUNED_CONFIG_FOLDER" in warning for warning in off.warnings)


def test_a_flag_that_the_installed_vllm_does_not_have_makes_no_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text('parser.add_argument("--tensor-parallel-size")', encoding="utf-8")
    vllm = VllmInstallation(distribution="vllm", version="0.32.0", device="cuda", location=str(tmp_path))
    monkeypatch.setattr("moe_optimizer.inspection.vllm_installation.find_vllm", lambda: vllm)
    arguments = ServeArguments("--tensor-paralel-size", "2")
    options = PlanOptions(model=TINY_MOE, hardware="h100_sxm", gpus=2, vllm_args=arguments)
    with pytest.raises(InputError, match=r"--tensor-paralel-size") as caught:
        planning.make(options)
    assert "--tensor-parallel-size" in str(caught.value.hint)


def test_strict_refuses_a_cache_whose_type_is_not_as_asked_for_though_its_tier_is() -> None:
    wishes = resolve_wishes(["kv-cache", "kv-tiering"], [])
    asked = request(deepseek_v3(), gpus("h200", 8), wishes=wishes, strict=True)
    with pytest.raises(UnsupportedError, match=r"^--strict: kv_cache.*\): mla"):
        make_plan(asked)


def test_a_plan_that_fails_keeps_what_the_facts_warn_of() -> None:
    model = dataclasses.replace(deepseek_v3(), warnings=("key twice",))
    with pytest.raises(DoesNotFitError) as caught:
        planning.planned(request(model, gpus("h100_sxm", 1)))
    assert caught.value.__notes__ == ["key twice"]


def test_an_old_vllm_is_the_plans_first_warning() -> None:
    asked = request(tiny_moe(), cpu_machine())
    assert asked.software.vllm is not None
    vllm = dataclasses.replace(asked.software.vllm, version="0.25.1")
    software = dataclasses.replace(asked.software, vllm=vllm)
    first = planning.planned(dataclasses.replace(asked, software=software)).warnings[0]
    assert "too old" in first
    assert "0.25.1" in first
