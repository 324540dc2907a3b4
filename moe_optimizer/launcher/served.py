"""Sums up what a run has served, from the counters of its servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from moe_optimizer.errors import ExitCode, MoeOptimizerError
from moe_optimizer.launcher.heartbeat import Heartbeat
from moe_optimizer.launcher.stop_signals import StopRequestedError
from moe_optimizer.specs.quantity import number_of


class Served:
    """From when the servers are ready: what came before, such as the warm-up, is not counted."""

    def __init__(self) -> None:
        self.heartbeats: Sequence[Heartbeat] = ()
        self.restarts = 0
        """Times the servers were started again after an unexpected end."""
        self._together = False
        self._ready_at: float | None = None
        self._earlier = self._before = 0

    def begin(self, heartbeats: Sequence[Heartbeat], *, together: bool) -> None:
        """Count from now on, for the first time or after a restart.

        Args:
            heartbeats: one for each server.
            together: each request passes through all of them.
        """
        self._earlier += self._requests() - self._before
        self.heartbeats = heartbeats
        self._together = together
        self._ready_at = self._ready_at or time.monotonic()
        self._read()
        self._before = self._requests()

    @property
    def begun(self) -> bool:
        """Whether the servers have been ready."""
        return self._ready_at is not None

    def to_finish(self, limit_s: float) -> str:
        """Return what a stop waits for, as the end of a line."""
        self._read()
        unfinished = self._over_servers([beat.unfinished for beat in self.heartbeats])
        if not unfinished:
            return ""
        return f": finishing {number_of(unfinished, 'request')}, up to {limit_s:.0f} s; a second Ctrl-C does not wait"

    @contextlib.contextmanager
    def summed_up(self, say: Callable[[str], None]) -> Iterator[None]:
        """Say what was served, once the block has ended; a start that failed has served nothing."""
        code = ExitCode.OK
        try:
            yield
        except MoeOptimizerError as error:
            code = error.exit_code
            raise
        except Exception as error:
            code = ExitCode.OK if isinstance(error, StopRequestedError) else ExitCode.BUG
            raise
        finally:
            if self._ready_at is not None:
                asked = self._earlier + self._requests() - self._before
                again = f", {number_of(self.restarts, 'restart')}" if self.restarts else ""
                lasted = _duration(time.monotonic() - self._ready_at)
                with contextlib.suppress(OSError):
                    say(f"served for {lasted}, {number_of(asked, 'request')}{again}, exit code {int(code)}")

    def _read(self) -> None:
        for heartbeat in self.heartbeats:
            with contextlib.suppress(OSError):
                heartbeat.beat()

    def _requests(self) -> int:
        """Return how many requests came, as far as known: what is unfinished at a stop counts too."""
        return self._over_servers([beat.asked for beat in self.heartbeats])

    def _over_servers(self, counts: list[int]) -> int:
        return max(counts, default=0) if self._together else sum(counts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
