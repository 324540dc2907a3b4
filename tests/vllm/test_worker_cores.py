"""Speeds are filed under the threads that vLLM's own CPU build gives to a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moe_optimizer.inspection.hardware_probe import probe_hardware
from moe_optimizer.plan_context.cpu_workers import worker_cores
from tests.builders import context, decided_by, software, tiny_moe


def test_a_worker_is_bound_as_vllm_binds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    manager = pytest.importorskip("vllm.utils.ompmultiprocessing").OMPProcessManager
    parallel = SimpleNamespace(local_world_size=1, data_parallel_rank_local=0, _api_process_count=1)
    theirs = manager(SimpleNamespace(parallel_config=parallel, kv_transfer_config=None))
    ctx = decided_by(context(tiny_moe(), probe_hardware(), software=software("cpu"), device="cpu"), "parallelism")
    assert list(worker_cores(ctx)) == theirs.cpu_lists[0]
