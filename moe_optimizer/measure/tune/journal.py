"""Keeps every measurement of a tuning in a file, so that a stopped tuning goes on, and counts the time they took.

A search that is run again takes the same steps as before, and is told what was measured then: it goes on where it was
stopped, with the same ledger as one that never was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.measure.claimed_folder import claim_folder
from moe_optimizer.measure.tune.trial import BudgetSpentError, Outcome
from moe_optimizer.plan.json_codec import decode, encode

_MAX_BYTES = 1 << 22
_RELATIVE = {"paired": 1.0, "alone": 0.5, "judged": 1.0}
"""Times of measurements that were not made yet, relative to one that was: they start two servers, or one."""


class Journal:
    """Measurements that were made, and what is left of the budget.

    Args:
        folder: gets a file for each measurement; None: nothing is kept.
        budget_s: for all measurements together, those of earlier runs included.
        identity: what the measurements are of, as JSON values; the folder of another is refused.

    Raises:
        InputError: the folder has measurements of something else.
    """

    def __init__(self, folder: Path | None, *, budget_s: float, identity: Any = None) -> None:
        self._folder = folder
        self.budget_s = budget_s
        self._last: dict[str, float] = {}
        self._found: dict[str, Outcome] = {}
        self._lost_s = self._replayed_s = 0.0
        self._begin: float | None = None
        if folder is not None:
            claim_folder(folder, identity, command="tune")

    @property
    def spent_s(self) -> float:
        """Seconds of all measurements so far, of one that was cut off or runs too."""
        running = 0.0 if self._begin is None else time.monotonic() - self._begin
        return running + self._lost_s + sum(each.seconds for each in self._found.values())

    @property
    def share(self) -> float:
        """Of the time that this run has, what earlier runs spent left out: the share that is over."""
        here, left = self.spent_s - self._replayed_s, self.left_s
        return here / (here + left) if left else 1.0

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self.budget_s - self.spent_s)

    def estimate_s(self, kind: str) -> float:
        """Return how long a measurement of a kind takes: as long as the last one; 0 before there was any."""
        if kind in self._last:
            return self._last[kind]
        known = [seconds / _RELATIVE[other] for other, seconds in self._last.items()]
        return _RELATIVE[kind] * max(known, default=0.0)

    def has_room(self, *kinds: str) -> bool:
        """Return whether measurements of these kinds, one after the other, would end in time."""
        return self.left_s > 0 and sum(map(self.estimate_s, kinds)) <= self.left_s

    def measured(self, kind: str, what: tuple[str, ...], measure: Callable[[], Outcome]) -> Outcome:
        """Return what was measured before under the same name, or measure it.

        Raises:
            BudgetSpentError: there is no time left for it.
            InputError: the file of an earlier measurement cannot be read.
        """
        name = f"{kind}-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]}"
        path = None if self._folder is None else self._folder / f"{name}.json"
        if name in self._found:
            return self._found[name]
        found = self._read(path) if path is not None and path.exists() else None
        if found is None:
            if not self.has_room(kind):
                raise BudgetSpentError
            self._begin = begin = time.monotonic()
            try:
                found = measure()
            except BaseException:
                self._lost_s += time.monotonic() - begin
                raise
            finally:
                self._begin = None
            if path is not None:
                write_atomically(path, json.dumps(encode(found), indent=1))
        else:
            self._replayed_s += found.seconds
        self._found[name] = found
        # A measurement that ended early says nothing of how long others take.
        if not found.pruned and not found.failed:
            self._last[kind] = found.seconds
        return found

    @staticmethod
    def _read(path: Path) -> Outcome:
        return decode(Outcome, json.loads(read_text(path, max_bytes=_MAX_BYTES)), origin=str(path))
