"""What a refusal says."""

from __future__ import annotations

import pytest

from moe_optimizer.errors import MoeOptimizerError


def message(error: pytest.ExceptionInfo[MoeOptimizerError]) -> str:
    """Return the message, which is one short line without terminal escapes."""
    text = str(error.value)
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 400
    return text
