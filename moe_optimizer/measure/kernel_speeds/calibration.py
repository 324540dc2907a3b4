"""Starts the measurement of kernel speeds before a server, and keeps what it found."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from moe_optimizer.child_process import child_process
from moe_optimizer.errors import InputError, printable
from moe_optimizer.inspection.kernel_speeds import measured_dir, read_tables, write_tables
from moe_optimizer.measure.kernel_speeds.measurement import Request
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, SpeedQuestion

START_UP_S = 180.0
"""Chosen: what importing vLLM and compiling its kernels may take beside the measurement itself."""
_LAST_LINES = 3


def calibrate(request: Request, *, on_step: Callable[[int, int, str], None], cache: Path | None = None) -> str:
    """Measure in a process of its own and keep the tables in the user's folder. Returns "" or why there are none.

    Args:
        request: what to measure; its `tables` is set here.
        on_step: called with (steps done, of so many, what was done).
        cache: the user's folder; None: `measured_dir()`.
    """
    with tempfile.TemporaryDirectory(prefix="moe-optimizer-calibrate-") as name:
        folder = Path(name)
        tables = folder / "tables.json"
        asked = encode(request) | {"tables": str(tables)}
        (folder / "request.json").write_text(json.dumps(asked), encoding="utf-8")
        why_not = _run(folder, request, on_step)
        if why_not:
            return why_not
        try:
            found = read_tables(tables)
            _keep(found, measured_dir() if cache is None else cache)
        except (InputError, OSError) as error:
            return printable(str(error))
    return ""


def _program() -> list[str]:
    return [sys.executable, "-m", "moe_optimizer.measure.kernel_speeds.measurement"]


def _run(folder: Path, request: Request, on_step: Callable[[int, int, str], None]) -> str:
    command = [*_program(), str(folder / "request.json")]
    # No plan: the classes are measured as they are, and stock must be stock.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MOE_OPTIMIZER_")}
    if request.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(request.threads)
    log = folder / "log.txt"
    with (
        log.open("wb") as stderr,
        child_process(command, grace_s=0.0, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True) as child,
        _Deadline(child, request.seconds + START_UP_S) as stop,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            _report(line, on_step)
        code = child.wait()
    if stop.passed:
        return f"not done after {request.seconds + START_UP_S:.0f} s"
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        return printable(f"exit {code}: {' / '.join(line.strip() for line in lines)}"[:300])
    return ""


def _report(line: str, on_step: Callable[[int, int, str], None]) -> None:
    """Pass a step on; whatever else the libraries print is no step."""
    try:
        step = json.loads(line)
        on_step(step["done"], step["of"], step["text"])
    except (ValueError, KeyError, TypeError):
        return


class _Deadline:
    """Kills a process and its group once so many seconds of the block have passed."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        self.passed = False
        self._child = child
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        self.passed = True
        # It may have ended by itself just now.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


def _keep(tables: Sequence[KernelSpeeds], folder: Path) -> None:
    """Write one file per question, replacing what was measured for it before."""
    for table in tables:
        write_tables(folder / f"{table_name(table)}.json", (table,))


def table_name(table: KernelSpeeds | SpeedQuestion) -> str:
    """Return the file name of what answers one question: device, and a digest of everything it depends on."""
    key = [table.device, table.weights, encode(table.shape), table.kernel_hash, table.vllm]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    device = "".join(char if char.isalnum() else "-" for char in table.device.lower())[:40].strip("-")
    return f"{device}-{digest}"
