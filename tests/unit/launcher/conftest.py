"""A plan whose server is the stand-in for vLLM."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from moe_optimizer.launcher import deployment, evidence, supervisor
from moe_optimizer.plan.plan import Plan
from moe_optimizer.planner import make_plan
from tests.builders import OURS, cpu_machine, request, tiny_moe
from tests.free_ports import free_port
from tests.unit.launcher.stand_in import FAKE, ROOT, Fake


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Makes a plan whose server is the stand-in with some behaviours."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(deployment, "check_plugin_visible", lambda plan: None)
    monkeypatch.setattr(evidence, "PROOF_WAIT_S", 1.0)
    monkeypatch.setattr(supervisor, "NOTICE_S", 1.0)

    def make(*behaviour: str, port: int | None = None, **changes: Any) -> Plan:
        port = port or free_port()
        command = [sys.executable, *FAKE, str(port), *behaviour]
        monkeypatch.setattr(deployment, "server_command", lambda plan, arguments: command)
        return make_plan(request(tiny_moe(), cpu_machine(), port=port, wishes=OURS, **changes))

    return make
