"""What is installed is found once, for every command and for the plugin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection.software import OPTIONAL_PACKAGES, kernel_environment, read_software


@pytest.fixture
def optional_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs empty packages of the optional ones' names."""
    for name in OPTIONAL_PACKAGES:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def test_an_optional_package_is_found_when_it_is_installed(request: pytest.FixtureRequest) -> None:
    before: dict[str, Any] = dataclasses.asdict(read_software())
    request.getfixturevalue("optional_packages")
    after: dict[str, Any] = dataclasses.asdict(read_software())
    for name in OPTIONAL_PACKAGES:
        assert (before[name], after[name]) == (False, True)


def test_the_folder_of_tuned_configurations_is_the_variables_if_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    software = read_software()
    assert (software.tuned_configs, software.tuned_configs_by_variable) == (str(tmp_path), True)


def test_variables_that_change_vllms_kernels_are_named_and_no_others() -> None:
    environ = {"VLLM_USE_DEEP_GEMM": "1", "VLLM_API_KEY": "secret", "VLLM_BATCH_INVARIANT": "0", "MOE": "x"}
    environ["VLLM_USE_DEEP_GEMM_E8M0"] = "1"  # vLLM sets it in its own processes
    assert kernel_environment(environ) == "VLLM_BATCH_INVARIANT=0 VLLM_USE_DEEP_GEMM=1"


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0", ""),
        ("VLLM_USE_RUST_FRONTEND", "1", "VLLM_USE_RUST_FRONTEND"),
    ],
)
def test_a_variable_with_which_vllm_has_one_api_server_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, found: str
) -> None:
    monkeypatch.setenv(name, value)
    assert read_software().one_api_server == found


def test_how_the_user_binds_workers_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (read_software().core_binding, read_software().reserved_cores) == ("auto", None)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "2")
    assert (read_software().core_binding, read_software().reserved_cores) == ("0-3", 2)
