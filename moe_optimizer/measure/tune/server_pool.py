"""Keeps the servers of a measurement up for the next ones: a start takes longer than what is sent to it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moe_optimizer.errors import ServerFailedError
from moe_optimizer.measure.bench.side import RunningSide, Side, Starting, starting
from moe_optimizer.measure.quality.request import telling

SLOTS = 2
"""As many servers as a pair has: each has its port."""


@dataclasses.dataclass(slots=True)
class _Up:
    """A server that was started."""

    key: str
    stack: contextlib.ExitStack
    """Stops it."""
    running: RunningSide | None = None
    """None until it is ready."""
    used: int = 0


class ServerPool:
    """At most two servers. One that is asked for again need not start; another takes the place of the older.

    Args:
        top_logprobs: of a position, that each server may tell, so that it can be judged.
    """

    def __init__(self, *, top_logprobs: int) -> None:
        self._top_logprobs = top_logprobs
        self._up: dict[int, _Up] = {}
        self._uses = 0
        self.slowest_stop_s: float | None = None
        """None before any has stopped."""
        self.starts_s: list[float] = []
        """How long each server took until it was ready, in order."""

    def slots_for(self, keys: Sequence[str]) -> tuple[int, ...]:
        """Return a slot for each server: where it is up; else an empty one, or that of the one unused for longest.

        Args:
            keys: name the servers, at most two.
        """
        slots = {key: slot for slot, up in self._up.items() if (key := up.key) in keys}
        free = sorted(set(range(SLOTS)) - set(slots.values()), key=self._last_use)
        for key in keys:
            if key not in slots:
                slots[key] = free.pop(0)
        return tuple(slots[key] for key in keys)

    def _last_use(self, slot: int) -> tuple[int, int]:
        return (self._up[slot].used if slot in self._up else -1, slot)

    def start_of(self, sides: Sequence[Side], keys: Sequence[str], slots: Sequence[int]) -> Starting:
        """Return what starts these sides' servers, as `starting`, where they are not up, and keeps them up.

        A measurement that fails stops its servers; one that is interrupted all of them.
        """
        places = {id(side): place for side, *place in zip(sides, keys, slots, strict=True)}

        @contextlib.contextmanager
        def start(side: Side, *, run_dir: Path, ready_timeout_s: float) -> Iterator[Callable[[], RunningSide]]:
            key, slot = places[id(side)]
            try:
                yield self._begun(side, str(key), int(slot), run_dir, ready_timeout_s)
            except Exception:
                self._stop(int(slot))
                raise
            except BaseException:
                self.close()
                raise

        return start

    def _begun(
        self, side: Side, key: str, slot: int, run_dir: Path, ready_timeout_s: float
    ) -> Callable[[], RunningSide]:
        self._uses += 1
        up = self._up.get(slot)
        if up is not None and up.key == key and up.running is not None and _is_alive(up.running, side.name):
            up.used, kept = self._uses, up.running
            return lambda: dataclasses.replace(kept, ask_to_stop=lambda: None)
        self._stop(slot)
        up = self._up[slot] = _Up(key, contextlib.ExitStack(), used=self._uses)
        told = telling(side, self._top_logprobs)
        wait = up.stack.enter_context(starting(told, run_dir=run_dir, ready_timeout_s=ready_timeout_s))

        def wait_and_keep() -> RunningSide:
            up.running = wait()
            self.starts_s.append(up.running.ready_s or 0.0)
            return dataclasses.replace(up.running, ask_to_stop=lambda: None)

        return wait_and_keep

    def close(self) -> None:
        """Stop all servers, at the same time."""
        self._stop(*self._up)

    def _stop(self, *slots: int) -> None:
        ending = [self._up.pop(slot) for slot in slots if slot in self._up]
        if not ending:
            return
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            for up in ending:
                stack.push(up.stack)
            for up in ending:
                if up.running is not None:
                    up.running.ask_to_stop()
        self.slowest_stop_s = max(time.monotonic() - begin, self.slowest_stop_s or 0.0)


def _is_alive(running: RunningSide, name: str) -> bool:
    try:
        running.check_alive(name)
    except ServerFailedError:
        return False
    return True
