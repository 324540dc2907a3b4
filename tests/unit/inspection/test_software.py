"""What is installed is found once, for every command and for the plugin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection.software import OPTIONAL_PACKAGES, read_software


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
