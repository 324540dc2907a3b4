"""Counts on the metrics page of the server."""

from __future__ import annotations

from pathlib import Path

import prometheus_client
import pytest

from moe_optimizer.cli.expert_metrics import parse_metrics
from moe_optimizer.errors import InputError
from moe_optimizer.proof.record import Proof, ProofWriter
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad
from moe_optimizer.vllm_plugin.expert_load.metrics import expert_load_metrics
from moe_optimizer.vllm_plugin.expert_load.writer import part_path
from moe_optimizer.vllm_plugin.metrics_page import RunCollector

LOAD = ExpertLoad(
    model='a"b\\c',
    num_experts=2,
    layers=(
        LayerLoad(index=0, name="layers.0", tokens=(30, 10)),
        LayerLoad(index=3, name="layers.3", tokens=(2**60, 0)),
        LayerLoad(index=4, name="layer 4", tokens=(0, 0)),
    ),
    since="2026-11-20T10:00:00+00:00",
    steps=7,
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    monkeypatch.setenv("MOE_OPTIMIZER_EXPERT_SERIES", "1")
    return prometheus_client.CollectorRegistry()


def page_of(run_dir: Path, registry: prometheus_client.CollectorRegistry) -> str:
    page = RunCollector(run_dir)
    page.parts.append(expert_load_metrics)
    registry.register(page)
    return prometheus_client.generate_latest(registry).decode()


def test_the_metrics_page_is_read_back_as_the_load_it_shows(
    tmp_path: Path, registry: prometheus_client.CollectorRegistry
) -> None:
    part_path(tmp_path, 0).parent.mkdir()
    part_path(tmp_path, 0).write_text(LOAD.to_json())
    page = page_of(tmp_path, registry)
    assert parse_metrics(page, origin="page") == LOAD
    assert 'moe_optimizer_expert_load_rank_imbalance_ratio{layer="0",model_name="a\\"b\\\\c",ranks="2"} 1.5' in page


def test_the_model_is_called_as_in_vllms_metrics(tmp_path: Path, registry: prometheus_client.CollectorRegistry) -> None:
    part_path(tmp_path, 0).parent.mkdir()
    part_path(tmp_path, 0).write_text(LOAD.to_json())
    proof = Proof(
        role="worker", rank=0, pid=1, plan_digest="", versions={}, world_size=1, model_rank=0, served_model_name="chat"
    )
    ProofWriter(tmp_path, proof).write()
    assert parse_metrics(page_of(tmp_path, registry), origin="page").model == "chat"


def test_before_the_first_step_the_page_shows_nothing_of_ours(
    tmp_path: Path, registry: prometheus_client.CollectorRegistry
) -> None:
    assert "moe_optimizer" not in page_of(tmp_path, registry)


def test_without_being_asked_for_there_are_figures_and_no_series_of_experts(
    tmp_path: Path, registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOE_OPTIMIZER_EXPERT_SERIES")
    part_path(tmp_path, 0).parent.mkdir()
    part_path(tmp_path, 0).write_text(LOAD.to_json())
    page = page_of(tmp_path, registry)
    assert "moe_optimizer_expert_load_max_over_mean_ratio{" in page
    assert "expert=" not in page
    with pytest.raises(InputError, match="no expert load") as caught:
        parse_metrics(page, origin="page")
    assert "MOE_OPTIMIZER_EXPERT_SERIES=1" in str(caught.value.hint)
