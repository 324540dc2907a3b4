"""The launcher with several servers and a router, all stand-ins: real processes that speak real HTTP."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from moe_optimizer.errors import ExitCode, InputError, RequiredNotAppliedError, ServerFailedError, UnsupportedError
from moe_optimizer.launcher import deployment, evidence, kv_tier, launch, router, supervisor
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.lifeline import this_process
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.pass_params import KvCacheParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from tests.builders import cpu_machine, gpus, made_plan, profile_with, qwen3_30b_a3b, tiny_moe, with_arguments
from tests.free_ports import free_ports
from tests.run_processes import processes_of
from tests.served_until import serve

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
Group = Callable[..., Plan]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """Makes a plan of stand-ins, so many for prefill and for decode; the last of each behaves as told."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(deployment, "check_plugin_visible", lambda plan: None)
    monkeypatch.setattr(deployment, "check_group_can_run", lambda plan: None)
    monkeypatch.setattr(evidence, "PROOF_WAIT_S", 1.0)
    monkeypatch.setattr(supervisor, "NOTICE_S", 1.0)

    def make(
        *,
        servers: tuple[int, int] = (1, 1),
        prefill: tuple[str, ...] = (),
        decode: tuple[str, ...] = (),
        port: int | None = None,
    ) -> Plan:
        numbers = dict(zip(("prefill_servers", "decode_servers"), servers, strict=True))
        plan = made_plan(
            tiny_moe(),
            cpu_machine(cores=sum(servers)),
            profile_with(passes={"disaggregation": numbers}),
            port=port or free_ports(sum(servers) + 2),
            wishes=resolve_wishes(["disaggregation", "flash-dmoe"], ["expert-load"]),
        )
        assert plan.group is not None
        last = {f"prefill-{servers[0] - 1}": prefill, f"decode-{servers[1] - 1}": decode}
        behaviour = {server.serve_args.value("--port"): last.get(server.name, ()) for server in plan.group.servers}

        def server_command(_: Plan, arguments: ServeArguments) -> list[str]:
            own = arguments.value("--port")
            return [sys.executable, str(HERE / "fake_server.py"), str(own), *behaviour[own]]

        monkeypatch.setattr(deployment, "server_command", server_command)
        monkeypatch.setattr(
            deployment,
            "router_command",
            lambda arguments: [sys.executable, str(HERE / "fake_router.py"), *arguments.words],
        )
        return plan

    return make


def test_both_servers_and_the_router_are_started_proven_and_stopped(group: Group, tmp_path: Path) -> None:
    plan = group()
    with launch.running(plan, run_dir=tmp_path, require=frozenset({"disaggregation", "flash_dmoe"})) as info:
        assert [server.name for server in info.servers] == ["prefill-0 server", "decode-0 server"]
        assert len({info.pid, *(server.pid for server in info.servers)}) == 3
        assert info.base_url.endswith(plan.serve_args.value("--port") or "none")
        rows = {row.pass_name: row for row in info.rows}
        assert rows["disaggregation"].ran == "yes, 16 tokens received by 1 decode server from 1 prefill"
        assert rows["flash_dmoe"].applied == "yes"
        assert rows["flash_dmoe"].ran.startswith("yes, 1 layer")
        assert [len(server.proofs) for server in info.servers] == [1, 1]
        assert (tmp_path / "kv").is_dir()
    assert processes_of(tmp_path) == []
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("servers", [(1, 2), (2, 1), (2, 3)])
def test_of_several_servers_each_takes_part_before_they_count_as_ready(
    group: Group, tmp_path: Path, servers: tuple[int, int]
) -> None:
    prefill, decode = servers
    with launch.running(group(servers=servers), run_dir=tmp_path, require=frozenset({"disaggregation"})) as info:
        assert len(info.servers) == prefill + decode
        rows = {row.pass_name: row for row in info.rows}
        given = int(rows["disaggregation"].ran.split()[1])
        assert given == 16 * max(servers)
        taken = [prompt_tokens(ServerClient(server.base_url)) for server in info.servers]
    assert min(each or 0 for each in taken) > 0
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_server_of_several_that_takes_no_part_is_named(group: Group, tmp_path: Path, part: str) -> None:
    behaviour = {"prefill": ("idle",), "decode": ("alone",)}[part]
    with launch.running(group(servers=(2, 2), **{part: behaviour}), run_dir=tmp_path) as info:
        (row,) = [row for row in info.rows if row.pass_name == "disaggregation"]
    assert row.ran == "no"
    assert row.why_not.endswith(f": {part}-1 server")


def test_a_warm_up_reaches_every_server(group: Group, tmp_path: Path) -> None:
    plan = group(servers=(2, 3), prefill=("compile",), decode=("compile",))
    with launch.running(plan, run_dir=tmp_path, warm_up_s=60.0) as info:
        compiled = {server.name: [each.compilations for each in server.proofs] for server in info.servers}
    for name in ("prefill-1 server", "decode-2 server"):
        assert any(each is not None and each.before_ready for each in compiled[name]), name


def with_tier(plan: Plan) -> Plan:
    """Return the plan as on GPUs: the connectors between the servers have a tier beside them."""
    decision = plan.decision("kv_cache")
    params = dataclasses.replace(decision.params_as(KvCacheParams), offload_gib=1)
    tiered = dataclasses.replace(decision, status=Status.ON, applier=Applier.FLAGS, params=params)
    return dataclasses.replace(plan, decisions=tuple(tiered if each is decision else each for each in plan.decisions))


def test_a_tier_is_looked_for_on_both_servers(group: Group, tmp_path: Path) -> None:
    with launch.running(with_tier(group()), run_dir=tmp_path, require=frozenset({"kv_cache"})) as info:
        rows = {row.pass_name: row for row in info.rows}
        assert rows["disaggregation"].ran == "yes, 16 tokens received by 1 decode server from 1 prefill"
        assert rows["kv_cache"].ran == "yes, 4096 bytes or more in each host tier"


def test_a_required_tier_that_one_server_does_not_fill_ends_with_exit_code_6(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tier, "WAIT_S", 0.0)
    with pytest.raises(RequiredNotAppliedError, match=r"kv_cache: .*host memory: decode-0 server") as caught:
        serve(with_tier(group(decode=("untiered",))), run_dir=tmp_path, require=frozenset({"kv_cache"}))
    assert caught.value.exit_code is ExitCode.NOT_APPLIED
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("name", ["prefill-0 server", "decode-0 server", "router"])
def test_when_one_part_dies_everything_ends_and_it_is_named(group: Group, tmp_path: Path, name: str) -> None:
    def kill(info: ServerInfo) -> None:
        pids = {server.name: server.pid for server in info.servers} | {"router": info.pid}
        os.kill(pids[name], signal.SIGKILL)

    with pytest.raises(ServerFailedError, match=rf"^{name} ended while.*SIGKILL\)") as caught:
        serve(group(), run_dir=tmp_path, on_ready=kill)
    assert caught.value.exit_code is ExitCode.SERVER_FAILED
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(("name", "process"), [("decode-0 server", "API server"), ("router", "router")])
def test_a_part_that_is_stopped_is_warned_of_and_then_ends_everything(
    group: Group, tmp_path: Path, heartbeat_clock: None, name: str, process: str
) -> None:
    def stop(info: ServerInfo) -> None:
        pids = {server.name: server.pid for server in info.servers} | {"router": info.pid}
        os.kill(pids[name], signal.SIGSTOP)

    said: list[str] = []
    with pytest.raises(ServerFailedError, match=rf"^{name} .*\d s: {process} \d+ is stopped") as caught:
        serve(group(), run_dir=tmp_path, echo=said.append, stall_timeout_s=3.0, on_ready=stop)
    assert caught.value.exit_code is ExitCode.SERVER_FAILED
    assert any(line.startswith(f"warning: {name} ") for line in said)
    assert processes_of(tmp_path) == []


def test_a_worker_that_dies_under_a_server_that_hangs_ends_everything(group: Group, tmp_path: Path) -> None:
    def kill(info: ServerInfo) -> None:
        psutil.Process(info.servers[1].proofs[0].pid).kill()

    with pytest.raises(ServerFailedError, match=r"^decode-0 server.* \d+ "):
        serve(group(), run_dir=tmp_path, on_ready=kill)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_one_server_that_dies_while_starting_ends_the_other(group: Group, tmp_path: Path, name: str) -> None:
    with pytest.raises(ServerFailedError, match=f"^{name}-0 server .*during.*cheese"):
        serve(group(**{name: ("die", "unproven")}), run_dir=tmp_path)
    assert processes_of(tmp_path) == []


def test_a_router_that_does_not_take_our_arguments_is_a_failure_not_bad_input(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = group()
    refuses = "import sys; print('router: error: unrecognized arguments: --x'); sys.exit(2)"
    monkeypatch.setattr(deployment, "router_command", lambda arguments: [sys.executable, "-c", refuses])
    with pytest.raises(ServerFailedError, match=r"^router ended.*status 2\)"):
        serve(plan, run_dir=tmp_path)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(("behaviour", "why"), [("alone", "prompt itself"), ("countless", "cannot be shown: ")])
def test_a_cache_that_does_not_travel_or_is_not_counted_is_said(
    group: Group, tmp_path: Path, behaviour: str, why: str
) -> None:
    with launch.running(group(decode=(behaviour,)), run_dir=tmp_path) as info:
        (row,) = [row for row in info.rows if row.pass_name == "disaggregation"]
    assert row.ran == "no"
    assert why in row.why_not


def test_a_required_group_whose_cache_does_not_travel_ends_with_exit_code_6(group: Group, tmp_path: Path) -> None:
    with pytest.raises(RequiredNotAppliedError, match=r"disaggregation: .*decode-0 server") as caught:
        serve(group(decode=("alone",)), run_dir=tmp_path, require=frozenset({"disaggregation"}))
    assert caught.value.exit_code is ExitCode.NOT_APPLIED
    assert processes_of(tmp_path) == []


def test_a_pass_that_runs_on_one_server_only_is_told_by_server(group: Group, tmp_path: Path) -> None:
    with launch.running(group(prefill=("refuse",)), run_dir=tmp_path) as info:
        (row,) = [row for row in info.rows if row.pass_name == "flash_dmoe"]
    assert row.applied.split("; ") == ["prefill-0 server: no", "decode-0 server: yes"]
    assert row.why_not.split(": ") == ["prefill-0 server", "fallback", "cheese"]


def test_a_required_pass_must_run_on_both(group: Group, tmp_path: Path) -> None:
    with pytest.raises(RequiredNotAppliedError, match=r"decode-0 server: flash_dmoe: "):
        serve(group(decode=("refuse",)), run_dir=tmp_path, require=frozenset({"flash_dmoe"}))
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_port_of_any_part_that_is_taken_starts_nothing(group: Group, tmp_path: Path, offset: int) -> None:
    port = free_ports(4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + offset))
        taken.listen()
        with pytest.raises(InputError, match=str(port + offset)):
            serve(group(port=port), run_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_servers_that_ignore_the_stop(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "STOP_MARGIN_S", 1.0)
    plan = with_arguments(group(prefill=("stubborn", "escape"), decode=("stubborn",)), "--shutdown-timeout", "0")
    with launch.running(plan, run_dir=tmp_path):
        assert len(processes_of(tmp_path)) == 5
    assert processes_of(tmp_path) == []


def test_what_a_group_needs_is_checked_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made_plan(tiny_moe(), cpu_machine(cores=2), wishes=resolve_wishes(["disaggregation"], []))
    with pytest.raises(UnsupportedError, match="VLLM_API_KEY"):
        router.check_group_can_run(plan, {"VLLM_API_KEY": "k"})
    monkeypatch.setattr(router.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="vllm-router"):
        router.check_group_can_run(plan, {})
    replicas = made_plan(tiny_moe(), cpu_machine(cores=2), wishes=resolve_wishes(["replicas"], []))
    with pytest.raises(UnsupportedError, match="vllm-router"):
        router.check_group_can_run(replicas, {})
    router.check_group_can_run(made_plan(tiny_moe(), cpu_machine()), {"VLLM_API_KEY": "k"})


@pytest.mark.parametrize(("layout", "nodes"), [("tp8p1d1", 2), ("tp4x4", 2), ("tp1dp16ep", 2), ("tp4pp2x2", 4)])
def test_what_one_command_does_not_start_on_a_machine_is_refused_with_what_does(
    tmp_path: Path, layout: str, nodes: int
) -> None:
    machine = gpus("h100_sxm", 4 if "pp" in layout else 8)
    plan = made_plan(
        qwen3_30b_a3b(), machine, num_nodes=nodes, num_gpus=nodes * machine.num_gpus, clients=100_000, layout=layout
    )
    with pytest.raises(UnsupportedError, match=f"{nodes} machines") as caught:
        deployment.Deployment(plan, RunFolder(tmp_path)).check()
    assert "--render ray" in (caught.value.hint or "")


def test_a_router_that_could_not_be_imported_is_refused_before_its_servers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "vllm_router-9.dist-info"
    package.mkdir()
    elsewhere = ('linters ; extra == "dev"', "backport-for-old-pythons ; python_version < '3.9'")
    needed = ("pytest>=7", "orjson-that-is-not-here (>=3)", *elsewhere)
    lines = ["Metadata-Version: 2.1", "Name: vllm-router", "Version: 9", *(f"Requires-Dist: {each}" for each in needed)]
    (package / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = made_plan(tiny_moe(), cpu_machine(cores=2), wishes=resolve_wishes(["replicas"], []))
    with pytest.raises(UnsupportedError, match="needs orjson-that-is-not-here, not installed here"):
        router.check_group_can_run(plan, {})


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"]), ("GPU-a,GPU-b,GPU-c,GPU-d", None)]
)
@pytest.mark.parametrize("flag", ["disaggregation", "replicas"])
def test_each_server_sees_its_own_share_of_the_gpus_that_the_launcher_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str, visible: str | None, seen: list[str] | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    own = ("--tensor-parallel-size", "2")
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 4), wishes=resolve_wishes([flag], []), vllm_args=own)
    servers = deployment.Deployment(plan, RunFolder(tmp_path)).servers
    shown = [server.environment["CUDA_VISIBLE_DEVICES"] for server in servers]
    assert shown == (seen or ["GPU-a,GPU-b", "GPU-c,GPU-d"])


def test_each_server_has_the_variables_of_its_role(tmp_path: Path) -> None:
    plan = made_plan(tiny_moe(), cpu_machine(cores=2), wishes=resolve_wishes(["replicas"], []))
    servers = deployment.Deployment(plan, RunFolder(tmp_path)).servers
    bound = [server.environment["VLLM_CPU_OMP_THREADS_BIND"] for server in servers]
    assert bound == ["0", "1"]


def test_no_two_servers_of_a_group_write_the_same_compiled_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 2), wishes=resolve_wishes(["replicas"], []))
    servers = deployment.Deployment(plan, RunFolder(tmp_path)).servers
    # The first shares its folder with a server that is served alone.
    assert [each.environment.get("VLLM_CACHE_ROOT") for each in servers] == [None, "/caches/vllm/replica-1"]


def test_replicas_need_no_nixl_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 2), wishes=resolve_wishes(["replicas"], []))
    monkeypatch.setattr(router.importlib.util, "find_spec", lambda name: name if name == "vllm_router" else None)
    router.check_group_can_run(plan, {})


def test_the_router_gets_no_key_to_hand_on_and_no_proxy(tmp_path: Path) -> None:
    environ = {
        "OPENAI_API_KEY": "k",
        "http_proxy": "http://p",
        "HTTP_PROXY": "http://p",
        "ALL_PROXY": "p",
        "PATH": "/bin",
    }
    environment = router.router_environment(tmp_path / "plan.json", environ)
    assert environment.pop("MOE_OPTIMIZER_LAUNCHER") == this_process()
    assert environment == {"PATH": "/bin", "PYTHONSAFEPATH": "1", "MOE_OPTIMIZER_PLAN": str(tmp_path / "plan.json")}
