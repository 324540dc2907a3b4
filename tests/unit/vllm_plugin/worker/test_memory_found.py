"""What the parts of a worker take: written in the first step, and planned beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.proof.record import MemoryProof
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker import memory_found
from moe_optimizer.vllm_plugin.worker.memory_found import await_memory, memory_of, prove_memory
from tests.builders import cpu_machine, made_plan, tiny_moe


def worker(**fields: Any) -> Any:
    model = torch.nn.Linear(4, 8, bias=False)
    model.register_buffer("scale", torch.zeros(2))
    model.register_parameter("tied", torch.nn.Parameter(model.weight[:2]))
    cache = torch.zeros(16, dtype=torch.uint8)
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[cache, [cache[:8], torch.zeros(3, dtype=torch.uint8)]])
    return SimpleNamespace(model_runner=runner, **fields)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[PluginSession]:
    started = PluginSession(run_dir=tmp_path, plan=made_plan(tiny_moe(), cpu_machine()))
    yield started
    prove_memory(SimpleNamespace(worker=worker()))  # it waits for no further step


def test_what_tensors_share_is_counted_once() -> None:
    found = memory_of(worker())
    expected = MemoryProof(weight_bytes=4 * 32 + 4 * 2, kv_cache_bytes=19, activation_bytes=None)
    assert dataclasses.replace(found, workspace_bytes=None) == expected


def test_on_a_cpu_the_workspace_is_the_rest_of_the_process() -> None:
    """A cache that grows by what the process grows leaves the rest as it was."""
    small = memory_of(worker())
    larger = worker()
    larger.model_runner.kv_caches = [torch.zeros(64 << 20, dtype=torch.uint8)]
    found = memory_of(larger)
    assert small.workspace_bytes is not None
    assert found.workspace_bytes is not None
    assert small.workspace_bytes > 64 << 20
    assert abs(found.workspace_bytes - small.workspace_bytes) < 16 << 20


def test_on_a_gpu_the_workspace_is_what_the_allocator_does_not_hold_and_the_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = [{"segment_pool_id": (0, 0), "total_size": 50}, {"segment_pool_id": (0, 1), "total_size": 6}]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 400))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 250)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pools)
    assert memory_found._workspace_bytes(torch.device("cuda", 0), 0) == 400 - 100 - 250 + 6


def test_activations_are_those_that_vllm_measured() -> None:
    assert memory_of(worker(peak_activation_memory=7)).activation_bytes == 7


def test_the_first_step_writes_it(session: PluginSession) -> None:
    await_memory(session)
    prove_memory(SimpleNamespace(worker=worker()))
    assert session.proof.memory is not None
    session.proof.memory = None
    prove_memory(SimpleNamespace(worker=worker()))
    assert session.proof.memory is None


def test_a_worker_that_keeps_things_elsewhere_serves_on(session: PluginSession) -> None:
    await_memory(session)
    prove_memory(SimpleNamespace(worker=SimpleNamespace()))
    assert session.proof.memory is None
