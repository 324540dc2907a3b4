"""Which random examples a property takes: all, `scripts/check.sh` the same each time, in its quick form a quarter."""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"
SAME = "same"
"""Profiles of `--hypothesis-profile`, loaded before tests are collected; tests/conftest.py registers them."""


def examples(full: int) -> int:
    """Return how many of `full` examples the loaded profile takes."""
    return max(full // 4, 1) if settings.get_current_profile_name() == QUICK else full
