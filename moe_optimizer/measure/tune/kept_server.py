"""Keeps one server running between the measurements that compare others with it: a start takes longer than they do."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.measure.bench.side import RunningSide, Side, starting


class KeptServer:
    """At most one server, which stays up after a measurement that ended well."""

    def __init__(self) -> None:
        self._wanted: Side | None = None
        self._running: RunningSide | None = None
        self._stack = contextlib.ExitStack()

    @property
    def is_up(self) -> bool:
        """Whether a server waits for the next measurement."""
        return self._running is not None

    def keep(self, side: Side | None) -> None:
        """Keep the server of a side from its next start on; stop the one that is up if it is another's. None: none."""
        if self._wanted is not None and (side is None or side.served != self._wanted.served):
            self.close()
        self._wanted = side

    def close(self) -> None:
        """Stop the server that is up."""
        self._running = None
        self._stack.close()

    @contextlib.contextmanager
    def starting(self, side: Side, *, run_dir: Path, ready_timeout_s: float) -> Iterator[Callable[[], RunningSide]]:
        """As `side.starting`, with the server that is up where it is this side's, and without its stop."""
        if side is not self._wanted:
            with starting(side, run_dir=run_dir, ready_timeout_s=ready_timeout_s) as wait:
                yield wait
            return
        try:
            self._stop_a_dead_one(side)
            if self._running is not None:
                kept = self._running
                yield lambda: kept
                return
            begun = self._stack.enter_context(starting(side, run_dir=run_dir, ready_timeout_s=ready_timeout_s))

            def wait_and_keep() -> RunningSide:
                self._running = dataclasses.replace(begun(), ask_to_stop=lambda: None)
                return self._running

            yield wait_and_keep
        except BaseException:
            self.close()
            raise

    def _stop_a_dead_one(self, side: Side) -> None:
        if self._running is not None:
            try:
                self._running.check_alive(side.name)
            except ServerFailedError:
                self.close()
