"""What the metrics page of the server says of versions and passes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import prometheus_client
import pytest

from moe_optimizer.proof.record import PassProof, Proof, ProofWriter, read_proofs
from moe_optimizer.proof.step_count import StepCount
from moe_optimizer.vllm_plugin.metrics_page import RunCollector
from moe_optimizer.vllm_plugin.proof_metrics import proof_metrics


def page_of(run_dir: Path, *workers: dict[str, PassProof]) -> str:
    for rank, passes in enumerate(workers):
        proof = Proof(
            role="worker", rank=rank, pid=rank, plan_digest="abc", versions={"moe_optimizer": "1", "vllm": "2"},
            world_size=len(workers), model_rank=rank, served_model_name="chat", passes=passes,
        )  # fmt: skip
        ProofWriter(run_dir, proof).write()
    return page_as_it_is(run_dir)


def page_as_it_is(run_dir: Path) -> str:
    registry, page = prometheus_client.CollectorRegistry(), RunCollector(run_dir)
    page.parts.append(proof_metrics)
    registry.register(page)
    return prometheus_client.generate_latest(registry).decode()


def test_versions_and_plan_are_labels_of_a_constant(tmp_path: Path) -> None:
    line = 'moe_optimizer_build_info{model_name="chat",moe_optimizer="1",plan="abc",torch="",vllm="2"} 1.0'
    assert line in page_of(tmp_path, {}).splitlines()


def test_a_pass_is_where_the_last_worker_is(tmp_path: Path) -> None:
    ran, applied = PassProof(requested="x", applied=True, ran=True), PassProof(requested="x", applied=True)
    page = page_of(tmp_path, {"flash_dmoe": ran, "expert_load": ran}, {"flash_dmoe": applied, "expert_load": ran})
    state = 'moe_optimizer_pass_state{model_name="chat",pass="%s",state="%s"} %d.0'
    for name, reached in (("flash_dmoe", "applied"), ("expert_load", "ran")):
        for each in ("not_applied", "applied", "ran"):
            assert state % (name, each, each == reached) in page.splitlines()


def test_without_a_worker_there_is_nothing(tmp_path: Path) -> None:
    assert "moe_optimizer" not in page_of(tmp_path)


def test_the_steps_of_each_worker_and_their_age_are_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    page_of(tmp_path, {}, {})
    first, second = read_proofs(tmp_path)
    counts = StepCount(tmp_path, first), StepCount(tmp_path, second)
    for count in (counts[0], *counts):
        count.step()
        now[0] += 0.5
    page = page_as_it_is(tmp_path)
    for rank, steps, age in ((0, 2, 1.0), (1, 1, 0.5)):
        assert f'moe_optimizer_steps_total{{model_name="chat",rank="{rank}"}} {steps}.0' in page.splitlines()
        assert f'moe_optimizer_last_step_age_seconds{{model_name="chat",rank="{rank}"}} {age}' in page.splitlines()


def test_a_worker_that_is_gone_has_no_heartbeat(tmp_path: Path) -> None:
    page_of(tmp_path, {})
    (proof,) = read_proofs(tmp_path)
    StepCount(tmp_path, dataclasses.replace(proof, pid=99)).step()
    assert "moe_optimizer_steps_total{" not in page_as_it_is(tmp_path)


def test_restarts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_RESTARTS", "3")
    assert 'moe_optimizer_restarts_total{model_name="chat"} 3.0' in page_of(tmp_path, {}).splitlines()
