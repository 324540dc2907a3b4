"""Two whole vLLM servers behind the real router: started once, asked, then broken."""

from __future__ import annotations

import importlib.util
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo, serve
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.proof.verdict import kernels_in_use
from tests.free_ports import four_free_ports
from tests.run_processes import processes_of
from tests.vllm.conftest import PROMPTS, READY_TIMEOUT_S, Answer, Served, ask, tiny_plan

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs the package vllm-router"),
]


@dataclass
class Seen:
    """What the servers answered while they ran, and how the run ended."""

    run_dir: Path
    info: ServerInfo | None = None
    answers: tuple[tuple[Answer, ...], ...] = ()
    taken: tuple[int, ...] = ()
    error: ServerFailedError | None = None


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Serve, ask twice, kill the second server's engine."""
    seen = Seen(tmp_path_factory.mktemp("run") / "group")

    def visit(info: ServerInfo) -> None:
        seen.info = info
        clients = [ServerClient(server.base_url) for server in info.servers]
        before = [prompt_tokens(client) or 0 for client in clients]
        seen.answers = tuple(ask(info.base_url) for _ in clients)
        seen.taken = tuple((prompt_tokens(client) or 0) - old for client, old in zip(clients, before, strict=True))
        (engine,) = [proof.pid for proof in info.servers[1].proofs if proof.role == "engine"]
        os.kill(engine, signal.SIGKILL)

    plan = tiny_plan("--enforce-eager", "--port", str(four_free_ports()), required=("replicas", "flash_dmoe"))
    with pytest.raises(ServerFailedError) as caught:
        serve(plan, run_dir=seen.run_dir, ready_timeout_s=READY_TIMEOUT_S, on_ready=visit)
    seen.error = caught.value
    return seen


def test_every_server_took_a_request_before_they_counted_as_ready(seen: Seen) -> None:
    assert seen.info is not None
    (row,) = [row for row in seen.info.rows if row.pass_name == "replicas"]
    assert (row.applied, row.ran, row.why_not) == ("by servers", "yes, 2 servers", "")


def test_both_servers_run_our_kernel(seen: Seen) -> None:
    assert seen.info is not None
    assert [bool(kernels_in_use(server.proofs)) for server in seen.info.servers] == [True, True]


def test_requests_are_dealt_in_turns_and_get_the_tokens_of_stock_vllm(seen: Seen, stock_fp32: Served) -> None:
    assert len(seen.taken) == 2
    assert seen.taken[0] == seen.taken[1] >= len(PROMPTS)
    for answers in seen.answers:
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in stock_fp32.answers]


def test_the_death_of_one_server_ends_everything_and_names_it(seen: Seen) -> None:
    assert seen.error is not None
    assert str(seen.error).startswith(("replica-1 server ended while serving", "replica-1 server hangs"))
    assert seen.error.exit_code == 7
    assert processes_of(seen.run_dir) == []
