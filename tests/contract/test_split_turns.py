"""Two prefill and three decode servers behind the real router; the servers are stand-ins that speak real HTTP.

That caches travel between real servers: tests/vllm/test_disaggregation.py.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_optimizer.launcher import deployment, launch
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import cpu_machine, made_plan, profile_with, tiny_moe
from tests.free_ports import free_ports

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs the package vllm-router")
ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "unit" / "launcher" / "fake_server.py"
PREFILL, DECODE = 2, 3
SERVERS = {"mode": "on", "prefill_servers": PREFILL, "decode_servers": DECODE}


@dataclass
class Seen:
    """What the servers took."""

    info: ServerInfo
    warmed: tuple[int, ...]
    """Requests before they counted as ready."""
    taken: tuple[int, ...]
    """Requests after that."""


def fake_command(plan: Plan, arguments: ServeArguments) -> list[str]:
    return [sys.executable, str(FAKE), str(arguments.value("--port"))]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Serve, warm up, ask as often as brings every server to the beginning of its turns."""
    plan = made_plan(
        tiny_moe(), cpu_machine(cores=PREFILL + DECODE),
        profile_with(passes={"disaggregation": SERVERS, "expert_load": {"mode": "off"}}),
        port=free_ports(PREFILL + DECODE + 2), required=frozenset({"disaggregation"}),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(deployment, "check_plugin_visible", lambda plan: None)
        patch.setattr(deployment, "server_command", fake_command)
        with launch.running(plan, run_dir=tmp_path_factory.mktemp("run") / "group", warm_up_s=60.0) as info:
            clients = [ServerClient(server.base_url) for server in info.servers]
            warmed = tuple(prompt_tokens(client) or 0 for client in clients)
            for _ in range(PREFILL * DECODE):
                ServerClient(info.base_url).complete("a", max_tokens=1, timeout_s=60)
            taken = tuple((prompt_tokens(client) or 0) - old for client, old in zip(clients, warmed, strict=True))
    return Seen(info, warmed, taken)


def test_every_server_took_part_before_they_counted_as_ready(seen: Seen) -> None:
    (row,) = [row for row in seen.info.rows if row.pass_name == "disaggregation"]
    assert (row.applied, row.why_not) == ("by servers", "")
    assert row.ran.endswith(f"{DECODE} decode servers from {PREFILL} prefill")


def test_the_warm_up_reaches_every_server_as_often_as_others_of_its_kind(seen: Seen) -> None:
    prefill, decode = seen.warmed[:PREFILL], seen.warmed[PREFILL:]
    assert min(seen.warmed) > 20
    assert max(prefill) - min(prefill) <= 1
    assert max(decode) - min(decode) <= 1


def test_requests_are_dealt_in_turns_among_each_kind(seen: Seen) -> None:
    assert seen.taken == (DECODE,) * PREFILL + (PREFILL,) * DECODE
