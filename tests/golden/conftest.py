from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare a text with a file, or write it there with --update-golden (give tests/golden as the path)."""

    def compare(text: str, path: Path) -> None:
        if request.config.getoption("--update-golden", default=False):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        hint = "pytest tests/golden --update-golden"
        assert path.is_file(), f"{path.name} is missing; run {hint}"
        assert path.read_text() == text, f"{path.name} differs; if the change is meant, run {hint} and review the diff"

    return compare
