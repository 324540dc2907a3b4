"""What a worker's vLLM has made of the plan's flags, against what the plan says."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import SchedulerParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.proof.shown import flag_decisions
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker.planned_flags import differences, other_variables, prove_flags, unconverted
from tests.builders import (
    cpu_machine,
    dense_model,
    gpus,
    made_plan,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    tiny_moe,
)
from tests.golden.stored import PLANS, read_plan

FLAG_PASSES = ("parallelism", "dual_batch_overlap", "scheduler", "graph_capture", "kv_cache", "fp8")
BF16 = {"layer.0": SimpleNamespace(dtype=torch.bfloat16)}
FP8 = {"layer.0": SimpleNamespace(dtype=torch.uint8)}


def vllm_config(**changed: Any) -> Any:
    """A configuration with what these plans ask for, but for what is changed."""
    fields = {
        "tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 1, "enable_expert_parallel": True,
        "enable_dbo": True, "all2all_backend": "deepep_low_latency", "max_num_seqs": 256, "max_num_batched_tokens": 256,
        "performance_mode": "balanced", "enforce_eager": False, "cache_dtype": "fp8", "kv_offloading_size": None,
        "kv_offloading_backend": "native", "max_cudagraph_capture_size": 512, "kv_transfer_config": None,
        "distributed_executor_backend": "mp", "is_moe": True, "moe_backend": "auto", "speculative_config": None,
        "async_scheduling": True, "_api_process_count": 3,
        "pass_config": SimpleNamespace(enable_qk_norm_rope_fusion=True),
    }  # fmt: skip
    # All sections hold all fields: which one a field belongs to is vLLM's to know, and the real server's test.
    section = SimpleNamespace(**(fields | changed))
    names = (
        "kernel_config",
        "parallel_config",
        "scheduler_config",
        "model_config",
        "cache_config",
        "compilation_config",
    )
    return SimpleNamespace(**dict.fromkeys(names, section), **(fields | changed))


@pytest.fixture(scope="module")
def plan() -> Plan:
    passes = {
        "parallelism": {"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel": "on"},
        "dual_batch_overlap": {"mode": "on"},
        "kv_cache": {"dtype": "fp8"},
        "fp8": {"mode": "on"},
    }
    return made_plan(qwen3_30b_a3b(), gpus("h200", 4), profile_with(passes=passes))


def found(plan: Plan, name: str, specs: dict[str, Any] = FP8, **changed: Any) -> tuple[str, ...]:
    return differences(plan.decision(name), plan.serve_args, vllm_config(**changed), specs)


def test_a_plan_has_every_pass_that_flags_carry_out(plan: Plan) -> None:
    assert {decision.pass_name for decision in flag_decisions(plan)} == set(FLAG_PASSES)


@pytest.mark.parametrize("name", FLAG_PASSES)
def test_what_runs_as_planned_has_no_difference(plan: Plan, name: str) -> None:
    assert found(plan, name) == ()


@pytest.mark.parametrize(
    ("name", "changed", "difference"),
    [
        ("parallelism", {"tensor_parallel_size": 1}, "--tensor-parallel-size: .*1, planned 2"),
        ("parallelism", {"data_parallel_size": 1}, "--data-parallel-size: .*1, planned 2"),
        ("parallelism", {"enable_expert_parallel": False}, "--enable-expert-parallel: .*False, planned"),
        ("dual_batch_overlap", {"enable_dbo": False}, "--enable-dbo: .*False, planned True"),
        ("dual_batch_overlap", {"all2all_backend": "naive"}, "--all2all-backend: .*naive, planned deepep"),
        ("scheduler", {"max_num_seqs": 8}, "--max-num-seqs: .*8, planned 256"),
        ("scheduler", {"max_num_batched_tokens": 64}, "--max-num-batched-tokens: .*64, planned 256"),
        ("scheduler", {"_api_process_count": 2}, "--api-server-count: .*2, planned 3"),
        ("graph_capture", {"max_cudagraph_capture_size": 128}, "CUDA graphs: .* 128, planned 256"),
        ("graph_capture", {"max_cudagraph_capture_size": 0}, "CUDA graphs: .* 0, planned 256"),
        ("kv_cache", {"cache_dtype": "auto"}, "--kv-cache-dtype: .*auto, planned fp8"),
    ],
)
def test_what_vllm_changed_is_named_with_both_values(
    plan: Plan, name: str, changed: dict[str, Any], difference: str
) -> None:
    assert any(re.match(difference, text) for text in found(plan, name, **changed))


OWN = {
    "parallelism": ("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-expert-parallel"),
    "dual_batch_overlap": ("--enable-dbo", "--all2all-backend", "deepep_low_latency"),
    "scheduler": ("--max-num-seqs", "256", "--max-num-batched-tokens", "256"),
    "kv_cache": ("--kv-cache-dtype", "fp8_e4m3"),
}


@pytest.mark.parametrize(
    ("name", "changed", "difference"),
    [
        ("parallelism", {"enable_expert_parallel": False}, "--enable-expert-parallel: .*False"),
        ("dual_batch_overlap", {"enable_dbo": False}, "--enable-dbo: .*False"),
        ("scheduler", {"max_num_seqs": 8}, "--max-num-seqs: .*8, planned 256"),
        ("kv_cache", {"cache_dtype": "auto"}, "--kv-cache-dtype: .*auto, planned fp8_e4m3"),
    ],
)
def test_arguments_that_the_user_gives_in_place_of_the_plans_are_looked_at_too(
    name: str, changed: dict[str, Any], difference: str
) -> None:
    passes = {
        "parallelism": {"data_parallel_size": 2, "expert_parallel": "on"},
        "dual_batch_overlap": {"mode": "on"},
        "scheduler": {"api_servers": "off"},
    }
    own = tuple(word for words in OWN.values() for word in words)
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 4), profile_with(passes=passes), vllm_args=own)
    assert plan.decision(name).vllm_args.words == ()
    assert found(plan, name) == ()
    assert any(re.match(difference, text) for text in found(plan, name, **changed))


@pytest.mark.parametrize("given", [{"passes": {"parallelism": {"data_parallel_size": 2}}}, {}], ids=["plan", "user"])
def test_copies_of_a_model_without_experts_are_engines_of_their_own(given: dict[str, Any]) -> None:
    own = () if given else ("--data-parallel-size", "2")
    plan = made_plan(dense_model(), gpus("h200", 2), profile_with(**given), vllm_args=own)
    alone: dict[str, Any] = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    assert found(plan, "parallelism", **alone, is_moe=False) == ()
    assert found(plan, "parallelism", **alone) != ()


@pytest.mark.parametrize("words", [("--max-num-batched-tokens", "2K"), ("--max-num-batched-tokens=2048",)])
def test_a_number_is_read_as_vllm_reads_it(words: tuple[str, ...]) -> None:
    plan = made_plan(tiny_moe(), cpu_machine(), vllm_args=words)
    assert found(plan, "scheduler", max_num_batched_tokens=2048) == ()
    assert found(plan, "scheduler", max_num_batched_tokens=1024) != ()


def test_the_long_name_of_the_cache_type_is_the_same_type(plan: Plan) -> None:
    assert found(plan, "kv_cache", cache_dtype="fp8_e4m3") == ()


def test_a_cache_that_is_called_fp8_but_keeps_wide_elements_is_named(plan: Plan) -> None:
    (text,) = found(plan, "kv_cache", BF16)
    assert "layer.0" in text


def test_a_tier_without_a_connector_is_named() -> None:
    wishes = resolve_wishes(["kv-tiering"], [])
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 1), wishes=wishes)
    size = float(plan.serve_args.values["--kv-offloading-size"])
    assert found(plan, "kv_cache", BF16, kv_offloading_size=size, kv_transfer_config=object()) == ()
    (text,) = found(plan, "kv_cache", BF16, kv_offloading_size=size)
    assert "no KV connector" in text


def test_a_tier_beside_disaggregation_is_found_among_the_connectors() -> None:
    wishes = resolve_wishes(["kv-tiering", "disaggregation"], [])
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 2), wishes=wishes)
    assert plan.group is not None
    planned = json.loads(plan.group.servers[0].serve_args.value("--kv-transfer-config") or "")
    assert found(plan, "kv_cache", BF16, kv_transfer_config=SimpleNamespace(**planned)) == ()
    between, tier = planned["kv_connector_extra_config"]["connectors"]
    smaller = tier | {"kv_connector_extra_config": {"cpu_bytes_to_use": 1}}
    for left in ([between], [between, smaller]):
        changed = SimpleNamespace(**planned | {"kv_connector_extra_config": {"connectors": left}})
        (text,) = found(plan, "kv_cache", BF16, kv_transfer_config=changed)
        assert "offloading to host memory" in text
    (text,) = found(plan, "kv_cache", BF16)
    assert "no KV connector" in text


def loaded(**sizes: int) -> list[tuple[str, Any]]:
    """Parameters of two layers, as a GPU's worker has them, with so many bytes per element: a CPU build has no FP8 of
    vLLM's to load."""
    names = {"router": "mlp.gate.weight", "linear": "self_attn.qkv_proj.weight", "w13": "mlp.experts.w13_weight",
             "w2": "mlp.experts.w2_weight"}  # fmt: skip
    dtypes = {1: torch.float8_e4m3fn, 2: torch.bfloat16}
    bytes_of = {"router": 2, "linear": 1, "w13": 1, "w2": 1} | sizes
    return [
        (f"model.layers.{layer}.{name}", torch.empty((2, 2, 2) if part.startswith("w") else (2, 2), dtype=dtypes[size]))
        for layer in (0, 1)
        for part, name in names.items()
        for size in (bytes_of[part],)
    ]


def fp8_decision(**section: Any) -> Decision:
    profile = profile_with(passes={"fp8": {"mode": "on", **section}})
    return made_plan(qwen3_30b_a3b(), gpus("h200", 1), profile).decision("fp8")


def test_weights_that_vllm_converted_are_shown_by_their_width() -> None:
    assert unconverted(fp8_decision(), loaded()) == ()


@pytest.mark.parametrize(
    ("parameters", "difference"),
    [
        (loaded(w2=2), "experts: 2 of 4 .*model.layers.0.mlp.experts.w2_weight"),
        (loaded(linear=2), "linears: none of 4"),
        ([], "experts: 0 of 0 "),
    ],
    ids=["experts", "linears", "no-weights"],
)
def test_weights_that_vllm_left_wide_are_named(parameters: list[tuple[str, Any]], difference: str) -> None:
    assert any(re.match(difference, text) for text in unconverted(fp8_decision(), parameters))


def test_layers_that_the_profile_keeps_may_stay_wide() -> None:
    wide = [(name, value) for name, value in loaded(w13=2, w2=2) if ".1." in name]
    narrow = [(name, value) for name, value in loaded() if ".0." in name]
    assert unconverted(fp8_decision(keep_bf16_layers=["layers.1"]), narrow + wide) == ()
    assert unconverted(fp8_decision(), narrow + wide) != ()


@pytest.mark.parametrize("enabled", [True, False, None])
def test_a_fusion_is_looked_up_in_vllms_configuration(enabled: bool | None) -> None:
    asked = resolve_wishes(["norm-rope-fusion"], [])
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 1), wishes=asked)
    fusions = SimpleNamespace(enable_qk_norm_rope_fusion=enabled)
    differences_found = found(plan, "norm_rope_fusion", pass_config=fusions)
    assert bool(differences_found) is (enabled is not True)


def test_eager_is_a_flag_like_others() -> None:
    profile = profile_with(passes={"graph_capture": {"eager": True}})
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 1), profile)
    assert found(plan, "graph_capture", enforce_eager=True) == ()
    (text,) = found(plan, "graph_capture")
    assert text.startswith("--enforce-eager:")


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_flag_of_a_golden_plan_can_be_shown(path: Path) -> None:
    plan = read_plan(path)
    for decision in flag_decisions(plan):
        found(plan, decision.pass_name)


@pytest.fixture
def session(tmp_path: Path) -> PluginSession:
    return PluginSession(run_dir=tmp_path, plan=made_plan(tiny_moe(), cpu_machine()))


def scheduler_of(session: PluginSession) -> Decision:
    assert session.plan is not None
    return session.plan.decision("scheduler")


def worker(session: PluginSession, **changed: Any) -> Any:
    planned = dataclasses.asdict(scheduler_of(session).params_as(SchedulerParams))
    return SimpleNamespace(vllm_config=vllm_config(**(planned | changed)))


def test_the_proof_says_that_a_worker_runs_with_the_flags(session: PluginSession) -> None:
    prove_flags(session, worker(session), BF16)
    entry = session.proof.passes["scheduler"]
    assert (entry.requested, entry.applied, entry.ran, entry.why_not) == (
        scheduler_of(session).value, True, True, "",
    )  # fmt: skip


def test_the_proof_says_with_what_else_a_worker_runs(session: PluginSession) -> None:
    prove_flags(session, worker(session, max_num_seqs=1), BF16)
    entry = session.proof.passes["scheduler"]
    assert (entry.applied, entry.ran) == (False, False)
    assert entry.why_not.startswith("--max-num-seqs:")


def test_a_vllm_whose_configuration_is_of_another_kind_goes_on_and_the_proof_says_so(session: PluginSession) -> None:
    prove_flags(session, SimpleNamespace(vllm_config=SimpleNamespace()), BF16)
    assert session.proof.passes["scheduler"].why_not.startswith("cannot be shown: ")


def test_a_plan_that_was_made_in_a_running_vllm_gave_it_no_flags(session: PluginSession, tmp_path: Path) -> None:
    assert session.plan is not None
    plan = session.plan
    later = PluginSession(run_dir=tmp_path, make_plan=lambda _facts: plan)
    later.plan = plan
    prove_flags(later, worker(session), BF16)
    assert later.proof.passes == {}


def test_a_variable_that_vllm_has_set_for_itself_is_found() -> None:
    plan = made_plan(qwen3_30b_a3b_fp8(), gpus("h100_sxm", 1))
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    decision = plan.decision("fp8")
    assert other_variables(decision, {name: "0"}) == ()
    assert other_variables(decision, {name: "1"}) == (f"{name}: the worker has 1, planned 0",)
    assert "none" in other_variables(decision, {})[0]


def test_another_backend_than_the_fastest_is_found() -> None:
    chosen = Decision(
        pass_name="flash_dmoe", wish=Wish.AUTO, wish_origin="", status=Status.ON, value="vLLM's marlin experts",
        reason="measured", applier=Applier.FLAGS, vllm_args=ServeArguments("--moe-backend", "marlin"),
    )  # fmt: skip
    assert differences(chosen, chosen.vllm_args, vllm_config(moe_backend="marlin"), BF16) == ()
    (difference,) = differences(chosen, chosen.vllm_args, vllm_config(), BF16)
    assert "--moe-backend: vLLM runs with auto" in difference
