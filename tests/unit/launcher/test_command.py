"""The server's command line and environment."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import NoReturn

import pytest

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.launcher import command as server_command
from moe_optimizer.plan.plan import Plan
from tests.builders import OURS, cpu_machine, gpus, made_plan, tiny_moe


@pytest.fixture
def plan() -> Plan:
    return made_plan(tiny_moe(), cpu_machine(), wishes=OURS)


def no_distribution(name: str) -> NoReturn:
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_command_line_of_the_cpu_build_is_avoided(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", no_distribution)
    command = server_command.server_command(plan, plan.serve_args)
    assert command[1:7] == [
        "-P",
        "-m",
        "moe_optimizer.supervised",
        "vllm.entrypoints.openai.api_server",
        "--model",
        plan.model.path,
    ]


def test_vllm_serve_is_used_where_it_works(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: name)
    command = server_command.server_command(plan, plan.serve_args)
    start = ["-P", "-m", "moe_optimizer.supervised", "vllm.entrypoints.cli.main", "serve", plan.model.path]
    assert command[1:7] == start


def test_requests_are_finished_before_a_stop_unless_the_user_says_otherwise(plan: Plan) -> None:
    assert plan.serve_args.drain_timeout_s() == 30
    own = made_plan(tiny_moe(), cpu_machine(), vllm_args=("--shutdown-timeout", "0"))
    assert server_command.server_command(own, own.serve_args)[-2:] == ["--shutdown-timeout", "0"]
    assert own.serve_args.drain_timeout_s() == 0


def test_nothing_is_started_that_the_plan_does_not_show(plan: Plan) -> None:
    command = server_command.server_command(plan, plan.serve_args)
    assert tuple(command[-len(plan.serve_args.words) :]) == plan.serve_args.words
    assert plan.serve_args.value("--shutdown-timeout") == "30"


def test_the_server_gets_the_plan_and_no_second_wish(plan: Plan) -> None:
    environ = {
        "PATH": "/bin",
        "HF_HUB_OFFLINE": "1",
        "MOE_OPTIMIZER_PROFILE": "aggressive",
        "MOE_OPTIMIZER_RUN_DIR": "/runs",
        "MOE_OPTIMIZER_HARDWARE": "l4",
        "MOE_OPTIMIZER_DISABLE": "1",
    }
    got = server_command.server_environment(plan, Path("/r/plan.json"), environ)
    assert got["MOE_OPTIMIZER_PLAN"] == "/r/plan.json"
    assert got["MOE_OPTIMIZER_DISABLE"] == "1"
    assert got["HF_HUB_OFFLINE"] == "1"
    assert not {"MOE_OPTIMIZER_PROFILE", "MOE_OPTIMIZER_RUN_DIR", "MOE_OPTIMIZER_HARDWARE"} & got.keys()
    assert got.items() >= plan.serve_env.items()


def test_pickle_over_the_internal_sockets_is_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        server_command.server_environment(plan, Path("p"), {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})


@pytest.mark.parametrize(
    ("words", "environ", "method"),
    [
        ((), {}, "fork"),
        ((), {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "spawn"),
        (("--numa-bind",), {}, None),
        (("--mm-tensor-ipc", "torch_shm"), {}, None),
    ],
)
def test_a_gpu_servers_processes_are_forked_unless_the_user_or_an_argument_is_against_it(
    words: tuple[str, ...], environ: dict[str, str], method: str | None
) -> None:
    plan = made_plan(tiny_moe(), gpus("h100_sxm"), vllm_args=words)
    got = server_command.server_environment(plan, Path("p"), environ)
    assert got.get("VLLM_WORKER_MULTIPROC_METHOD") == method


def test_on_a_cpu_no_file_is_written_that_cannot_be_loaded_unless_the_user_wants_it(plan: Plan) -> None:
    assert server_command.server_environment(plan, Path("p"), {})["VLLM_USE_AOT_COMPILE"] == "0"
    own = server_command.server_environment(plan, Path("p"), {"VLLM_USE_AOT_COMPILE": "1"})
    assert own["VLLM_USE_AOT_COMPILE"] == "1"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in own
    on_gpus = made_plan(tiny_moe(), gpus("h100_sxm"))
    assert "VLLM_USE_AOT_COMPILE" not in server_command.server_environment(on_gpus, Path("p"), {})


def test_stock_vllm_starts_as_it_does(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    stock = made_plan(tiny_moe(), gpus("h100_sxm"))
    for each in (plan, stock):
        got = server_command.server_environment(each, Path("p"), {})
        assert not {"VLLM_WORKER_MULTIPROC_METHOD", "VLLM_USE_AOT_COMPILE"} & got.keys()


def test_a_plugin_that_vllm_would_not_find_is_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_command.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(UnsupportedError, match="find the plugin"):
        server_command.check_plugin_visible(plan)


def test_a_plugin_that_vllm_plugins_leaves_out_is_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "moe_optimizer"

    monkeypatch.setattr(server_command.importlib.metadata, "entry_points", lambda group: [Entry()])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UnsupportedError, match=r"VLLM_PLUGINS: got 'other'"):
        server_command.check_plugin_visible(plan)
    monkeypatch.setenv("VLLM_PLUGINS", "other,moe_optimizer")
    server_command.check_plugin_visible(plan)


def test_a_server_refuses_new_requests_while_it_stops_unless_the_plugin_is_switched_off(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--middleware" in server_command.server_command(plan, plan.serve_args)
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    assert "--middleware" not in server_command.server_command(plan, plan.serve_args)
