"""Runs the tuning in a process of its own, with a progress bar on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_optimizer.child_process import child_process
from moe_optimizer.cli import messages
from moe_optimizer.cli.progress import ProgressLines
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import ExitCode, InputError, MoeOptimizerError, UnsupportedError

MODULE = "moe_optimizer.measure.triton_tuning.tune"
"""Runs in the process."""
_GRACE_S = 10.0


def run_tuning(request: Mapping[str, Any], progress: ProgressLines, *, log: Path) -> list[dict[str, Any]]:
    """Run a tuning to its end and return its verdicts. No process of the tuning outlives this call.

    Args:
        request: a `TuneRequest` as an object.
        progress: takes a line for each thing done, where there is no terminal for a bar.
        log: what vLLM and Triton print goes here.

    Raises:
        InputError, UnsupportedError: the tuning refused.
        MoeOptimizerError: it died; what was measured is kept, and the next run goes on from there.
    """
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    read_end, write_end = os.pipe()
    with (
        clean_termination(),
        tempfile.TemporaryDirectory(prefix="moe-optimizer-tune-") as folder,
        log.open("wb") as output,
    ):
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", MODULE, str(path), str(write_end)]
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "pass_fds": (write_end,)}
        # On Ctrl-C it is stopped here, after the terminal is whole again.
        with child_process(command, grace_s=_GRACE_S, **files) as process:
            os.close(write_end)
            last = _follow(read_end, progress)
            code = process.wait()
    if "done" in last:
        return last["done"]
    if "refused" in last:
        kind = InputError if last["exit_code"] == ExitCode.BAD_INPUT else UnsupportedError
        raise kind(last["refused"], hint=last["hint"])
    raise MoeOptimizerError(
        f"the tuning ended with exit code {code}: {_last_line(log)}",
        hint=f"run it again: it resumes without the configuration that failed; log: {log}",
    )


def _follow(read_end: int, progress: ProgressLines) -> dict[str, Any]:
    """Show the progress until the process closes its end; return its last event."""
    last: dict[str, Any] = {}
    with os.fdopen(read_end, encoding="utf-8") as stream, _Bar(progress) as bar:
        for event in _events(stream):
            last = event
            if "progress" in event:
                bar.show(event["progress"], event["text"])
    return last


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        # Without its end it is what a process that was killed had written of it.
        if line.endswith("\n"):
            yield json.loads(line)


class _Bar:
    """A bar on a terminal; elsewhere one line for each thing done."""

    def __init__(self, lines: ProgressLines) -> None:
        self._lines = lines

    def __enter__(self) -> _Bar:
        self._progress = self._task = None
        if messages.use_color(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("tuning"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task("", total=1.0)
        return self

    def show(self, share: float, text: str) -> None:
        """Show how far it is, and with what."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=share, description=text)
        else:
            self._lines.line(f"{share:4.0%}  {text}")
            if share > 0:
                # Something was measured: what ends it now is no refusal.
                self._lines.release()

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1]:.300}" if lines else "it said nothing"
