"""The servers of a benchmark, with a stand-in for vLLM."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import psutil
import pytest

from moe_optimizer import env
from moe_optimizer.launcher import deployment
from moe_optimizer.launcher.stock_start import last_stock_start
from moe_optimizer.measure.bench.side import STOCK, Side, opened
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.proof.record import CompilationProof, Proof, ProofWriter
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.eventually import eventually, is_running
from tests.free_ports import free_port

FAKE = Path(__file__).resolve().parents[3] / "unit" / "launcher" / "fake_server.py"


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Side:
    command = [sys.executable, str(FAKE)]
    monkeypatch.setattr(deployment, "server_command", lambda plan, arguments: [*command, arguments.value("--port")])
    return Side(name=STOCK, plan=made_plan(tiny_moe(), cpu_machine(), port=free_port()))


def test_the_process_of_a_server_that_we_started_is_known_and_of_no_other(side: Side, tmp_path: Path) -> None:
    with opened(side, run_dir=tmp_path, ready_timeout_s=60.0) as server:
        assert server.info is not None
        assert server.pids == (server.info.pid,)
        assert dataclasses.replace(server, info=None).pids == ()


@pytest.mark.parametrize(
    ("environment", "serve_args", "gpus", "most"),
    [
        ({}, (), 1, 4),
        ({}, (), 0, 1),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, (), 1, 1),
        ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}, (), 1, 4),
        ({}, ("--enable-elastic-ep",), 1, 1),
    ],
)
def test_a_side_may_have_more_api_servers_where_vllm_takes_them(
    side: Side,
    environment: dict[str, str],
    serve_args: tuple[str, ...],
    gpus: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert side.plan is not None
    plan = side.plan.replace(serve_args=side.plan.serve_args + ServeArguments(*serve_args), num_gpus=gpus)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Side(name=STOCK, plan=plan).most_api_servers == most
    assert Side(name="theirs", plan=None, url="http://there").most_api_servers == 1


def test_stock_vllm_has_the_kill_switch_in_its_environment(side: Side, tmp_path: Path) -> None:
    with opened(side, run_dir=tmp_path, ready_timeout_s=60.0) as server:
        assert server.info is not None
        assert psutil.Process(server.info.pid).environ()[env.DISABLE] == "1"


def test_how_long_stock_vllm_took_to_start_is_kept_for_starts_of_ours(
    side: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert side.plan is not None
    assert last_stock_start(side.plan) is None
    with opened(side, run_dir=tmp_path / "stock", ready_timeout_s=60.0) as server:
        found = last_stock_start(side.plan)
        assert found is not None
        assert server.info is not None
        assert found.phases_s == server.info.phases_s


def test_a_server_that_is_asked_to_stop_ends_before_the_block_does(side: Side, tmp_path: Path) -> None:
    with opened(side, run_dir=tmp_path, ready_timeout_s=60.0) as server:
        assert server.info is not None
        pid = server.info.pid
        server.ask_to_stop()
        eventually(lambda: not is_running(pid), "it still runs")


def test_what_a_worker_compiled_for_a_request_is_named(side: Side, tmp_path: Path) -> None:
    with opened(side, run_dir=tmp_path, ready_timeout_s=60.0) as server:
        (folder,) = server.run_dirs
        late = CompilationProof(before_ready=3, after_ready=2, last=("a kernel, in a step of 9 tokens", "another"))
        assert side.plan is not None
        worker = Proof(
            role="worker", rank=0, pid=4321, plan_digest=side.plan.digest, versions={}, model_rank=0, world_size=1,
            compilations=late,
        )  # fmt: skip
        ProofWriter(folder, worker).write()
        facts = server.facts()
    assert (facts.compilations, facts.compiled) == (2, late.last)
