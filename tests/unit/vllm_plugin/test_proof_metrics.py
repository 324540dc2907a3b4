"""What the metrics page of the server says of versions and passes."""

from __future__ import annotations

from pathlib import Path

import prometheus_client

from moe_optimizer.proof.record import PassProof, Proof, ProofWriter
from moe_optimizer.vllm_plugin.proof_metrics import ProofCollector


def page_of(run_dir: Path, *workers: dict[str, PassProof]) -> str:
    for rank, passes in enumerate(workers):
        proof = Proof(
            role="worker", rank=rank, pid=rank, plan_digest="abc", versions={"moe_optimizer": "1", "vllm": "2"},
            world_size=len(workers), model_rank=rank, served_model_name="chat", passes=passes,
        )  # fmt: skip
        ProofWriter(run_dir, proof).write()
    registry = prometheus_client.CollectorRegistry()
    registry.register(ProofCollector(run_dir))
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
