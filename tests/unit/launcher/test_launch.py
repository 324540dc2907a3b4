"""The launcher against a stand-in for vLLM: readiness, proofs, failures, restarts, and that nothing is left of it."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from moe_optimizer.errors import ExitCode, InputError, RequiredNotAppliedError, ServerFailedError
from moe_optimizer.launcher import deployment, evidence, heartbeat, launch
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.launch import ServerInfo
from moe_optimizer.launcher.process import ServerProcess
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.service import START_GRACE_S
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.plan.decision import Applier, Status
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import read_proofs
from tests.builders import cpu_machine, made_plan, qwen3_30b_a3b_fp8, tiny_moe, with_arguments
from tests.free_ports import free_port
from tests.run_processes import processes_of
from tests.served_until import serve
from tests.unit.launcher.stand_in import Fake

PASS = frozenset({"flash_dmoe"})


def test_a_ready_server_is_described_and_stopped(fake: Fake, tmp_path: Path) -> None:
    with launch.running(fake(), run_dir=tmp_path) as info:
        assert processes_of(tmp_path)
        (row,) = [row for row in info.rows if row.pass_name == "flash_dmoe"]
        assert (row.applied, row.why_not) == ("yes", "")
        assert row.ran.startswith("yes, 1 layer")
        assert info.model == "fake"
        assert Plan.load(tmp_path / "plan.json").digest
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("behaviour", [("escape",), ("stubborn",)])
def test_nothing_is_left_of_a_server_that_misbehaves(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: tuple[str, ...]
) -> None:
    monkeypatch.setattr(deployment, "STOP_MARGIN_S", 0.5)
    with launch.running(with_arguments(fake(*behaviour), "--shutdown-timeout", "0"), run_dir=tmp_path):
        assert len(processes_of(tmp_path)) == 2
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("key", [None, "sesame"])
def test_what_answers_without_the_key_is_said_where_there_is_one(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key is None:
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
    else:
        monkeypatch.setenv("VLLM_API_KEY", key)
    said: list[str] = []
    with pytest.raises(ServerFailedError):
        serve(fake("leave"), run_dir=tmp_path, echo=said.append)
    assert any("answers without it" in line for line in said) is (key is not None)
    assert not any("sesame" in line for line in said)


def test_a_server_that_dies_while_starting_is_reported_with_its_cause(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError) as caught:
        serve(fake("die", "unproven"), run_dir=tmp_path)
    first = str(caught.value).splitlines()[0]
    assert re.match(r"server ended during.* 3\): RuntimeError: ", first)
    assert "fake server, child" in str(caught.value)
    assert caught.value.exit_code is ExitCode.SERVER_FAILED
    assert not processes_of(tmp_path)


@pytest.mark.parametrize("moment", ["leave", "vanish", "break"])
def test_a_server_that_ends_by_itself_failed_even_with_status_0(fake: Fake, tmp_path: Path, moment: str) -> None:
    with pytest.raises(ServerFailedError, match=r"ended while.*status 0\)"):
        serve(fake(moment), run_dir=tmp_path)
    assert not processes_of(tmp_path)


def test_a_process_that_was_killed_is_named_and_no_log_lines_follow(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError) as caught:
        serve(fake("killed"), run_dir=tmp_path)
    (pid,) = [proof.pid for proof in read_proofs(tmp_path)]
    assert re.fullmatch(rf"server ended while.* {pid} .*SIGKILL.*", str(caught.value))


def test_requests_without_progress_are_warned_of_and_end_the_server(
    fake: Fake, tmp_path: Path, heartbeat_clock: None
) -> None:
    said: list[str] = []
    with pytest.raises(ServerFailedError, match=r"no progress for 3 .*1 unfinished") as caught:
        serve(fake("stall"), run_dir=tmp_path, echo=said.append, stall_timeout_s=3.0)
    assert caught.value.exit_code is ExitCode.SERVER_FAILED
    (warning,) = [line for line in said if line.startswith("warning: ")]
    assert "1 unfinished" in warning
    assert re.fullmatch(r"served.*, 0 requests,.* 7", said[-1])


def test_a_launcher_that_was_stopped_for_an_hour_does_not_call_it_a_stall_of_its_server(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_s = 0.0

    def resume(info: ServerInfo) -> None:
        nonlocal stopped_s
        stopped_s = 3600.0

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped_s))
    with pytest.raises(ServerFailedError, match=r"no progress for \d\d? s"):
        serve(fake("stall"), run_dir=tmp_path, stall_timeout_s=3.0, on_ready=resume)


def stop_after(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> None:
    """Ask for a stop when the launcher has asked its server something so often."""
    ask, number = getattr(ServerClient, name), itertools.count(1)

    def counted(client: ServerClient, *arguments: Any, **options: Any) -> Any:
        if next(number) == times:
            signal.raise_signal(signal.SIGTERM)
        return ask(client, *arguments, **options)

    monkeypatch.setattr(ServerClient, name, counted)


def test_a_server_that_is_paused_on_purpose_is_left_alone(
    fake: Fake, tmp_path: Path, heartbeat_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is asked at a stall of 4 s, the limit, and has served on when it is asked again.
    stop_after(monkeypatch, "paused", 2)
    with pytest.raises(launch.StopRequestedError):
        serve(fake("stall", "pause"), run_dir=tmp_path, stall_timeout_s=4.0, on_ready=lambda _: None)


def test_a_server_whose_progress_cannot_be_seen_is_warned_of(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(launch.StopRequestedError):
        serve(
            fake("countless"), run_dir=tmp_path, echo=said.append,
            on_ready=lambda _: signal.raise_signal(signal.SIGTERM),
        )  # fmt: skip
    assert any("a stall will not be noticed" in line for line in said)


def test_a_stopped_server_is_named(fake: Fake, tmp_path: Path) -> None:
    def stop(info: ServerInfo) -> None:
        os.kill(info.pid, signal.SIGSTOP)

    with pytest.raises(ServerFailedError, match=r"no progress.*\d s:.* \d+ .*stopped"):
        serve(fake(), run_dir=tmp_path, stall_timeout_s=2.0, on_ready=stop)
    assert not processes_of(tmp_path)


def test_a_server_without_requests_may_rest(
    fake: Fake, tmp_path: Path, heartbeat_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When it becomes ready, and at two beats, the second more than the limit later.
    stop_after(monkeypatch, "metrics", 3)
    said: list[str] = []
    with pytest.raises(launch.StopRequestedError):
        serve(fake(), run_dir=tmp_path, echo=said.append, stall_timeout_s=1.0, on_ready=lambda _: None)
    assert re.fullmatch(r"served.* s, 0 .* 0", said[-1])
    assert "stopping" in said


def test_a_server_that_ends_is_started_again_as_often_as_is_wished(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "BACK_OFF_S", 0.1)
    said: list[str] = []
    ready: list[int] = []

    def kill(info: ServerInfo) -> None:
        ready.append(info.restarts)
        os.kill(info.pid, signal.SIGKILL)

    with pytest.raises(ServerFailedError, match="signal SIGKILL") as caught:
        serve(fake(), run_dir=tmp_path, echo=said.append, restarts=2, on_ready=kill)
    assert caught.value.exit_code is ExitCode.SERVER_FAILED
    assert ready == [0, 1, 2]
    assert [line.rpartition(";")[2] for line in said if line.startswith("warning: ")] == [
        " restart 1 of 2 in 0.1 s", " restart 2 of 2 in 0.2 s",
    ]  # fmt: skip
    assert re.fullmatch(r"served for \d+ s, 0 requests, 2 restarts, exit code 7", said[-1])
    logs = [tmp_path / name for name in ("server.log.1", "server.log.2", "server.log")]
    assert ["restarts 0" in logs[0].read_text(), "restarts 2" in logs[2].read_text()] == [True, True]
    assert logs[1].exists()
    assert not processes_of(tmp_path)


def test_a_server_that_hangs_is_started_again(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "BACK_OFF_S", 0.1)

    def stop(info: ServerInfo) -> None:
        os.kill(os.getpid() if info.restarts else info.pid, signal.SIGTERM if info.restarts else signal.SIGSTOP)

    said: list[str] = []
    with pytest.raises(launch.StopRequestedError):
        serve(fake(), run_dir=tmp_path, echo=said.append, stall_timeout_s=2.0, restarts=1, on_ready=stop)
    assert said[-1].endswith(", 1 restart, exit code 0")


@pytest.mark.parametrize("behaviour", ["die", "usage", "refuse"])
def test_what_never_was_ready_is_not_started_again(fake: Fake, tmp_path: Path, behaviour: str) -> None:
    said: list[str] = []
    with pytest.raises((ServerFailedError, InputError, RequiredNotAppliedError)):
        serve(fake(behaviour), run_dir=tmp_path, echo=said.append, restarts=3, require=PASS)
    assert len([line for line in said if line.startswith("starting vLLM")]) == 1


def test_a_stop_before_a_restart_ends_the_run(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []

    def echo(line: str) -> None:
        said.append(line)
        if "restart 1 of 9" in line:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(launch.StopRequestedError):
        serve(fake(), run_dir=tmp_path, echo=echo, restarts=9, on_ready=lambda info: os.kill(info.pid, signal.SIGKILL))
    assert len([line for line in said if line.startswith("starting vLLM")]) == 1
    assert said[-1].endswith("exit code 0")


def test_a_stop_says_what_it_waits_for(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(launch.StopRequestedError):
        serve(fake("stall"), run_dir=tmp_path, echo=said.append, on_ready=lambda _: signal.raise_signal(signal.SIGTERM))
    assert any(re.match("stopping:.* 1 request,.* 30 s; ", line) for line in said)


def test_a_dead_worker_under_a_server_that_hangs_is_noticed(fake: Fake, tmp_path: Path) -> None:
    def kill_worker(info: ServerInfo) -> None:
        # The stand-in does not wait for its child, which stays a zombie: its pid exists, but it is dead.
        psutil.Process(info.proofs[0].pid).kill()

    with pytest.raises(ServerFailedError, match=r"server hangs:.* \d+ "):
        serve(fake(), run_dir=tmp_path, on_ready=kill_worker)
    assert not processes_of(tmp_path)


def test_a_server_that_never_answers_is_given_up(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError, match="after 1 s"):
        serve(fake("silent"), run_dir=tmp_path, ready_timeout_s=1.0)
    assert not processes_of(tmp_path)


def test_only_a_server_that_was_ready_has_time_to_finish_requests(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, given = ServerProcess.stop, list[float]()

    def noted(process: ServerProcess, *, grace_s: float, hurry: Callable[[], bool]) -> None:
        given.append(grace_s)
        stop(process, grace_s=grace_s, hurry=hurry)

    monkeypatch.setattr(ServerProcess, "stop", noted)
    with pytest.raises(ServerFailedError):
        serve(fake("silent"), run_dir=tmp_path, ready_timeout_s=0.0)
    with launch.running(fake(), run_dir=tmp_path):
        pass
    starting_s, served_s = given
    assert starting_s <= START_GRACE_S < fake().serve_args.drain_timeout_s() < served_s


@pytest.mark.parametrize(("behaviour", "reason"), [("refuse", "fallback: cheese"), ("unproven", "plugin was not")])
def test_a_required_pass_that_does_not_run_ends_the_server(
    fake: Fake, tmp_path: Path, behaviour: str, reason: str
) -> None:
    with pytest.raises(RequiredNotAppliedError, match=reason) as caught:
        serve(fake(behaviour), run_dir=tmp_path, require=PASS)
    assert caught.value.exit_code is ExitCode.NOT_APPLIED
    assert not processes_of(tmp_path)


def test_strict_requires_everything_that_the_workers_show(tmp_path: Path) -> None:
    plan = made_plan(tiny_moe(), cpu_machine())
    servers = deployment.Deployment(plan, RunFolder(tmp_path))
    on = {decision.pass_name: decision.applier for decision in plan.decisions if decision.status is Status.ON}
    assert set(on.values()) == {Applier.PLUGIN, Applier.FLAGS}
    assert evidence.Evidence(plan, servers, frozenset(), strict=True).required == on.keys()
    assert evidence.Evidence(plan, servers, frozenset(), strict=False).required == frozenset()


def test_a_required_fp8_checkpoint_that_a_worker_holds_otherwise_ends_the_server(fake: Fake, tmp_path: Path) -> None:
    port, machine = free_port(), cpu_machine(gib=256, isa=("amx_tile",))
    plan = made_plan(qwen3_30b_a3b_fp8(), machine, wishes=resolve_wishes(["fp8"], []), port=port)
    fake(port=port)
    with launch.running(plan, run_dir=tmp_path / "held") as info:
        (row,) = [row for row in info.rows if row.pass_name == "fp8"]
        assert (row.applied, row.ran, row.why_not) == ("yes", "yes", "")
    fake("wide", port=port)
    with pytest.raises(RequiredNotAppliedError, match=r"fp8: .*: bfloat16") as caught:
        serve(plan, run_dir=tmp_path / "wide", require=frozenset({"fp8"}))
    assert caught.value.exit_code is ExitCode.NOT_APPLIED


def test_a_pass_that_is_not_required_may_be_missing(fake: Fake, tmp_path: Path) -> None:
    with launch.running(fake("refuse"), run_dir=tmp_path) as info:
        (row,) = [row for row in info.rows if row.pass_name == "flash_dmoe"]
        assert (row.applied, row.why_not) == ("no", "fallback: cheese")


def test_proofs_of_an_earlier_run_do_not_count(fake: Fake, tmp_path: Path) -> None:
    with launch.running(fake(), run_dir=tmp_path):
        pass
    with pytest.raises(RequiredNotAppliedError), launch.running(fake("unproven"), run_dir=tmp_path, require=PASS):
        pass


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("usage", "--dtype: .*'cheese'"),
        ("config", r"max_model_len \(9\).* 8"),
    ],
)
def test_arguments_that_vllm_refuses_are_the_users_mistake(
    fake: Fake, tmp_path: Path, behaviour: str, reason: str
) -> None:
    with pytest.raises(InputError) as caught:
        serve(fake(behaviour, "unproven"), run_dir=tmp_path)
    assert re.fullmatch(f"vLLM refuses .*{reason}", str(caught.value))
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    assert not processes_of(tmp_path)


def test_what_goes_wrong_with_the_weights_is_not_the_users_mistake(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError, match=r"ValueError: .*3 bits"):
        serve(fake("weights", "unproven"), run_dir=tmp_path)
