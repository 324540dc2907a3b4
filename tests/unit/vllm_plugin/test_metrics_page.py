"""The one collector on the metrics page, also on the page that several API servers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import multiprocess

from moe_optimizer.vllm_plugin import metrics_page
from moe_optimizer.vllm_plugin.patch import probe


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    own = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(metrics_page, "REGISTRY", own)
    monkeypatch.setattr(metrics_page, "_pages", {})
    monkeypatch.setattr(metrics_page, "apply_when_imported", lambda patch, **_: None)
    return own


def steps(run_dir: Path, proofs: object) -> Iterator[prometheus_client.Metric]:
    yield prometheus_client.Metric("steps", str(run_dir), "gauge")


def pages(registry: prometheus_client.CollectorRegistry) -> int:
    return prometheus_client.generate_latest(registry).decode().count("# TYPE steps gauge")


def test_a_part_is_shown_once(tmp_path: Path, registry: prometheus_client.CollectorRegistry) -> None:
    for _ in range(2):
        metrics_page.show_on_metrics(tmp_path, steps)
    assert pages(registry) == 1


def test_the_page_of_several_api_servers_has_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    metrics_page.show_on_metrics(tmp_path, steps)
    patch, shared = metrics_page.SHARED_PAGE, prometheus_client.CollectorRegistry()
    assert probe(patch, Path(multiprocess.__file__)) == ""
    replaced = patch.replacement(multiprocess.MultiProcessCollector.collect)
    monkeypatch.setattr(multiprocess.MultiProcessCollector, "collect", replaced)
    multiprocess.MultiProcessCollector(shared)
    assert pages(shared) == 1


def test_the_workers_files_are_not_read_for_every_page(
    tmp_path: Path, registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    looked: list[Path] = []

    def looking(run_dir: Path, proofs: object) -> Iterator[prometheus_client.Metric]:
        looked.append(run_dir)
        yield from steps(run_dir, proofs)

    metrics_page.show_on_metrics(tmp_path, looking)
    assert [pages(registry) for _ in range(3)] == [1, 1, 1]
    assert len(looked) == 1
    now[0] = 60.0
    assert pages(registry) == 1
    assert len(looked) == 2
