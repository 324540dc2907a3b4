"""A plan of the bundled model on a CPU in this process, without a vLLM that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.plan.decision import Wish
from moe_optimizer.planner import make_plan
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.builders import cpu_machine, request, tiny_moe
from tests.plugin_state import own_session


@pytest.fixture
def activate_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginSession]:
    """Makes a plan this process's own in which one pass is switched on, or is as by default."""

    def activate(name: str, *, on: bool, required: bool, **fields: Any) -> PluginSession:
        wishes = {name: (Wish.ON, "test")} if on else {}
        needed = frozenset({name}) if required else frozenset[str]()
        plan = make_plan(request(tiny_moe(), cpu_machine(), wishes=wishes, required=needed, **fields))
        session = PluginSession(run_dir=tmp_path, plan=plan)
        own_session(monkeypatch, session)
        return session

    return activate
