"""A plan of the bundled model on a CPU in this process, without a vLLM that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection.activation_norms import read_activation_norms_file
from moe_optimizer.plan.decision import Wish
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.builders import cpu_machine, made_plan, profile_with, tiny_moe
from tests.plugin_state import own_session


@pytest.fixture
def activate_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginSession]:
    """Makes a plan this process's own in which one pass is switched on with these settings, or is as by default."""

    def activate(
        name: str, *, on: bool = True, required: bool = False, norms: str | None = None, **settings: Any
    ) -> PluginSession:
        wishes = {name: (Wish.ON, "test")} if on else {}
        needed = frozenset({name}) if required else frozenset[str]()
        plan = made_plan(
            tiny_moe(), cpu_machine(), profile_with(passes={name: settings}), wishes=wishes, required=needed,
            activation_norms=read_activation_norms_file(norms),
        )  # fmt: skip
        session = PluginSession(run_dir=tmp_path, plan=plan)
        own_session(monkeypatch, session)
        return session

    return activate
