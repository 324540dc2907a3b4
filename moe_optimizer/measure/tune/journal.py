"""Keeps every measurement of a tuning in a file, so that a stopped tuning goes on, and counts the time they took.

A search that is run again takes the same steps as before, and is told what was measured then: it goes on where it was
stopped, with the same ledger as one that never was.

Files: `KIND-NAME.json` has a finished measurement, `KIND-NAME.cut` the seconds of one that was cut off, and
`before.seconds` those of what came before the search.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import read_json, read_text, write_atomically
from moe_optimizer.measure.claimed_folder import claim_folder
from moe_optimizer.measure.tune.trial import BudgetSpentError, Outcome
from moe_optimizer.plan.json_codec import decode, encode

_MAX_BYTES = 1 << 22
_RELATIVE = {"paired": 1.0, "ablated": 1.0, "alone": 0.5, "judged": 0.5}
"""Times of measurements that were not made yet, relative to one that was. A pair starts two servers at most, or two for
each repetition where they do not fit beside each other; a judgement asks the pair before it, or starts two once.
"""
_NAMES = {"ablated": "paired"}
"""Kinds that are measured as another: they have its name, so that the same two servers are compared once."""
_CUT = ".cut"
_BEFORE = "before.seconds"


class Journal:
    """Measurements that were made, and what is left of the budget.

    All time since this was made is spent, and what earlier runs have spent: what lies between two measurements is of
    the second. While what an earlier run measured is replayed, as much is left as was left then.

    Args:
        folder: gets a file for each measurement; None: nothing is kept.
        budget_s: for everything, earlier runs included.
        identity: what the measurements are of, as JSON values; the folder of another is refused.
        before_s: seconds of this run that are over already.

    Raises:
        InputError: the folder has measurements of something else, or a file in it cannot be read.
    """

    def __init__(self, folder: Path | None, *, budget_s: float, identity: Any = None, before_s: float = 0.0) -> None:
        self._folder = folder
        self.budget_s = budget_s
        self._last: dict[str, float] = {}
        self._found: dict[str, Outcome] = {}
        self._on_file: dict[str, Outcome] = {}
        self._cut: dict[str, float] = {}
        self._before_s = 0.0
        if folder is not None:
            claim_folder(folder, identity, command="tune")
            self._read(folder)
        self._waiting = set(self._on_file)
        self._earlier_s = self._before_s + sum(self._cut.values()) + sum(e.seconds for e in self._on_file.values())
        self._before_s += before_s
        if folder is not None:
            write_atomically(folder / _BEFORE, f"{self._before_s}")
        self._since = time.monotonic()
        """When the last measurement of this run ended."""

    def _read(self, folder: Path) -> None:
        for path in folder.glob("*-*.json"):
            self._on_file[path.stem] = decode(Outcome, read_json(path, max_bytes=_MAX_BYTES), origin=str(path))
        for path in folder.glob(f"*{_CUT}"):
            if path.stem not in self._on_file:
                self._cut[path.stem] = _read_seconds(path)
        if (path := folder / _BEFORE).exists():
            self._before_s = _read_seconds(path)

    @property
    def spent_s(self) -> float:
        """Seconds of everything so far, of a measurement that was cut off or runs too."""
        if self._waiting:
            return self._before_s + sum(each.seconds for each in self._found.values())
        measured = sum(each.seconds for each in {**self._on_file, **self._found}.values())
        return self._before_s + measured + sum(self._cut.values()) + time.monotonic() - self._since

    @property
    def share(self) -> float:
        """Of the time that this run has, what earlier runs spent left out: the share that is over."""
        whole = self.budget_s - self._earlier_s
        return min(1.0, max(0.0, self.spent_s - self._earlier_s) / whole) if whole > 0 else 1.0

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self.budget_s - self.spent_s)

    def estimate_s(self, kind: str) -> float:
        """Return how long a measurement of a kind takes: as the last one, but for what that did once; 0 before any."""
        if kind in self._last:
            return self._last[kind]
        known = [seconds / _RELATIVE[other] for other, seconds in self._last.items()]
        return _RELATIVE[kind] * max(known, default=0.0)

    def has_room(self, *kinds: str) -> bool:
        """Return whether measurements of these kinds, one after the other, would end in time."""
        return self.left_s > 0 and sum(map(self.estimate_s, kinds)) <= self.left_s

    def cut_off_s(self, kind: str, what: tuple[str, ...]) -> float:
        """Return the seconds of a measurement that was cut off, in this run and earlier ones; 0 if it was not."""
        return self._cut.get(_name(kind, what), 0.0)

    def measured(self, kind: str, what: tuple[str, ...], measure: Callable[[], Outcome]) -> Outcome:
        """Return what was measured before under the same name, or measure it, and say how long that took.

        Raises:
            BudgetSpentError: there is no time left for it.
        """
        name = _name(kind, what)
        if name not in self._found:
            self._found[name] = self._on_file.get(name) or self._new(kind, name, measure)
            self._waiting.discard(name)
            # A measurement that ended early says nothing of how long others take.
            if not self._found[name].pruned and not self._found[name].failed:
                self._last[kind] = self._found[name].seconds - self._found[name].once_s
        return self._found[name]

    def _new(self, kind: str, name: str, measure: Callable[[], Outcome]) -> Outcome:
        self._waiting.clear()
        if not self.has_room(kind):
            raise BudgetSpentError
        try:
            found = measure()
        except BaseException:
            self._cut[name] = self._took_s(name)
            if self._folder is not None:
                write_atomically(self._folder / f"{name}{_CUT}", f"{self._cut[name]}")
            raise
        found = dataclasses.replace(found, seconds=self._took_s(name))
        self._cut.pop(name, None)
        if self._folder is not None:
            write_atomically(self._folder / f"{name}.json", json.dumps(encode(found), indent=1))
            (self._folder / f"{name}{_CUT}").unlink(missing_ok=True)
        return found

    def _took_s(self, name: str) -> float:
        """End a measurement; return its seconds, with those of earlier runs in which it was cut off."""
        now = time.monotonic()
        took, self._since = now - self._since, now
        return took + self._cut.get(name, 0.0)


def _name(kind: str, what: tuple[str, ...]) -> str:
    return f"{_NAMES.get(kind, kind)}-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]}"


def _read_seconds(path: Path) -> float:
    text = read_text(path, max_bytes=64)
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{path}: got {text!r:.80}, expected seconds", hint="remove the file") from None
