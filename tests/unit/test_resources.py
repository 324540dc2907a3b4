"""The shipped data files are found."""

from __future__ import annotations

from moe_optimizer.resources import config_dir


def test_config_dir_holds_the_profiles_and_hardware_facts() -> None:
    assert (config_dir() / "balanced.yaml").is_file()
    assert (config_dir() / "hardware" / "h200.yaml").is_file()
