"""What a worker says of an FP8 checkpoint that is served as it is: whether its weights are held in FP8.

The modules stand in for vLLM's: a CPU build without AMX loads no such model. `tests/vllm/test_fp8_checkpoint.py` has
vLLM's own layers, as far as they can be built.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import Proof
from moe_optimizer.proof.table import Row, proof_rows
from moe_optimizer.proof.verdict import not_running
from moe_optimizer.specs.model import ExpertFormat
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker.fp8_checkpoint import Fp8InMemory, fp8_in_memory
from moe_optimizer.vllm_plugin.worker.planned_flags import prove_flags
from tests.builders import gpus, made_plan, profile_with, qwen3_30b_a3b, qwen3_30b_a3b_fp8

FP8, WIDE, INT32 = torch.float8_e4m3fn, torch.bfloat16, torch.int32


class Method:
    """Stands in for a quantisation method, which says what the weights of its kernel are."""

    def __init__(self, weights: Any = None) -> None:
        self.moe_quant_config = SimpleNamespace(weight_quant_dtype=weights)


class UnquantizedFusedMoEMethod(Method):
    """Called as vLLM's method of layers that the checkpoint leaves in 16 bits."""


def module(method: Any = None, **weights: torch.dtype) -> torch.nn.Module:
    """Stands in for a layer of vLLM's with these weights."""
    layer: Any = torch.nn.Module()
    for name, dtype in weights.items():
        layer.register_parameter(name, torch.nn.Parameter(torch.empty(2, 2, dtype=dtype), requires_grad=False))
    layer.quant_method = method
    return layer


def experts(dtype: torch.dtype, method: Any = None) -> torch.nn.Module:
    return module(method or Method(), w13_weight=dtype, w2_weight=dtype)


def model(*layers: torch.nn.Module, linear: torch.dtype = WIDE) -> torch.nn.Module:
    """Stands in for a loaded model: a linear, and these experts."""
    whole = torch.nn.Module()
    whole.add_module("qkv_proj", module(weight=linear))
    whole.add_module("layers", torch.nn.ModuleList(layers))
    return whole


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_experts_of_an_fp8_type_are_held_in_fp8(dtype: torch.dtype) -> None:
    assert fp8_in_memory(model(experts(dtype)), "fp8") == Fp8InMemory(found=str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
@pytest.mark.parametrize("weights", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, "mxfp8"])
def test_repacked_experts_are_in_fp8_where_their_kernel_is_configured_for_it(dtype: torch.dtype, weights: Any) -> None:
    found = fp8_in_memory(model(experts(dtype, Method(weights))), "fp8")
    assert found == Fp8InMemory(found=f"FP8 in {str(dtype).removeprefix('torch.')}")


def test_a_method_that_wraps_another_does_not_hide_what_that_says() -> None:
    wrapped = SimpleNamespace(old_quant_method=Method(FP8))
    assert fp8_in_memory(model(experts(INT32, wrapped)), "fp8").why_not == ""


@pytest.mark.parametrize(
    ("layer", "why_not"),
    [
        (experts(WIDE), "experts: 2 of 4 .*layers.1.w13_weight .*: bfloat16"),
        (module(Method(), w13_weight=FP8, w2_weight=torch.float16),
         "experts: 1 of 4 .*layers.1.w2_weight .*: float16"),
        (experts(torch.float8_e5m2),
         "experts: 2 of 4 .*layers.1.w13_weight .*: float8_e5m2"),
        (experts(INT32, Method("int4")),
         "experts: 2 of 4 .*layers.1.w13_weight .*int4 "),
        # A layer that is held otherwise weighs more than one that cannot be told.
        (module(Method(), w13_weight=INT32, w2_weight=WIDE),
         "experts: 1 of 4 .*layers.1.w2_weight .*: bfloat16"),
    ],
    ids=["dequantised", "half", "another-fp8", "packed-int4", "one-untold"],
)  # fmt: skip
def test_what_is_held_in_place_of_fp8_is_named(layer: torch.nn.Module, why_not: str) -> None:
    seen = fp8_in_memory(model(experts(FP8), layer), "fp8")
    assert seen == Fp8InMemory(why_not=seen.why_not)
    assert re.match(why_not, seen.why_not)


@pytest.mark.parametrize("method", [Method(), SimpleNamespace()], ids=["says-nothing", "of-another-kind"])
def test_integers_of_which_nobody_says_what_they_hold_are_not_called_fp8(method: Any) -> None:
    why_not = fp8_in_memory(model(experts(FP8), experts(INT32, method)), "fp8").why_not
    assert why_not.startswith("cannot be shown: ")
    assert "int32" in why_not


def test_a_model_whose_experts_are_not_found_shows_nothing() -> None:
    assert fp8_in_memory(model(linear=FP8), "fp8").why_not.startswith("cannot be shown: ")


@pytest.mark.parametrize(
    ("layer", "why_not"),
    [
        (experts(WIDE, UnquantizedFusedMoEMethod()), ""),
        (experts(torch.uint8, Method("nvfp4")), ""),
        (experts(WIDE), "experts: 2 of 4 .*layers.1.w13_weight .*: bfloat16"),
    ],
    ids=["left-by-the-checkpoint", "of-another-format", "dequantised"],
)
def test_of_experts_that_are_not_all_alike_those_in_fp8_must_be_held_so(layer: torch.nn.Module, why_not: str) -> None:
    assert re.match(why_not or "$", fp8_in_memory(model(experts(FP8), layer), "other").why_not)


@pytest.mark.parametrize("expert_format", ["none", "dtype", "other"])
@pytest.mark.parametrize(
    ("linear", "found", "why_not"),
    [
        (FP8, "linears float8_e4m3fn", "$"),
        (WIDE, "", "linears: .* 1 bfloat16"),
        (INT32, "", "cannot be shown: qkv_proj.weight .*int32"),
    ],
    ids=["fp8", "wide", "packed"],
)
def test_where_no_experts_are_in_fp8_the_linears_show_it(
    expert_format: ExpertFormat, linear: torch.dtype, found: str, why_not: str
) -> None:
    layer = experts(WIDE, UnquantizedFusedMoEMethod())
    seen = fp8_in_memory(model(layer, linear=linear), expert_format)
    assert seen.found == found
    assert re.match(why_not, seen.why_not)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made_plan(qwen3_30b_a3b_fp8(), gpus("h200", 2), profile_with(passes={"fp8": {"mode": "on"}}))


@pytest.fixture(autouse=True)
def _variables_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")


def proof_of(plan: Plan, run_dir: Path, rank: int, held: torch.nn.Module | None) -> Proof:
    """The proof that a worker with this model writes; None: its vLLM has not the model where we look."""
    session = PluginSession(run_dir=run_dir, plan=plan)
    runner = SimpleNamespace() if held is None else SimpleNamespace(get_model=lambda: held)
    prove_flags(session, SimpleNamespace(vllm_config=SimpleNamespace(), model_runner=runner), {})
    return dataclasses.replace(session.proof, role="worker", rank=rank, model_rank=rank, world_size=2)


def fp8_row(plan: Plan, proofs: list[Proof]) -> Row:
    return next(row for row in proof_rows(plan, proofs) if row.pass_name == "fp8")


HELD = "float8_e4m3fn, VLLM_USE_DEEP_GEMM_E8M0=0"
IN_FP8, DEQUANTISED = model(experts(FP8)), model(experts(WIDE))


def test_every_worker_that_holds_fp8_says_so(plan: Plan, tmp_path: Path) -> None:
    proofs = [proof_of(plan, tmp_path, rank, IN_FP8) for rank in (0, 1)]
    row = fp8_row(plan, proofs)
    assert (row.requested, row.applied, row.why_not) == (plan.decision("fp8").value, "yes, 2 workers", "")
    assert row.ran.split(", ") == ["yes", "2 workers", *HELD.split(", ")]
    assert not_running(plan, proofs, ["fp8"]) == {}


@pytest.mark.parametrize(
    ("held", "why_not"),
    [
        (DEQUANTISED, "experts: 2 of 2 .*layers.0.w13_weight .*: bfloat16"),
        (model(experts(INT32)), "cannot be shown: .*int32"),
        (None, "cannot be shown: "),
    ],
    ids=["dequantised", "untold", "another-vllm"],
)
def test_one_worker_that_holds_something_else_fails_the_requirement(
    plan: Plan, tmp_path: Path, held: torch.nn.Module | None, why_not: str
) -> None:
    proofs = [proof_of(plan, tmp_path, 0, IN_FP8), proof_of(plan, tmp_path, 1, held)]
    assert re.match(why_not, not_running(plan, proofs, ["fp8"])["fp8"])
    row = fp8_row(plan, proofs)
    assert (row.applied, row.ran) == ("1 of 2 workers", f"1 of 2 workers, {HELD}")
    assert re.match(why_not, row.why_not)


def test_a_requirement_is_not_met_by_workers_that_were_not_heard_of(plan: Plan, tmp_path: Path) -> None:
    proof = proof_of(plan, tmp_path, 0, IN_FP8)
    assert "1 of 2" in not_running(plan, [proof], ["fp8"])["fp8"]
    unseen: dict[str, Any] = {}
    silent = [dataclasses.replace(proof, passes=unseen, model_rank=rank) for rank in (0, 1)]
    assert "no worker shows" in not_running(plan, silent, ["fp8"])["fp8"]
    assert "no worker process" in not_running(plan, [], ["fp8"])["fp8"]


def test_a_checkpoint_that_is_left_alone_with_the_pass_off_is_not_looked_at(tmp_path: Path) -> None:
    passes = {"fp8": {"mode": "off"}}
    for checkpoint in (qwen3_30b_a3b_fp8(), qwen3_30b_a3b()):
        plan = made_plan(checkpoint, gpus("h200"), profile_with(passes=passes))
        assert "fp8" not in proof_of(plan, tmp_path, 0, DEQUANTISED).passes
