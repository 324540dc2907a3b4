"""What a worker's vLLM has captured, against the plan. With vLLM's own objects: tests/vllm/test_captured_graphs.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.plan.pass_params import GraphCaptureParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import PassProof
from moe_optimizer.proof.table import proof_rows
from moe_optimizer.proof.verdict import not_running
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker import captured_graphs
from moe_optimizer.vllm_plugin.worker.execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.worker.planned_flags import prove_flags
from tests.builders import gpus, made_plan, profile_with, qwen3_30b_a3b
from tests.unit.vllm_plugin.worker.test_planned_flags import BF16, vllm_config

PASS = "graph_capture"


def planned(**passes: Any) -> Plan:
    return made_plan(qwen3_30b_a3b(), gpus("h200", 2), profile_with(passes=passes))


PLAN = planned()
SIZE = PLAN.decision(PASS).params_as(GraphCaptureParams).max_capture_size


@pytest.fixture
def session(tmp_path: Path) -> Iterator[PluginSession]:
    started = PluginSession(run_dir=tmp_path, plan=PLAN)
    started.proof.model_rank, started.proof.world_size = 0, 1
    yield started
    # The module keeps what it waits for, one model per process.
    captured_graphs._awaited = None


def worker(*sizes: int, mode: str = "FULL_AND_PIECEWISE", second_runner: bool = False, **changed: Any) -> Any:
    graphs = {mode: [SimpleNamespace(num_tokens=size) for size in sizes]}
    config = vllm_config(
        max_cudagraph_capture_size=SIZE, cudagraph_mode=mode, **({"data_parallel_size": 1} | PLAN_FLAGS | changed)
    )
    runner = (
        SimpleNamespace(cudagraph_manager=SimpleNamespace(_capture_descs=graphs))
        if second_runner
        else SimpleNamespace(cudagraph_dispatcher=SimpleNamespace(cudagraph_keys=graphs))
    )
    return SimpleNamespace(vllm_config=config, model_runner=runner)


PLAN_FLAGS = {"enable_expert_parallel": False, "enable_dbo": False, "max_num_batched_tokens": 8192}


def served(session: PluginSession, loaded: Any) -> PassProof:
    """The proof of a worker that was loaded and took its first request."""
    prove_flags(session, loaded, BF16)
    step(loaded)
    return session.proof.passes[PASS]


def step(loaded: Any) -> None:
    executed = WORKER_EXECUTE_MODEL.replacement(lambda wrapper, output: output)
    assert executed(SimpleNamespace(worker=loaded), "output") == "output"


@pytest.mark.parametrize("second_runner", [False, True], ids=["V1", "V2"])
def test_what_is_captured_as_planned_is_shown(session: PluginSession, second_runner: bool) -> None:
    entry = served(session, worker(1, 8, SIZE, second_runner=second_runner))
    assert (entry.applied, entry.ran, entry.why_not, entry.found) == (True, True, "", f"up to {SIZE}")
    (row,) = [row for row in proof_rows(PLAN, [session.proof]) if row.pass_name == PASS]
    assert row.ran == f"yes, {entry.found}"


@pytest.mark.parametrize(
    ("loaded", "reason"),
    [
        (worker(1, 64, mode="FULL_DECODE_ONLY"), "64 (FULL_DECODE_ONLY)"),
        (worker(mode="NONE"), "0 (NONE)"),
        (worker(1, 64, second_runner=True), "64 (FULL_AND_PIECEWISE)"),
    ],
    ids=["lowered", "none", "lowered, V2"],
)
def test_what_vllm_lowered_after_loading_does_not_run(session: PluginSession, loaded: Any, reason: str) -> None:
    entry = served(session, loaded)
    assert (entry.applied, entry.ran) == (False, False)
    assert entry.why_not.endswith(f" {reason}, planned {SIZE}")
    assert not_running(PLAN, [session.proof], [PASS]) == {PASS: entry.why_not}


def test_until_a_request_has_run_nothing_is_shown(session: PluginSession) -> None:
    prove_flags(session, worker(SIZE), BF16)
    assert "no request" in not_running(PLAN, [session.proof], [PASS])[PASS]


def test_a_rank_of_data_parallelism_shows_what_is_configured_until_its_first_request(session: PluginSession) -> None:
    loaded = worker(64, data_parallel_size=2)
    prove_flags(session, loaded, BF16)
    assert session.proof.passes[PASS].ran
    step(loaded)
    assert not session.proof.passes[PASS].ran


def test_a_vllm_that_keeps_its_graphs_elsewhere_goes_on_and_the_proof_says_so(session: PluginSession) -> None:
    loaded = worker(SIZE)
    loaded.model_runner = SimpleNamespace()
    assert served(session, loaded).why_not.startswith("cannot be shown: ")


def test_only_the_first_step_looks(session: PluginSession) -> None:
    loaded = worker(SIZE)
    served(session, loaded)
    loaded.model_runner = None
    step(loaded)
    assert session.proof.passes[PASS].why_not == ""


def test_a_plan_without_graphs_waits_for_none(tmp_path: Path) -> None:
    plan = planned(graph_capture={"eager": True})
    session = PluginSession(run_dir=tmp_path, plan=plan)
    loaded = worker(enforce_eager=True)
    prove_flags(session, loaded, BF16)
    loaded.model_runner = None
    step(loaded)
    assert (session.proof.passes[PASS].ran, session.proof.passes[PASS].why_not) == (True, "")
