"""Tells whether servers get on with their requests: /health says nothing about an engine that stands still."""

from __future__ import annotations

import time

import psutil

from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.traffic import Traffic, read_traffic
from moe_optimizer.proof.record import Proof

WARN_AFTER_S = 10.0
"""Chosen: a step takes milliseconds on GPUs and a few seconds on a CPU."""


class Heartbeat:
    """The forward progress of one server, from its counters."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._progress_at = time.monotonic()
        self._warned = False
        self._answers = True
        self.traffic: Traffic | None = None
        """As last read."""

    def beat(self) -> float:
        """Read the counters; return for how many seconds the server has had requests and made no progress with them.

        A server that does not answer makes none.
        """
        before = self.traffic
        try:
            now = read_traffic(self._client)
            self._answers = True
        except (OSError, ValueError):
            self._answers = False
        else:
            self.traffic = now
            if now is None or not now.unfinished or before is None or now.progress != before.progress:
                self._progress_at = time.monotonic()
        return time.monotonic() - self._progress_at

    def warning(self, stalled_s: float) -> bool:
        """Return whether a stall is to be warned of: once, until the server gets on."""
        due = stalled_s >= WARN_AFTER_S and not self._warned
        self._warned = stalled_s >= WARN_AFTER_S
        return due

    def in_words(self, stalled_s: float, pid: int, proofs: tuple[Proof, ...]) -> str:
        """Describe a stall, with the process that stands still.

        Args:
            stalled_s: for how long.
            pid: the API server.
            proofs: of the other processes.
        """
        what = f"has made no progress for {stalled_s:.0f} s"
        if self._answers and self.traffic is not None:
            what += f" with {self.traffic.unfinished} unfinished request{'' if self.traffic.unfinished == 1 else 's'}"
        named = {pid: "API server", **{proof.pid: named_role(proof.role) for proof in proofs}}
        stopped = [f"{name} {each} is stopped" for each, name in named.items() if _is_stopped(each)]
        engines = [f"{name} {each} does not answer it" for each, name in named.items() if name == "engine core"]
        asked = engines if self._answers else [f"API server {pid} does not answer"]
        return f"{what}: {', '.join(stopped or asked)}"


def named_role(role: str) -> str:
    """Return what messages call the process that wrote a proof."""
    return {"engine": "engine core", "frontend": "API server"}.get(role, role)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
