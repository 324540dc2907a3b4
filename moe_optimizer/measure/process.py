"""Runs a measurement in a process of its own: vLLM is imported there, and what it allocates ends with it.

`python -P -m MODULE REQUEST EVENTS`: REQUEST is a JSON file. One JSON object a line goes to the file descriptor EVENTS,
{"progress": share, "text": what} on the way, {"result": ...} or {"refused": why} at the end. What libraries print goes
to a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from moe_optimizer.child_process import child_process, python_command, python_environment
from moe_optimizer.errors import ExitCode, InputError, MoeOptimizerError, UnsupportedError
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.plan.json_codec import decode, encode

Request = TypeVar("Request")
OnStep = Callable[[float, str], None]
"""Takes the share that is done, and what was done last."""

_LAST_LINES = 3


class MeasurementError(MoeOptimizerError):
    """A measuring process ended without a result, or was not done in time."""


def run_measurement(
    module: str,
    request: Any,
    *,
    on_step: OnStep,
    log: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = 0.0,
) -> Any:
    """Run a measuring module to its end and return its result; no process of it is left when this returns or raises.

    Args:
        module: see `answer_request`.
        request: a dataclass or object that JSON has a form for.
        on_step: called with each step, in this thread.
        log: gets stdout and stderr of the process.
        environment: complete; default: this process's.
        timeout_s: after so many seconds the process is killed.
        grace_s: seconds between SIGTERM and SIGKILL when this is interrupted.

    Raises:
        InputError, UnsupportedError: the process refused the request.
        MeasurementError: it ended without a result, or was not done in time.
    """
    last: dict[str, Any] = {}
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-measure-") as folder, log.open("wb") as output:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(encode(request)), encoding="utf-8")
        command = python_command("-m", module, str(path), str(write_end))
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "pass_fds": (write_end,)}
        with (
            os.fdopen(read_end, encoding="utf-8") as events,
            child_process(command, grace_s=grace_s, env=python_environment(environment), **files) as process,
            _killed_after(process, timeout_s) as expired,
        ):
            os.close(write_end)
            for line in events:
                # Without its end it is the beginning of an event that a killed process was writing.
                last = json.loads(line) if line.endswith("\n") else {}
                if "progress" in last:
                    on_step(last["progress"], last["text"])
            code = process.wait()
        last_words = _last_words(log)
    if "refused" in last:
        kind = InputError if last["exit_code"] == ExitCode.BAD_INPUT else UnsupportedError
        raise kind(last["refused"], hint=last["hint"])
    if "result" in last:
        return last["result"]
    if expired.is_set():
        raise MeasurementError(f"not done after {timeout_s:.0f} s")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    raise MeasurementError(f"{how}: {last_words}")


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[Any], seconds: float | None) -> Iterator[threading.Event]:
    """Kill a process and its group once so many seconds of the block have passed; the event tells that it was."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        # It may have ended by itself just now.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    if seconds is None:
        yield expired
        return
    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LAST_LINES:])[:300] or "it printed nothing"


def answer_request(kind: type[Request], arguments: list[str], measure: Callable[[Request, OnStep], Any]) -> int:
    """Do the work of a measuring process; return its exit code.

    Args:
        kind: the type of the request.
        arguments: of the process: REQUEST and EVENTS.
        measure: does the work and returns the result, of which JSON has a form.
    """
    events = int(arguments[1])

    def report(**event: Any) -> None:
        os.write(events, (json.dumps(event) + "\n").encode())

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        request = decode(kind, read_json_object(Path(arguments[0])), origin="request")
        result = measure(request, lambda share, text: report(progress=share, text=text))
    except MoeOptimizerError as error:
        report(refused=str(error), hint=error.hint, exit_code=int(error.exit_code))
        return int(error.exit_code)
    report(result=encode(result))
    return 0
