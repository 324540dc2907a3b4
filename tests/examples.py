"""How many random examples a property takes: all of them, or in `scripts/check.sh quick` a quarter."""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"
"""The profile of `--hypothesis-profile quick`, loaded before tests are collected; tests/conftest.py registers it."""


def examples(full: int) -> int:
    """Return how many of `full` examples the loaded profile takes."""
    return max(full // 4, 1) if settings.get_current_profile_name() == QUICK else full
