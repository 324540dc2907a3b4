"""The plugin keeps one session and one list of patches per process; a test of either begins without them."""

from __future__ import annotations

import pytest

from moe_optimizer.vllm_plugin import patch as patches
from moe_optimizer.vllm_plugin import session as sessions
from moe_optimizer.vllm_plugin.session import PluginSession


def own_session(monkeypatch: pytest.MonkeyPatch, session: PluginSession | None = None) -> None:
    """Give this process `session`, or none, until the test ends."""
    monkeypatch.setattr(sessions, "_current", session)


def own_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which patches were applied in this process until the test ends; none waits into another test's import."""
    monkeypatch.setattr(patches, "_reports", {})
    monkeypatch.setattr(patches, "_waiting", {})
