"""Finding the reason of a failure in vLLM's log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moe_optimizer.launcher import server_log
from moe_optimizer.launcher.server_log import bound, followed, killed_processes, refusal, root_cause
from tests.eventually import eventually

LOG = """\
(APIServer pid=1) INFO 01-01 00:00:00 [utils.py:1] starting
(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:953]     raise ValueError(f"Error: {x}")
(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:953] torch.OutOfMemoryError: no room
(EngineCore pid=2) ERROR 01-01 00:00:00 [core.py:1] Exception: WorkerProc initialization failed due to an exception
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_cause_is_told_from_its_consequences(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    assert root_cause(path) == "torch.OutOfMemoryError: no room"


def test_a_log_without_exception_has_no_cause(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("INFO all is well\n")
    assert root_cause(path) == ""
    assert root_cause(tmp_path / "missing.log") == ""


def test_escapes_from_the_log_are_written_out(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"ValueError: \x1b[2J\xff\n")
    assert root_cause(path).startswith("ValueError: \\x1b[2J")


USAGE = """\
usage: api_server.py [-h] [--dtype {auto,half}]
api_server.py: error: unrecognized arguments: --no-such-flag
"""
CONFIG = """\
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len too large. [type=value_error, input_value=ArgsKwargs((), {'model': 'm'})]
    For further information visit https://errors.pydantic.dev
"""


def test_a_usage_error_is_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(USAGE)
    assert refusal(path, 2) == "unrecognized arguments: --no-such-flag"
    assert refusal(path, 1) == ""


def test_a_configuration_that_validation_refuses_is_told_by_its_sentence(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(CONFIG)
    assert refusal(path, 1) == "max_model_len too large."
    assert root_cause(path) == f"pydantic_core._pydantic_core.ValidationError: {refusal(path, 1)}"


def test_an_error_after_the_weights_are_read_is_no_refusal(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("Loading safetensors checkpoint shards: 100% Completed | 1/1\nValueError: no room\n")
    assert refusal(path, 1) == ""


def test_a_worker_that_refuses_a_value_before_it_reads_weights_is_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        "(Worker pid=3) INFO Starting to load model m...\n"
        "(Worker pid=3) ERROR 01-01 00:00:00 [multiproc_executor.py:9] ValueError: no format `x`\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    assert refusal(path, 1) == "no format `x`"


def test_an_error_of_our_own_plugin_is_no_refusal(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("moe_optimizer.errors.InputError: a wrong plan\n")
    assert refusal(path, 1) == ""


def test_processes_that_were_killed_are_found_at_the_end_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        "x" * (2 << 20)
        + "\nmoe-optimizer: process 7 was killed by SIGKILL\n"
        + "ERROR [multiproc_executor.py:316] Worker proc VllmWorker-1 died unexpectedly (exit code: -11)\n"
        + "ERROR [multiproc_executor.py:316] Worker proc VllmWorker-0 died unexpectedly (exit code: 1)\n"
    )
    assert killed_processes(path) == [("VllmWorker-1", "SIGSEGV"), ("7", "SIGKILL")]


def test_a_large_log_is_moved_aside_and_whoever_appends_or_follows_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "MAX_LOG_BYTES", 100)
    path, copy = tmp_path / "server.log", io.StringIO()
    with path.open("a") as server, followed(path, copy):
        server.write("y" * 200 + "\n")
        server.flush()
        eventually(lambda: "y\n" in copy.getvalue())
        bound(path)
        server.write("anew\n")
        server.flush()
        eventually(lambda: "anew" in copy.getvalue())
        bound(path)
    assert path.read_text() == "anew\n"
    assert (tmp_path / "server.log.old").read_text() == "y" * 200 + "\n"
