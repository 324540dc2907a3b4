"""Starts the processes of a run, waits until they are ready, watches them and stops them."""

from __future__ import annotations

import contextlib
import functools
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from moe_optimizer.errors import RequiredNotAppliedError, ServerFailedError
from moe_optimizer.launcher.address import who_is_answered
from moe_optimizer.launcher.decode_check import check_decode, decode_question
from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.evidence import Evidence, while_pausing
from moe_optimizer.launcher.heartbeat import Heartbeat
from moe_optimizer.launcher.http_client import api_key
from moe_optimizer.launcher.run_folder import RunFolder
from moe_optimizer.launcher.served import Served
from moe_optimizer.launcher.server_info import RunningServer, ServerInfo
from moe_optimizer.launcher.server_log import bound, followed
from moe_optimizer.launcher.service import Service
from moe_optimizer.launcher.start_up_ledger import StartUpLedger, render_phases
from moe_optimizer.launcher.start_up_progress import StartUpProgress
from moe_optimizer.launcher.stock_start import last_stock_start
from moe_optimizer.launcher.stop_signals import StopRequestedError
from moe_optimizer.launcher.traffic import read_router
from moe_optimizer.launcher.warm_up_deployment import warm_up_deployment
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.server_processes import process_is_alive

_POLL_S = 0.2
_HEALTH_INTERVAL_S = 0.1
"""Chosen: until a server listens, a question costs it nothing; a start waits half of it on average."""
_LIVENESS_INTERVAL_S = 1.0
_LONGEST_LOOK_S = 4.0
"""Chosen: a server that does not answer is waited for 2 s, twice at most, and the rest takes less than one more."""
NOTICE_S = 15.0
"""Chosen: vLLM notices a dead worker in about 5 s and ends by itself; after this it counts as hanging."""


class Supervisor:
    """One run from start to stop. When one of its processes ends, all of them end.

    Args:
        plan: one server, or a group of servers with a router.
        run_dir: gets plan.json, server.log and proof/, a group's servers in a folder each; of this run alone.
        served: counts what is served, over restarts.
        require: passes that must run besides those that the plan requires, unless workers timed them no faster than
            vLLM's own.
        strict: every pass must run that workers show.
        warm_up_s: how long everything may be driven through the shapes of traffic before it counts as ready; 0: not.
        decode_check_s: how long the decode check of each server may take; 0: there is none.
        stall_timeout_s: how long requests may make no progress until the server counts as hanging; 0: for ever.
        echo: takes the messages for the user, line by line; None: there are none.
        live: takes the state of a start again and again, for a line that is written over; None: there is none.
        verbose: copy the logs to stderr as they grow.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        *,
        served: Served | None = None,
        require: frozenset[str] = frozenset(),
        strict: bool = False,
        warm_up_s: float = 0.0,
        decode_check_s: float = 0.0,
        stall_timeout_s: float = 0.0,
        echo: Callable[[str], None] | None = None,
        live: Callable[[str], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self._plan = plan
        self._warm_up_s, self._decode_check_s = warm_up_s, decode_check_s
        self._echo, self._live = echo or (lambda _line: None), live
        self._verbose = verbose
        self._stall_timeout_s = stall_timeout_s
        self._served = served or Served()
        self._ready = self._hangs = self._disk_is_full = False
        self._warmed_up: Literal["whole", "short", "no"] = "no"
        self._stops: Sequence[int] = ()
        self._beats: list[tuple[Service, Heartbeat]] = []
        self._deployment = Deployment(plan, RunFolder(run_dir), restarts=self._served.restarts)
        self._evidence = Evidence(plan, self._deployment, require, strict=strict)
        self._followers = contextlib.ExitStack()

    @contextlib.contextmanager
    def started(self, stops: Sequence[int] = ()) -> Iterator[None]:
        """Start the servers, and stop everything at the end of the block, however it ends.

        Args:
            stops: the stop requests so far, see `collected_stops`.
        """
        self._stops = stops
        self._deployment.check()
        with self._deployment.prepared(), self._followers:
            self._raise_if_stopped()
            self._started_at = time.monotonic()
            self._ledger = StartUpLedger()
            try:
                for server in self._deployment.servers:
                    server.folder.set_warming(warming=self._asks_before_ready)
                    self._start(server)
                yield
            finally:
                # Ctrl-C also ends the reader of a pipe: a failed message must not keep the servers alive.
                try:
                    if stops and self._ready:
                        self._echo(f"stopping{self._served.to_finish(self._plan.serve_args.drain_timeout_s())}")
                finally:
                    self._deployment.stop(hurry=lambda: len(stops) > 1, drain=self._ready and not self._hangs)

    def ask_to_stop(self) -> None:
        """Tell the server to end, and do not wait: the end of `started` does. A router's servers end with it."""
        if self._deployment.router is None:
            for server in self._deployment.servers:
                server.ask_to_stop()

    @property
    def _asks_before_ready(self) -> bool:
        return self._warm_up_s > 0 or self._decode_check_s > 0

    def _start(self, service: Service) -> None:
        name = "vLLM" if service.title == "server" else f"the {service.title}"
        self._echo(f"starting {name}; its log: {service.folder.log_path}")
        if self._verbose:
            self._echo(f"command: {shlex.join(service.command)}")
        service.start()
        if self._verbose:
            self._followers.enter_context(followed(service.folder.log_path, sys.stderr))

    def wait_until_ready(self, timeout_s: float) -> ServerInfo:
        """Wait until everything answers and the proofs are in; show the table.

        Raises: see `launch.serve`.
        """
        deadline = self._started_at + timeout_s
        progress = StartUpProgress(self._plan, self._deployment.servers[0].folder.log_path, self._echo, live=self._live)
        for server in self._deployment.servers:
            self._wait_for(server, deadline, timeout_s, progress.look)
        if self._deployment.router is not None:
            self._start(self._deployment.router)
            self._wait_for(self._deployment.router, deadline, timeout_s)
        progress.ended()
        self._ledger.ended("vLLM answers", parts=progress.phases_s)
        front = self._deployment.front
        if self._asks_before_ready:
            self._ask_before_ready()
        start_up_s = time.monotonic() - self._started_at
        self._echo(f"ready after {start_up_s:.0f} s: {front.client.base_url}")
        if answered := who_is_answered(front.addresses[0][0], api_key()):
            self._echo(answered)
        if not self._asks_before_ready:
            self._evidence.observe(self._pause)
            self._evidence.collect(self._pause)
        phases = self._ledger.phases(self._deployment.servers[0].folder.log_path)
        model, servers = self._model(), tuple(self._described(server) for server in self._deployment.servers)
        outcome = self._evidence.outcome()
        for line in outcome.lines(width=max(60, shutil.get_terminal_size((80, 24)).columns)):
            self._echo(line)
        if self._verbose:
            stock = last_stock_start(self._plan)
            if stock is not None:
                self._echo(f"phases of this start, and of stock vLLM's last one here ({stock.in_words()})")
            for line in (*render_phases(phases, None if stock is None else stock.phases_s), ""):
                self._echo(line)
        outcome.require(hint=self._deployment.servers[0].log_hint)
        seen_within_s = _LONGEST_LOOK_S * (1 + len(self._deployment.services))
        self._served.begin(
            [
                Heartbeat(server.client, run_dir=server.folder.path, seen_within_s=seen_within_s)
                for server in self._deployment.servers
            ],
            together=self._plan.decision("disaggregation").status is Status.ON,
        )
        self._ready = True
        self._beats = list(zip(self._deployment.servers, self._served.heartbeats, strict=True))
        for server, heartbeat in self._beats:
            if not heartbeat.counts:
                self._echo(f"warning: {server.title} publishes no counts of its requests: a stall will not be noticed")
        if (router := self._deployment.router) is not None:
            beat = Heartbeat(router.client, read=read_router, named=router.title, seen_within_s=seen_within_s)
            self._beats.append((router, beat))
        return ServerInfo(
            base_url=front.client.base_url,
            pid=front.pid,
            model=model,
            run_dir=self._deployment.folder.path,
            log_path=front.folder.log_path,
            servers=servers,
            rows=outcome.rows,
            proofs=self._evidence.proofs,
            start_up_s=start_up_s,
            phases_s=phases,
            warm_up=self._warmed_up,
            restarts=self._served.restarts,
        )

    def _ask_before_ready(self) -> None:
        """Warm up, collect the proofs, compare what is decoded with what is read.

        Raises:
            RequiredNotAppliedError: a required pass does not run, or our kernels compute something else when decoding.
        """
        self._evidence.observe(self._pause)
        # What a worker has refused while loading is known now; the rest of the proofs is in when the warm-up ends.
        self._evidence.require_not_refused()
        if self._warm_up_s:
            self._warm_up()
        self._evidence.collect(self._pause)
        self._evidence.outcome().require(hint=self._deployment.servers[0].log_hint)
        self._ledger.ended("proofs")
        if self._decode_check_s:
            self._check_decode()
            self._ledger.ended("decode check")
        # Graphs are compared while requests replay them.
        self._evidence.read_again()
        for server in self._deployment.servers:
            server.folder.set_warming(warming=False)

    def _warm_up(self) -> None:
        result = warm_up_deployment(
            self._plan, self._deployment, self._model(), limit_s=self._warm_up_s, pause=self._pause, say=self._echo
        )
        self._echo(result.in_words())
        self._warmed_up = "short" if result.short else "whole"
        self._ledger.ended("warm-up", parts=result.group_s)

    def _check_decode(self) -> None:
        """Compare what each server decodes with what it reads.

        Raises:
            RequiredNotAppliedError: they are not the same, and our kernels compute.
        """
        model = self._model()
        ours = any(isinstance(each.params, FlashDmoeParams) for each in self._plan.plugin_decisions)
        for server in self._deployment.servers:
            question = decode_question(self._plan, server.client.max_model_len())
            check = functools.partial(check_decode, server.client, model, question, limit_s=self._decode_check_s)
            found = while_pausing(self._pause, check)
            self._evidence.decoded(server, found.in_words())
            if not found.wrong:
                continue
            wrong = f"{server.title}: {found.wrong}"
            if not ours:
                self._echo(f"warning: decode check: {wrong}")
                continue
            raise RequiredNotAppliedError(
                f"decode check: {wrong}",
                hint="serve without our kernels: --disable-flash-dmoe; or without this check: --no-decode-check",
            )

    def _wait_for(
        self, service: Service, deadline: float, timeout_s: float, look: Callable[[], None] = lambda: None
    ) -> None:
        while not service.becomes_ready():
            look()
            if time.monotonic() > deadline:
                raise service.failed(f"not ready after {timeout_s:.0f} s")
            self._pause(_HEALTH_INTERVAL_S)

    def _model(self) -> str:
        """Return the name to use in requests."""
        server = self._deployment.servers[0]
        try:
            return server.client.models()[0]
        except OSError as error:
            self._await_end(server, f"does not answer: {error}")

    def _described(self, server: Service) -> RunningServer:
        return RunningServer(
            name=server.title,
            base_url=server.client.base_url,
            pid=server.pid,
            log_path=server.folder.log_path,
            proofs=self._evidence.proofs_of(server),
        )

    def watch(self) -> NoReturn:
        """Return never: raise when a stop is requested or anything fails."""
        watched = [
            (server, proof)
            for server in self._deployment.servers
            for proof in self._evidence.proofs_of(server)
            if proof.role in ("engine", "worker")
        ]
        while True:
            self._pause(_LIVENESS_INTERVAL_S)
            self._look_for_stalls()
            self._look_for_a_full_disk()
            for server in self._deployment.services:
                bound(server.folder.log_path)
            for server, proof in watched:
                if not process_is_alive(proof.pid):
                    self._await_end(server, f"hangs: its {proof.role} process {proof.pid} died")

    def _look_for_stalls(self) -> None:
        stalled = [(*each, each[1].beat()) for each in self._beats]
        servers_s = max(stalled_s for server, _, stalled_s in stalled if server is not self._deployment.router)
        for server, heartbeat, stalled_s in stalled:
            if server is self._deployment.router and servers_s > _LIVENESS_INTERVAL_S:
                # It may only wait for that server.
                continue
            hangs = 0 < self._stall_timeout_s <= stalled_s
            if hangs or heartbeat.warning(stalled_s):
                what = heartbeat.in_words(stalled_s, server.pid, self._evidence.proofs_of(server))
                if hangs:
                    self._hangs = True
                    raise server.failed(what)
                self._echo(f"warning: {server.title} {what}")

    def _look_for_a_full_disk(self) -> None:
        """Say it once when the disk is full, and when it has room again: the server's own log can say nothing then."""
        folder, was_full = self._deployment.folder, self._disk_is_full
        self._disk_is_full = folder.is_full()
        if self._disk_is_full and not was_full:
            self._echo(
                f"warning: run folder {folder.path}: its disk is full. The server serves on; until there is room, its "
                "log, proofs and expert counts are lost"
            )
        elif was_full and not self._disk_is_full:
            self._echo(f"run folder {folder.path}: there is room on its disk again")

    def _await_end(self, server: Service, otherwise: str) -> NoReturn:
        """Give vLLM the time to notice that one of its processes died: its own end says more."""
        self._pause(NOTICE_S)
        killed = server.killed()
        raise server.failed(f"hangs: {killed}" if killed else otherwise)

    def _pause(self, seconds: float) -> None:
        """Sleep in small steps, looking for a stop request and for a service that has ended."""
        deadline = time.monotonic() + seconds
        while True:
            self._raise_if_stopped()
            self._raise_if_ended()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(_POLL_S, left))

    def _raise_if_stopped(self) -> None:
        if self._stops:
            raise StopRequestedError

    def _raise_if_ended(self) -> None:
        for service in self._deployment.services:
            failure = service.failure()
            if failure is None:
                continue
            if isinstance(failure, ServerFailedError) and not self._ready:
                # A worker that must not run as it is ends its server: that is exit code 6, not 7.
                self._evidence.require_not_refused()
            raise failure
