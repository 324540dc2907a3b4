"""The entry point: nothing set changes nothing, and what is wrong stops the process with a sentence."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_optimizer import autoload
from moe_optimizer.errors import InputError
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import FlashDmoeParams, ParallelismParams
from moe_optimizer.plan.plan import SCHEMA_VERSION
from moe_optimizer.profiles import load_profile
from moe_optimizer.specs.software import SoftwareSpec
from moe_optimizer.vllm_plugin.server_facts import ServerFacts
from tests.builders import profile_with, software

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MOE_OPTIMIZER_"):
            monkeypatch.delenv(name)


def test_only_the_standard_library_is_imported_at_the_top() -> None:
    tree = ast.parse(Path(autoload.__file__).read_text())
    imported = {
        name.partition(".")[0]
        for node in tree.body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= set(sys.stdlib_module_names)


def modules_after_register(**environment: str) -> set[str]:
    """Return this package's modules, and whether vLLM or torch, after register() in a fresh process."""
    code = (
        "import sys; from moe_optimizer.autoload import register; register(); register();"
        "print(*(m for m in sys.modules if m.split('.')[0] in ('moe_optimizer', 'vllm', 'torch', 'pydantic')))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOE_OPTIMIZER_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return set(done.stdout.split())


def test_nothing_set_loads_nothing() -> None:
    assert modules_after_register() == {"moe_optimizer", "moe_optimizer.autoload"}


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_the_kill_switch_wins_over_everything_even_what_is_wrong(value: str) -> None:
    loaded = modules_after_register(
        MOE_OPTIMIZER_DISABLE=value, MOE_OPTIMIZER_PLAN="/nowhere/plan.json", MOE_OPTIMIZER_MISSPELT="1"
    )
    assert loaded == {"moe_optimizer", "moe_optimizer.autoload"}


def test_a_run_folder_alone_applies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "moe_optimizer.vllm_plugin" not in modules_after_register(MOE_OPTIMIZER_RUN_DIR="/tmp/x")


def test_a_missing_plan_stops_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PLAN", str(tmp_path / "plan.json"))
    with pytest.raises(InputError, match=r"plan\.json: cannot be"):
        autoload.register()


def test_a_plan_that_is_no_plan_stops_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION, "surprise": 2}))
    monkeypatch.setenv("MOE_OPTIMIZER_PLAN", str(path))
    with pytest.raises(InputError, match="surprise"):
        autoload.register()


def test_an_unknown_profile_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PROFILE", "balancd")
    with pytest.raises(InputError, match=r"^environment MOE_OPTIMIZER_PROFILE: .*profile"):
        autoload.register()


def test_a_misspelt_variable_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PROFIL", "balanced")
    with pytest.raises(InputError, match="MOE_OPTIMIZER_PROFIL"):
        autoload.register()


FACTS = ServerFacts(
    model=str(ROOT / "examples" / "tiny-moe"),
    dtype="float32",
    device="cpu",
    tensor_parallel_size=2,
    expert_parallel=True,
    world_size=2,
    max_model_len=256,
    max_num_seqs=4,
    trust_remote_code=False,
)


def test_a_running_server_is_not_planned_as_half_of_a_group() -> None:
    plan = autoload.plan_for_server(FACTS, profile_with(passes={"disaggregation": {"mode": "on"}}), None)
    assert plan.group is None
    assert "vllm serve" in plan.decision("disaggregation").reason


def test_a_running_server_is_planned_for_as_it_is() -> None:
    plan = autoload.plan_for_server(FACTS, load_profile("balanced"), None)
    parallelism = plan.decision("parallelism").params_as(ParallelismParams)
    assert (parallelism.tensor_parallel_size, parallelism.expert_parallel) == (2, True)
    assert plan.workload.max_model_len == 256
    assert plan.workload.batch_size == 4


def test_a_running_server_that_slices_its_experts_is_not_planned_with_whole_ones() -> None:
    facts = dataclasses.replace(FACTS, expert_parallel=False)
    whole = profile_with(passes={"parallelism": {"expert_parallel": "on"}})
    plan = autoload.plan_for_server(facts, whole, None)
    assert plan.parallelism.expert_parallel is False


def test_a_worker_bound_to_one_core_plans_for_the_cores_of_all_workers() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        plan = autoload.plan_for_server(FACTS, load_profile("balanced"), None)
    finally:
        os.sched_setaffinity(0, before)
    assert plan.parallelism.tensor_parallel_size == 2


def test_workers_bound_to_different_cores_make_one_plan() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    digests = set()
    try:
        for core in (min(before), max(before)):
            os.sched_setaffinity(0, {core})
            digests.add(autoload.plan_for_server(FACTS, load_profile("balanced"), None).digest)
    finally:
        os.sched_setaffinity(0, before)
    assert len(digests) == 1


def software_planned_for(monkeypatch: pytest.MonkeyPatch) -> SoftwareSpec:
    """Return the software in the request that a starting server makes."""
    requests = []
    monkeypatch.setattr("moe_optimizer.planner.make_plan", requests.append)
    autoload.plan_for_server(FACTS, load_profile("balanced"), None)
    return requests[0].software


def test_a_running_server_knows_the_optional_packages_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("deep_ep", "lmcache", "transformer_engine"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    software = software_planned_for(monkeypatch)
    assert (software.deep_ep, software.lmcache, software.transformer_engine) == (True, True, True)


def test_a_running_server_has_the_tuned_configurations_only_of_a_folder_that_vllm_looks_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert software_planned_for(monkeypatch).tuned_configs is None
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    assert software_planned_for(monkeypatch).tuned_configs == str(tmp_path)


@pytest.mark.parametrize(("quantization", "weights"), [(None, "bf16"), ("fp8_per_block", "fp8_block")])
def test_a_server_on_gpus_asks_for_the_speeds_of_the_weights_that_it_has(
    monkeypatch: pytest.MonkeyPatch, quantization: str | None, weights: str
) -> None:
    found = software("cuda", cuda_ops=("fused_experts",))
    monkeypatch.setattr("moe_optimizer.inspection.software.read_software", lambda: found)
    changes = {"device": "cuda", "dtype": "bfloat16", "tensor_parallel_size": 1, "expert_parallel": False}
    facts = dataclasses.replace(FACTS, **changes, world_size=1, quantization=quantization)
    plan = autoload.plan_for_server(facts, profile_with("aggressive"), "h200")
    decision = plan.decision("flash_dmoe")
    assert [question.weights for question in decision.params_as(FlashDmoeParams).measure] == [weights]
    assert decision.status is Status.OFF


def test_a_cpu_worker_that_plans_asks_for_its_own_threads() -> None:
    facts = dataclasses.replace(FACTS, tensor_parallel_size=1, world_size=1, expert_parallel=False, worker_threads=7)
    decision = autoload.plan_for_server(facts, profile_with(), None).decision("flash_dmoe")
    (question,) = decision.params_as(FlashDmoeParams).measure
    assert question.device.endswith(" 7 threads")


@pytest.mark.parametrize(
    ("targets", "status"), [(None, Status.OFF), (("q_proj", "experts"), Status.OFF), (("q_proj",), Status.ON)]
)
def test_adapters_of_a_running_vllm_are_planned_for(targets: tuple[str, ...] | None, status: Status) -> None:
    # With adapters vLLM's CPU build has no kernel for the experts that runs.
    alone = dataclasses.replace(FACTS, tensor_parallel_size=1, world_size=1, expert_parallel=False)
    facts = dataclasses.replace(alone, lora=True, lora_targets=targets)
    decision = autoload.plan_for_server(facts, load_profile("balanced"), None).decision("flash_dmoe")
    assert decision.status is status
    assert "LoRA" in decision.reason
