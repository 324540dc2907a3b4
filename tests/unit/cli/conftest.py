"""Commands run as for a user who has set nothing."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MOE_OPTIMIZER_"):
            monkeypatch.delenv(name)
    # As without a terminal, however wide the one is in which the tests run.
    monkeypatch.setenv("COLUMNS", "80")
