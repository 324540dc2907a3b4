"""Tells whether servers get on with their requests: /health says nothing about an engine that stands still."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.traffic import Traffic, read_traffic
from moe_optimizer.proof.record import Proof
from moe_optimizer.proof.step_count import Steps, read_steps
from moe_optimizer.specs.quantity import number_of

WARN_AFTER_S = 10.0
"""Chosen: a step takes milliseconds on GPUs and a few seconds on a CPU."""
_ASK_AFTER_S = 3.0
"""Chosen: a pause is asked for only where there may be one; an engine that stands still lets that wait."""


class Heartbeat:
    """The forward progress of one server, engine by engine, from its counters.

    Args:
        client: of the server.
        read: reads its counters: None where it publishes none.
        named: what messages call the process that answers.
        run_dir: where its workers count their steps; None: they are not looked at.
        seen_within_s: the longest that this process, running, lets pass between two looks at the clock. What passes
            beyond it, as when a shell or a container stopped everything (SIGSTOP), is no stall of the server.
    """

    def __init__(
        self,
        client: ServerClient,
        *,
        read: Callable[[ServerClient], Mapping[str, Traffic] | None] = read_traffic,
        named: str = "API server",
        run_dir: Path | None = None,
        seen_within_s: float = math.inf,
    ) -> None:
        self._client, self._read, self._named, self._run_dir = client, read, named, run_dir
        self._seen_within_s, self._seen_at = seen_within_s, time.monotonic()
        self._progress_at = {"": self._seen_at}
        self._warned = False
        self._answers = True
        self._steps: tuple[Steps, ...] = ()
        """Those of the workers when it did not answer last."""
        self._engines: Mapping[str, Traffic] = {}
        self.counts = True
        """Whether the server publishes the counters."""

    @property
    def unfinished(self) -> int:
        """Requests that ran or waited when the counters were last read."""
        return sum(traffic.unfinished for traffic in self._engines.values())

    @property
    def asked(self) -> int:
        """Requests that had come by then: what is unfinished counts too."""
        return self.unfinished + sum(traffic.finished for traffic in self._engines.values())

    def beat(self) -> float:
        """Read the counters; return for how many seconds an engine has had requests and made no progress with them.

        A server that does not answer makes none, unless its workers make steps: it only has too much to do then. One
        that was paused or put to sleep has nothing to do.
        """
        before = self._engines
        try:
            found = self._read(self._client)
            self._engines, self.counts, self._answers = found or {}, found is not None, True
        except (OSError, ValueError):
            steps = () if self._run_dir is None else tuple(read_steps(self._run_dir))
            if not self._answers and steps != self._steps:
                self._progress_at = dict.fromkeys(self._progress_at, self._now())
            self._answers, self._steps = False, steps
        else:
            now = self._now()
            gets_on = {name: now for name, traffic in self._engines.items() if _gets_on(before.get(name), traffic)}
            known = {name: self._progress_at.get(name, now) for name in self._engines or ("",)}
            self._progress_at = {**known, **(gets_on if self._engines else {"": now})}
            if self._stalled_s() > _ASK_AFTER_S and self._client.paused():
                self._progress_at = dict.fromkeys(known, now)
        return self._stalled_s()

    def _stalled_s(self) -> float:
        return self._now() - min(self._progress_at.values())

    def _now(self) -> float:
        """Return the time, with the progress as much later as this process did not run since it looked last."""
        now = time.monotonic()
        unseen_s = max(0.0, now - self._seen_at - self._seen_within_s)
        self._progress_at = {name: at + unseen_s for name, at in self._progress_at.items()}
        self._seen_at = now
        return now

    def warning(self, stalled_s: float) -> bool:
        """Return whether a stall is to be warned of: once, until the server gets on."""
        due = stalled_s >= WARN_AFTER_S and not self._warned
        self._warned = stalled_s >= WARN_AFTER_S
        return due

    def in_words(self, stalled_s: float, pid: int, proofs: tuple[Proof, ...]) -> str:
        """Describe a stall, with the process that stands still.

        Args:
            stalled_s: for how long.
            pid: the process that answers.
            proofs: of the other processes.
        """
        what = f"has made no progress for {stalled_s:.0f} s"
        if self._answers and self._engines:
            what += f" with {number_of(self.unfinished, 'unfinished request')}"
        named = {pid: self._named, **{proof.pid: named_role(proof.role) for proof in proofs}}
        stopped = [f"{name} {each} is stopped" for each, name in named.items() if _is_stopped(each)]
        slowest = min(self._progress_at, key=lambda name: self._progress_at[name])
        cores = [proof for proof in proofs if proof.role == "engine"]
        asked = [proof for proof in cores if len(cores) == 1 or str(proof.rank) == slowest] or cores
        engines = [f"{named[proof.pid]} {proof.pid} does not answer it" for proof in asked]
        return (
            f"{what}: {', '.join(stopped or (engines if self._answers else [f'{self._named} {pid} does not answer']))}"
        )


def _gets_on(before: Traffic | None, now: Traffic) -> bool:
    return before is None or now.asleep or not now.unfinished or before.progress != now.progress


def named_role(role: str) -> str:
    """Return what messages call the process that wrote a proof."""
    return {"engine": "engine core", "frontend": "API server"}.get(role, role)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
