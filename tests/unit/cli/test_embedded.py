"""`--engine embedded` and `auto`: what is planned, when which engine serves, and that it serves."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli import embedded
from moe_optimizer.cli.main import main
from moe_optimizer.errors import ExitCode, InputError, UnsupportedError
from moe_optimizer.passes.registry import PASS_NAMES, resolve_wishes
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.explain import render_plan
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.software import VllmInstallation
from tests.builders import cpu_machine, gpus, request, tiny_moe
from tests.eventually import eventually
from tests.free_ports import free_port
from tests.paper_hub import paper_hub

ROOT = Path(__file__).resolve().parents[3]
TINY_MOE = ROOT / "examples" / "tiny-moe"


def asked(engine: str, *, vllm: Any = None, hardware: Any = None, **values: Any) -> Any:
    made = request(tiny_moe(), hardware or cpu_machine(), engine=engine, **values)
    installed = vllm and VllmInstallation(distribution="vllm", version="0.32.0", device=vllm, location="/nowhere")
    return dataclasses.replace(made, software=dataclasses.replace(made.software, vllm=installed or None))


@pytest.mark.parametrize(
    ("vllm", "hardware", "engine", "said"),
    [
        ("cpu", cpu_machine(), "vllm", None),
        ("cuda", gpus("h200", 1), "vllm", None),
        (None, cpu_machine(), "embedded", "not installed"),
        (None, gpus("h200", 1), "embedded", "not installed"),
        ("cuda", cpu_machine(), "embedded", "there is no GPU"),
    ],
)
def test_auto_takes_vllm_where_it_runs_and_says_why_not(vllm: Any, hardware: Any, engine: str, said: Any) -> None:
    found, warnings = embedded.with_engine(asked("auto", vllm=vllm, hardware=hardware))
    assert found.engine == engine
    assert (not warnings) if said is None else said in warnings[0]


def test_a_request_for_vllm_is_left_as_it_is() -> None:
    given = asked("vllm")
    assert embedded.with_engine(given) == (given, ())


def test_an_embedded_plan_has_no_pass_on_and_shows_the_command_of_the_engine() -> None:
    found, _ = embedded.with_engine(asked("embedded", vllm="cpu", batch_size=7))
    plan = make_plan(found)
    assert [decision.pass_name for decision in plan.decisions] == list(PASS_NAMES)
    assert not [decision for decision in plan.decisions if decision.status is Status.ON]
    text = render_plan(plan)
    assert "moe_optimizer.cli.engine_server --model" in text
    assert "--max-num-seqs 7" in text
    assert "vllm serve" not in text
    assert "vLLM's default" not in text
    assert "scheduler" in render_plan(plan, explain=True)


def test_a_length_that_only_vllm_can_go_beyond_is_refused_without_saying_how() -> None:
    with pytest.raises(InputError, match="--max-model-len") as caught:
        make_plan(embedded.with_engine(asked("embedded", max_model_len=4096))[0])
    assert caught.value.hint is None


def test_processes_given_to_the_engine_are_not_said_to_stay_out() -> None:
    given = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    found, _ = embedded.with_engine(asked("embedded", hardware=gpus("h200", 2), vllm_args=given))
    assert not make_plan(found).warnings


def test_hardware_that_is_not_here_is_refused_as_for_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "serve", lambda *_, **__: ExitCode.OK)
    words = ["serve", "--model", str(TINY_MOE), "--engine", "embedded", "--hardware", "h100_sxm"]
    assert main(words) == ExitCode.BAD_INPUT
    assert "--hardware" in capsys.readouterr().err


def test_an_optimization_of_vllm_is_refused() -> None:
    with pytest.raises(InputError, match="--enable-fp8"):
        embedded.with_engine(asked("embedded", wishes=resolve_wishes(["fp8"], [])))


def test_code_of_the_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="--trust-remote-code"):
        embedded.with_engine(asked("embedded", trust_remote_code=True))


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--block-size", "8", "--no-fused-moe"], ExitCode.OK, "--no-fused-moe"),
        (["--nope"], ExitCode.BAD_INPUT, "--nope"),
        (["--block-size", "0"], ExitCode.BAD_INPUT, "block_size"),
    ],
    ids=str,
)
def test_a_dry_run_reads_the_arguments_as_the_start_does(
    words: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(TINY_MOE), "--engine", "embedded", "--dry-run", "--", *words]) == code
    shown = capsys.readouterr()
    assert named in (shown.err if code else shown.out)


def arguments(port: int, run_dir: Path, *, model: str = str(TINY_MOE)) -> list[str]:
    more = ["--port", str(port), "--run-dir", str(run_dir), "--max-model-len", "256"]
    return ["--model", model, "--engine", "embedded", "--json", *more]


def asked_for_four_tokens(base_url: str, *, model: str | None = None) -> int:
    body = json.dumps({"model": model, "prompt": "def f(", "max_tokens": 4, "temperature": 0}).encode()
    asking = urllib.request.Request(f"{base_url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asking, timeout=60) as reply:
        return json.load(reply)["usage"]["completion_tokens"]


@pytest.mark.thorough
def test_serve_fetches_a_hub_id_answers_and_ends_with_exit_code_0(tmp_path: Path) -> None:
    words = arguments(free_port(), tmp_path / "run", model="owner/tiny")
    command = [sys.executable, str(ROOT / "run_optimizer.py"), *words]
    with paper_hub("owner/tiny", TINY_MOE) as (url, fetched):
        environ = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "cache")}
        environ |= {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        ) as server:
            assert server.stdout is not None
            try:
                printed = ""
                while not printed.endswith("}\n"):
                    line = server.stdout.readline()
                    assert line, server.stderr and server.stderr.read()
                    printed += line
                info = json.loads(printed)
                assert info["model"] == "owner/tiny"
                assert asked_for_four_tokens(info["base_url"], model="owner/tiny") == 4
                server.send_signal(signal.SIGINT)
                assert server.wait(60) == 0
            finally:
                server.kill()
    assert "model.safetensors" in fetched
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["engine"] == "embedded"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_service_manager_ends_it_with_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM, in this process: it has imported the engine, which is most of what a start takes."""
    port, answered = free_port(), []

    def ask_and_end() -> None:
        eventually(lambda: listens(port), "the engine does not listen")
        try:
            answered.append(asked_for_four_tokens(f"http://127.0.0.1:{port}"))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    client = threading.Thread(target=ask_and_end)
    client.start()
    assert main(["serve", *arguments(port, tmp_path / "run")]) == 0
    client.join()
    assert answered == [4]
    assert signal.getsignal(signal.SIGTERM) is before
    assert json.loads(capsys.readouterr().out)["run_dir"] == str(tmp_path / "run")


def test_an_engine_that_stops_ends_the_process_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from moe_optimizer.engine.model_runner import ModelRunner

    def fail(*_: object) -> Any:
        raise RuntimeError("the device is gone")

    port, refused = free_port(), []

    def ask() -> None:
        eventually(lambda: listens(port), "the engine does not listen")
        with pytest.raises(urllib.error.HTTPError) as caught:
            asked_for_four_tokens(f"http://127.0.0.1:{port}")
        refused.append(caught.value.code)
        # The command has to end by itself: a server that went on would be ended here, with another exit code.
        if ended.wait(120):
            return
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ModelRunner, "launch", fail)
    ended = threading.Event()
    client = threading.Thread(target=ask)
    client.start()
    code = main(["serve", *arguments(port, tmp_path / "run")])
    ended.set()
    client.join()
    assert refused == [503]
    assert code == ExitCode.SERVER_FAILED
    assert "the engine has stopped: RuntimeError: the device is gone" in capsys.readouterr().err
