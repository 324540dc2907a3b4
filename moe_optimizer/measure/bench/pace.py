"""Tells how far a run is by time: from how long its parts took so far, not from how many of them are over."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

_BEGUN = 0.01
"""Chosen: the share once servers are up and no round is over."""


class Pace:
    """The parts of a run that are still to do, and how long those took that are over.

    A start of a server and a round of requests take times that have nothing to do with each other, and neither have
    rounds of different loads. A kind of which none is over is taken to last as the other rounds did, by its work.

    Args:
        kinds: of all parts that are to do, one for each part.
        work: kind -> how much one part of it is, beside others; 1 where nobody says.
    """

    START = "start"
    """The kind of a part that starts servers."""

    def __init__(self, kinds: Iterable[str], work: Mapping[str, float] | None = None) -> None:
        self._left, self._work = Counter(kinds), work or {}
        self._took: defaultdict[str, list[float]] = defaultdict(list)
        self._began = self._since = time.monotonic()
        self._running = ""
        self._told = 0.0

    def expect(self, kinds: Iterable[str]) -> None:
        """Add parts that are to do."""
        self._left.update(kinds)

    def begin(self, kind: str) -> float:
        """End the part that runs, begin one of this kind, and return the share of the run's time that is over.

        It never falls: where parts last longer than was known, or are sent again, it stands still.
        """
        self.end()
        self._left[kind] = max(0, self._left[kind] - 1)
        self._running = kind
        self._told = max(self._told, self._share())
        return self._told

    def end(self) -> None:
        """End the part that runs, if any."""
        now = time.monotonic()
        if self._running:
            self._took[self._running].append(now - self._since)
        self._running, self._since = "", now

    def _share(self) -> float:
        """Return next to nothing before a round is over: nothing is known of the others."""
        rounds = {kind: each for kind, each in self._took.items() if kind != self.START}
        if not rounds:
            return _BEGUN if self._took else 0.0
        done = sum(self._work.get(kind, 1.0) * len(each) for kind, each in rounds.items())
        pace = sum(map(sum, rounds.values())) / done
        left = self._lasts(self._running, pace)
        left += sum(number * self._lasts(kind, pace) for kind, number in self._left.items())
        spent = self._since - self._began
        return spent / (spent + left) if left else 1.0

    def _lasts(self, kind: str, pace: float) -> float:
        known = self._took.get(kind)
        return sum(known) / len(known) if known else pace * self._work.get(kind, 1.0)
