"""Tells how far a benchmark is, by what its starts and rounds have taken so far."""

from __future__ import annotations

import time
from collections.abc import Callable

_BEGUN = 0.01
"""Chosen: the share once a server is up and no round is done, from which nothing can be told yet."""


class Pace:
    """The share of a benchmark's time that is over.

    Args:
        starts: of servers, that are to come.
        rounds: of requests, that are to come.
        on_step: takes the share, which never falls, and what comes next.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        *,
        starts: int,
        rounds: int,
        on_step: Callable[[float, str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._starts, self._rounds = starts, rounds
        self._on_step, self._now = on_step, now
        self._starts_done, self._starts_s = 0, 0.0
        self._rounds_done, self._rounds_s = 0, 0.0
        self._since, self._share = now(), 0.0

    def starting(self, what: str) -> None:
        """Say that servers are being started."""
        self._since = self._now()
        self._say(what)

    def started(self) -> None:
        """Note that they are up."""
        self._starts_done += 1
        self._starts_s += self._passed()
        self._share = max(self._share, _BEGUN)

    def sending(self, what: str, *, done: int) -> None:
        """Say which round is sent.

        Args:
            what: the round.
            done: rounds that are over since the last call.
        """
        self.sent(done)
        self._say(what)

    def sent(self, done: int) -> None:
        """Note that rounds are over; what passes before the first of a start belongs to the start."""
        if done:
            self._rounds_done += done
            self._rounds_s += self._passed()
        else:
            self._starts_s += self._passed()

    def _passed(self) -> float:
        before, self._since = self._since, self._now()
        return self._since - before

    def _say(self, what: str) -> None:
        if self._rounds_done:
            over = self._starts_s + self._rounds_s
            left = max(0, self._rounds - self._rounds_done) * self._rounds_s / self._rounds_done
            if self._starts_done:
                left += max(0, self._starts - self._starts_done) * self._starts_s / self._starts_done
            self._share = max(self._share, over / (over + left))
        self._on_step(min(1.0, self._share), what)
