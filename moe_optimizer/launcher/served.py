"""Sums up what a run has served, from the counters of its servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from moe_optimizer.errors import ExitCode
from moe_optimizer.launcher.heartbeat import Heartbeat
from moe_optimizer.launcher.http_client import ServerClient


class Served:
    """From when the servers are ready: what came before, such as the warm-up, is not counted.

    Args:
        clients: one for each server.
        together: each request passes through all of them.
    """

    def __init__(self, clients: Sequence[ServerClient], *, together: bool) -> None:
        self.heartbeats = [Heartbeat(client) for client in clients]
        self._together = together
        self._ready_at = time.monotonic()
        self._read()
        self._before = self._requests()

    def to_finish(self, limit_s: float) -> str:
        """Return what a stop waits for, as the end of a line."""
        self._read()
        unfinished = self._over_servers(
            [0 if beat.traffic is None else beat.traffic.unfinished for beat in self.heartbeats]
        )
        if not unfinished:
            return ""
        return f": finishing {_requests(unfinished)}, up to {limit_s:.0f} s; a second Ctrl-C does not wait for them"

    def in_words(self, code: ExitCode) -> str:
        """Return the last line of a run."""
        asked = self._requests() - self._before
        return f"served for {_duration(time.monotonic() - self._ready_at)}, {_requests(asked)}, exit code {int(code)}"

    def _read(self) -> None:
        for heartbeat in self.heartbeats:
            with contextlib.suppress(OSError):
                heartbeat.beat()

    def _requests(self) -> int:
        """Return how many requests came, as far as known: what is unfinished at a stop counts too."""
        known = [beat.traffic for beat in self.heartbeats if beat.traffic is not None]
        return self._over_servers([traffic.finished + traffic.unfinished for traffic in known])

    def _over_servers(self, counts: list[int]) -> int:
        return max(counts, default=0) if self._together else sum(counts)


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
