"""The shipped data files and the user's cache are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.inspection.tuned_configs import user_folder
from moe_optimizer.resources import cache_dir, config_dir


def test_config_dir_holds_the_profiles_and_hardware_facts() -> None:
    assert (config_dir() / "balanced.yaml").is_file()
    assert (config_dir() / "hardware" / "h200.yaml").is_file()


def test_the_cache_follows_xdg_where_that_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "moe-optimizer"
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_dir(environ) == tmp_path / "home" / ".cache" / "moe-optimizer"
        assert cache_dir(environ) in user_folder("0.32.0", environ).parents
