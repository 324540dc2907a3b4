"""Process roles from the names that vLLM gives its processes."""

from __future__ import annotations

import pytest

from moe_optimizer.vllm_plugin.role import ProcessRole, role_of


@pytest.mark.parametrize(
    ("process_name", "main_module", "expected"),
    [
        ("MainProcess", "vllm.entrypoints.openai.api_server", ProcessRole("frontend", 0)),
        ("MainProcess", "vllm.model_executor.models.registry", ProcessRole("helper", 0)),
        ("ApiServer_1", "__mp_main__", ProcessRole("frontend", 1)),
        ("EngineCore", "", ProcessRole("engine", 0)),
        ("EngineCore_DP1", "", ProcessRole("engine", 1)),
        ("VllmWorker-0", "", ProcessRole("worker", 0)),
        ("VllmWorker-11", "", ProcessRole("worker", 11)),
    ],
)
def test_a_processs_role_follows_from_its_name_and_module(
    process_name: str, main_module: str, expected: ProcessRole
) -> None:
    assert role_of(process_name, main_module) == expected
