"""What the parts of a worker take: written in the first step, and planned beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.planner import make_plan
from moe_optimizer.proof.record import MemoryProof
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker.memory_found import await_memory, memory_of, prove_memory
from tests.builders import cpu_machine, request, tiny_moe


def worker(**fields: Any) -> Any:
    model = torch.nn.Linear(4, 8, bias=False)
    model.register_buffer("scale", torch.zeros(2))
    model.register_parameter("tied", torch.nn.Parameter(model.weight[:2]))
    cache = torch.zeros(16, dtype=torch.uint8)
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[cache, [cache[:8], torch.zeros(3, dtype=torch.uint8)]])
    return SimpleNamespace(model_runner=runner, **fields)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[PluginSession]:
    started = PluginSession(run_dir=tmp_path, plan=make_plan(request(tiny_moe(), cpu_machine())))
    yield started
    prove_memory(SimpleNamespace(worker=worker()))  # it waits for no further step


def test_what_tensors_share_is_counted_once() -> None:
    found = memory_of(worker())
    assert found == MemoryProof(weight_bytes=4 * 32 + 4 * 2, kv_cache_bytes=19, activation_bytes=None)


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
