"""Starts `vllm serve` for a plan, waits until it is ready, reads the proofs, and stops it without leaving anything."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from moe_optimizer import env
from moe_optimizer.errors import ExitCode, InputError, RequiredNotAppliedError, ServerFailedError
from moe_optimizer.files import write_atomically
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import flag_value
from moe_optimizer.vllm_plugin.activation import PLAN_FILE, plugin_decisions
from moe_optimizer.vllm_plugin.address import base_url, check_address, server_address
from moe_optimizer.vllm_plugin.http_client import ServerClient, api_key
from moe_optimizer.vllm_plugin.proof import PROOF_DIR, Proof, process_is_alive, read_proofs
from moe_optimizer.vllm_plugin.proof_table import (
    NO_WORKER,
    Row,
    all_holders_reported,
    kernels_in_use,
    not_running,
    proof_rows,
    render_table,
)
from moe_optimizer.vllm_plugin.server_command import (
    check_plugin_visible,
    drain_timeout_s,
    server_command,
    server_environment,
)
from moe_optimizer.vllm_plugin.server_log import LogFollower, root_cause
from moe_optimizer.vllm_plugin.server_process import ServerProcess

LOG_FILE = "server.log"
_POLL_S = 0.2
_HEALTH_INTERVAL_S = 0.5
_LIVENESS_INTERVAL_S = 1.0
_PROOF_WAIT_S = 20.0
"""Chosen: proofs are written within a second of the first forward, and one request is all that can be missing."""
_WARM_UP_AFTER_S = 3.0
_START_GRACE_S = 15.0
"""Chosen: a server that is still loading has no requests to finish."""
_STOP_MARGIN_S = 20.0
"""Chosen: on top of the drain; stopping engine and workers takes 5 s on the CPU build."""
_NOTICE_S = 15.0
"""Chosen: vLLM notices a dead worker in about 5 s and ends by itself; after this it is taken to hang."""
_LOG_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server that is ready."""

    base_url: str
    pid: int
    """The API server."""
    model: str
    """The name to use in requests."""
    run_dir: Path
    log_path: Path
    rows: tuple[Row, ...]
    """requested / applied / ran / why not, one row for each pass."""
    proofs: tuple[Proof, ...]
    start_up_s: float


class _StopRequestedError(Exception):
    """Somebody wants the server to stop; not a failure."""


def serve(
    plan: Plan,
    *,
    run_dir: Path,
    require: frozenset[str] = frozenset(),
    ready_timeout_s: float = 600.0,
    on_ready: Callable[[ServerInfo], None] | None = None,
    echo: Callable[[str], None] | None = None,
    verbose: bool = False,
) -> ExitCode:
    """Serve `plan` until SIGINT or SIGTERM, then let the server finish its requests and stop it.

    A second signal stops it at once. Nothing of the server is left when this returns or raises.

    Args:
        run_dir: gets plan.json, server.log and proof/.
        require: passes that must run, besides those that the plan requires.
        ready_timeout_s: how long the server may take to become healthy.
        on_ready: called once, in this thread, when it is.
        echo: takes the messages for the user, line by line; default: stderr.
        verbose: copy the server's log to stderr as it grows.

    Returns:
        ExitCode.OK after a requested stop.

    Raises:
        InputError, UnsupportedError: the server cannot be started like this; nothing was started.
        RequiredNotAppliedError: a required pass did not run.
        ServerFailedError: the server died, or did not become ready in time; the message has its last lines.
    """
    run = _Run(plan, run_dir, require | required_passes(plan), echo or _to_stderr)
    with _StopSignals() as signals, contextlib.suppress(_StopRequestedError), run.started(signals, verbose=verbose):
        info = run.wait_until_ready(ready_timeout_s)
        if on_ready is not None:
            on_ready(info)
        run.watch(info)
    return ExitCode.OK


@contextlib.contextmanager
def running(
    plan: Plan,
    *,
    run_dir: Path,
    require: frozenset[str] = frozenset(),
    ready_timeout_s: float = 600.0,
) -> Iterator[ServerInfo]:
    """Start a server for `plan`, quietly, and stop it at the end of the block. For tests and benchmarks.

    Raises: as `serve`.
    """
    run = _Run(plan, run_dir, require | required_passes(plan), lambda _line: None)
    with run.started(None, verbose=False):
        yield run.wait_until_ready(ready_timeout_s)


def required_passes(plan: Plan) -> frozenset[str]:
    """Return the passes that the plan itself requires."""
    return frozenset(decision.pass_name for decision in plan.decisions if decision.required)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _width() -> int:
    return max(60, shutil.get_terminal_size((80, 24)).columns)


class _StopSignals:
    """Turns SIGINT and SIGTERM into something to look at, for as long as the block lasts."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


class _Run:
    """One server from start to stop."""

    def __init__(self, plan: Plan, run_dir: Path, required: frozenset[str], echo: Callable[[str], None]) -> None:
        self._plan = plan
        # Not Path.resolve, which raises RuntimeError on a loop of links; writing there names the loop.
        self._run_dir = Path(os.path.realpath(run_dir))
        self._required = required
        self._echo = echo
        self._signals: _StopSignals | None = None
        self._ready = False
        scheme = "https" if flag_value(plan.serve_args, "--ssl-certfile") else "http"
        self._host, self._port = server_address(plan.serve_args)
        url = base_url(self._host, self._port).replace("http", scheme, 1)
        self._client = ServerClient(url, api_key(plan.serve_args))

    @contextlib.contextmanager
    def started(self, signals: _StopSignals | None, *, verbose: bool) -> Iterator[None]:
        """Start the server process; whatever happens in the block, stop all of it at the end."""
        self._signals = signals
        check_address(self._host, self._port)
        check_plugin_visible(self._plan)
        grace_s = drain_timeout_s(self._plan) + _STOP_MARGIN_S
        command = server_command(self._plan)
        environment = server_environment(self._plan, self._run_dir / PLAN_FILE)
        self._prepare_run_dir()
        self._raise_if_stopped()
        self._echo(f"starting vLLM; its log: {self._run_dir / LOG_FILE}")
        if verbose:
            self._echo(f"command: {shlex.join(command)}")
        self._started_at = time.monotonic()
        self._server = ServerProcess(command, environment, self._run_dir / LOG_FILE)
        follower = LogFollower(self._run_dir / LOG_FILE, sys.stderr) if verbose else contextlib.nullcontext()
        with follower:
            try:
                yield
            finally:
                self._server.stop(grace_s=grace_s if self._ready else _START_GRACE_S, hurry=self._in_a_hurry)

    def _prepare_run_dir(self) -> None:
        try:
            write_atomically(self._run_dir / PLAN_FILE, self._plan.to_json())
            # Proofs of an earlier server in the same folder would count for this one.
            for old in (self._run_dir / PROOF_DIR).glob("*.json"):
                old.unlink()
        except OSError as error:
            raise InputError(f"run folder {self._run_dir}: {error.strerror or error}") from None

    def wait_until_ready(self, timeout_s: float) -> ServerInfo:
        """Wait until /health answers and the proofs are in; print the table.

        Raises: see `serve`.
        """
        deadline = self._started_at + timeout_s
        while not self._client.healthy():
            if time.monotonic() > deadline:
                raise ServerFailedError(
                    f"server not ready after {timeout_s:.0f} s; {self._last_lines()}", hint=self._log_hint()
                )
            self._pause(_HEALTH_INTERVAL_S)
        self._ready = True
        start_up_s = time.monotonic() - self._started_at
        self._echo(f"ready after {start_up_s:.0f} s: {self._client.base_url}")
        proofs = self._wait_for_proofs()
        absent = self._why_absent()
        info = ServerInfo(
            base_url=self._client.base_url,
            pid=self._server.pid,
            model=self._client.models()[0],
            run_dir=self._run_dir,
            log_path=self._run_dir / LOG_FILE,
            rows=proof_rows(self._plan, proofs, absent=absent),
            proofs=proofs,
            start_up_s=start_up_s,
        )
        self._echo("")
        for line in render_table(info.rows, width=_width()).splitlines():
            self._echo(line)
        for kernel in kernels_in_use(proofs):
            self._echo(f"kernel: {kernel}")
        self._echo("")
        self._require(proofs)
        return info

    def _wait_for_proofs(self) -> tuple[Proof, ...]:
        """Return the proofs once every worker's is complete, or what there is after a while."""
        names = [decision.pass_name for decision in plugin_decisions(self._plan)]
        if not names or env.read_environment().disabled:
            return read_proofs(self._run_dir)
        begin, warmed_up = time.monotonic(), False
        while True:
            proofs = read_proofs(self._run_dir)
            waited = time.monotonic() - begin
            if not not_running(self._plan, proofs, names) or waited > _PROOF_WAIT_S:
                return proofs
            if all_holders_reported(proofs) and all(self._refused(proofs, name) for name in names):
                return proofs
            if waited > _WARM_UP_AFTER_S and not warmed_up:
                # vLLM's own warm-up runs the model on most builds; where it does not, one token does.
                warmed_up = True
                with contextlib.suppress(OSError):
                    self._client.complete("a", max_tokens=1, timeout_s=_PROOF_WAIT_S)
            self._pause(_POLL_S)

    @staticmethod
    def _refused(proofs: tuple[Proof, ...], name: str) -> bool:
        return any(name in proof.passes and proof.passes[name].why_not for proof in proofs)

    def _require(self, proofs: tuple[Proof, ...]) -> None:
        missing = not_running(self._plan, proofs, sorted(self._required), absent=self._why_absent())
        if missing:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            raise RequiredNotAppliedError(f"required, but not running: {reasons}", hint=self._log_hint())

    @staticmethod
    def _why_absent() -> str:
        return f"switched off by {env.DISABLE}" if env.read_environment().disabled else NO_WORKER

    def watch(self, info: ServerInfo) -> None:
        """Return never: raise when a stop is requested or the server fails."""
        watched = [proof for proof in info.proofs if proof.role in ("engine", "worker")]
        while True:
            self._pause(_LIVENESS_INTERVAL_S)
            for proof in watched:
                if not process_is_alive(proof):
                    self._await_end(proof)

    def _await_end(self, dead: Proof) -> None:
        """Give vLLM the time to notice that one of its processes died; it ends by itself then."""
        deadline = time.monotonic() + _NOTICE_S
        while time.monotonic() < deadline:
            self._pause(_POLL_S)
        raise ServerFailedError(
            f"{dead.role} process {dead.pid} died and the server hangs; {self._last_lines()}", hint=self._log_hint()
        )

    def _pause(self, seconds: float) -> None:
        """Sleep in small steps, looking for a stop request and a dead server."""
        deadline = time.monotonic() + seconds
        while True:
            self._raise_if_stopped()
            self._raise_if_ended()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(_POLL_S, left))

    def _raise_if_stopped(self) -> None:
        if self._signals is not None and self._signals.count:
            raise _StopRequestedError

    def _raise_if_ended(self) -> None:
        status = self._server.poll()
        if status is None:
            return
        if not self._ready:
            self._require_not_refused()
        when = "while serving" if self._ready else "during start-up"
        # vLLM ends with status 0 when its engine is killed, so the status says little.
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        cause = root_cause(self._run_dir / LOG_FILE)
        message = f"server ended {when} ({how}){f': {cause}' if cause else ''}"
        raise ServerFailedError(f"{message}\n{self._last_lines()}", hint=self._log_hint())

    def _require_not_refused(self) -> None:
        """A worker that must not run without a pass ends the server: that is exit code 6, not 7."""
        with contextlib.suppress(InputError):
            proofs = read_proofs(self._run_dir)
            if any(self._refused(proofs, name) for name in self._required):
                self._require(proofs)

    def _last_lines(self) -> str:
        return "\n".join([f"last lines of {LOG_FILE}:", *(f"  {line}" for line in self._server.last_lines(_LOG_LINES))])

    def _log_hint(self) -> str:
        return f"the whole log is {self._run_dir / LOG_FILE}"

    def _in_a_hurry(self) -> bool:
        return self._signals is not None and self._signals.count > 1
