"""Two servers behind the real router, dealt requests in turns; the servers are stand-ins that speak real HTTP.

That vLLM counts what turns are told by: tests/vllm/test_flag_passes.py.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_optimizer.errors import ExitCode, ServerFailedError
from moe_optimizer.launcher import deployment
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.proof.verdict import model_holders
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.free_ports import free_ports
from tests.run_processes import processes_of
from tests.served_until import serve

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs the package vllm-router")
ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "unit" / "launcher" / "fake_server.py"
REQUESTS = 6


@dataclass
class Seen:
    """What the servers took while they ran, and how the run ended."""

    run_dir: Path
    info: ServerInfo | None = None
    taken: tuple[int, ...] = ()
    error: ServerFailedError | None = None


def fake_command(plan: Plan, arguments: ServeArguments) -> list[str]:
    return [sys.executable, str(FAKE), str(arguments.value("--port"))]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Serve, ask, kill the second server."""
    seen = Seen(tmp_path_factory.mktemp("run") / "group")

    def visit(info: ServerInfo) -> None:
        seen.info = info
        clients = [ServerClient(server.base_url) for server in info.servers]
        before = [prompt_tokens(client) or 0 for client in clients]
        for _ in range(REQUESTS):
            ServerClient(info.base_url).complete("a", max_tokens=1, timeout_s=60)
        seen.taken = tuple((prompt_tokens(client) or 0) - old for client, old in zip(clients, before, strict=True))
        os.kill(info.servers[1].pid, signal.SIGKILL)

    plan = made_plan(
            tiny_moe(), cpu_machine(cores=2), port=free_ports(4), required=frozenset({"replicas", "flash_dmoe"}),
            wishes=resolve_wishes(["replicas"], ["expert-load"]),
        )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setattr(deployment, "check_plugin_visible", lambda plan: None)
        patch.setattr(deployment, "server_command", fake_command)
        with pytest.raises(ServerFailedError) as caught:
            serve(plan, run_dir=seen.run_dir, on_ready=visit)
    seen.error = caught.value
    return seen


def test_every_server_took_a_request_before_they_counted_as_ready(seen: Seen) -> None:
    assert seen.info is not None
    (row,) = [row for row in seen.info.rows if row.pass_name == "replicas"]
    assert (row.applied, row.ran, row.why_not) == ("by servers", "yes, 2 servers", "")


def test_each_server_proves_its_kernel(seen: Seen) -> None:
    assert seen.info is not None
    for server in seen.info.servers:
        assert [proof.passes["flash_dmoe"].ran for proof in model_holders(server.proofs)] == [True]


def test_requests_are_dealt_in_turns(seen: Seen) -> None:
    assert seen.taken == (REQUESTS // 2, REQUESTS // 2)


def test_the_death_of_one_server_ends_everything_and_names_it(seen: Seen) -> None:
    assert seen.error is not None
    assert str(seen.error).startswith("replica-1 server")
    assert seen.error.exit_code is ExitCode.SERVER_FAILED
    assert processes_of(seen.run_dir) == []
