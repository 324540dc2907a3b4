"""Starts, watches and stops one service of a run: a vLLM server, or the router before several."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_optimizer.errors import InputError, MoeOptimizerError, ServerFailedError, printable
from moe_optimizer.launcher.heartbeat import named_role
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.process import ServerProcess
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.server_log import killed_processes, refusal, root_cause
from moe_optimizer.proof.record import read_proofs

START_GRACE_S = 1.0
"""Chosen: a server that is still starting has no requests to finish."""
_OUT_OF_MEMORY = ", probably out of memory"
_LOG_LINES = 20


@dataclass(slots=True, kw_only=True)
class Service:
    """One server or router of a run, with every process that it starts."""

    title: str
    """Its name in messages: "server", "prefill server", "router"."""
    addresses: tuple[tuple[str, int], ...]
    """Where it listens: host and port."""
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: RunFolder
    """Its plan, log and proofs."""
    client: ServerClient
    takes_user_arguments: bool
    """Whether some of its arguments are the user's: if it refuses them, that is bad input."""
    ready: bool = False
    """It has answered its health check."""
    _process: ServerProcess | None = field(default=None, init=False)

    def start(self) -> None:
        """Start the process."""
        self._process = ServerProcess(self.command, self.environment, self.folder.log_path)

    @property
    def pid(self) -> int:
        """Process id of its first process."""
        assert self._process is not None, f"{self.title} was not started"
        return self._process.pid

    def becomes_ready(self) -> bool:
        """Return whether it answers its health check, or has done so before."""
        self.ready = self.ready or self.client.healthy()
        return self.ready

    def failure(self) -> MoeOptimizerError | None:
        """Return why it ended, None while it runs."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return None
        refused = refusal(self.folder.log_path, status)
        if refused and self.takes_user_arguments and not self.ready:
            return InputError(f"vLLM refuses its arguments: {refused}", hint=self.log_hint)
        when = "while serving" if self.ready else "during start-up"
        if killed := self.killed():
            return ServerFailedError(f"{self.title} ended {when}: {killed}", hint=self.log_hint)
        # vLLM ends with status 0 when its engine is killed, so the status says little.
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        cause = root_cause(self.folder.log_path)
        return self.failed(f"ended {when} ({how}){f': {cause}' if cause else ''}")

    def killed(self) -> str:
        """Return in words which of its processes were killed by a signal, "" when its log says of none."""
        try:
            roles = {str(proof.pid): named_role(proof.role) for proof in read_proofs(self.folder.path)}
        except InputError:
            roles = {}
        said = [
            f"{roles.get(name, 'process')} {name} was killed by {by}{_OUT_OF_MEMORY if by == 'SIGKILL' else ''}"
            for name, by in killed_processes(self.folder.log_path)
        ]
        return printable("; ".join(said))

    def failed(self, what: str) -> ServerFailedError:
        """Return the error "TITLE WHAT" with the last lines of its log."""
        lines = [] if self._process is None else self._process.last_lines(_LOG_LINES)
        shown = "\n".join([f"last lines of {self.folder.log_path.name}:", *(f"  {line}" for line in lines)])
        return ServerFailedError(f"{self.title} {what}\n{shown}", hint=self.log_hint)

    def ask_to_stop(self) -> None:
        """Tell it to finish its requests and end; do not wait for it."""
        if self._process is not None:
            self.folder.set_draining()
            self._process.ask_to_stop()

    def stop(self, *, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Stop it and everything it started; one that serves has `grace_s` seconds to finish its requests."""
        if self._process is not None:
            self.folder.set_draining()
            self._process.stop(grace_s=grace_s if self.ready else min(grace_s, START_GRACE_S), hurry=hurry)

    @property
    def log_hint(self) -> str:
        """The hint of its errors: the path of the whole log."""
        return f"the whole log is {self.folder.log_path}"
