"""A plan whose server is the stand-in for vLLM."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.launcher import deployment, evidence, heartbeat, supervisor
from moe_optimizer.plan.plan import Plan
from tests.builders import OURS, cpu_machine, made_plan, tiny_moe
from tests.free_ports import free_port
from tests.unit.launcher.stand_in import FAKE, ROOT, Fake


@pytest.fixture
def heartbeat_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of heartbeats goes on by 0.4 s each time it is read, however busy the machine is.

    A beat takes 0.4 to 1.2 s then, and a server that stands still is seen 2 to 3 s later for the first time: after a
    limit of 1 s for a warning, and before one of 3 s for a hang.
    """
    times = itertools.count()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: 0.4 * next(times)))
    monkeypatch.setattr(heartbeat, "WARN_AFTER_S", 1.0)


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
        return made_plan(tiny_moe(), cpu_machine(), port=port, wishes=OURS, **changes)

    return make
