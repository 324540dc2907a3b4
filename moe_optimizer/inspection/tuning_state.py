"""Keeps what a tuning has measured beside the configuration: a stopped one goes on from it, and plans name its gain."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_optimizer.errors import InputError
from moe_optimizer.files import write_atomically
from moe_optimizer.inspection.json_file import read_json_object
from moe_optimizer.inspection.tuned_configs import Row, state_path
from moe_optimizer.plan.json_codec import decode, encode

_MAX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The best row of one size against the one that vLLM takes now, timed in turns in one run."""

    tokens: int
    stock: Row
    row: Row
    stock_us: float
    """Median."""
    row_us: float
    """Median."""
    ratio: float
    """Median over the rounds of stock / row: above 1 the row is faster."""
    low: int
    high: int
    """The row is used for the sizes [low, high]; high < low: for none."""

    def __post_init__(self) -> None:
        """Raise an InputError for what no measurement gives."""
        if not (math.isfinite(self.ratio) and self.ratio > 0 and self.tokens >= 1):
            raise InputError(f"got ratio {self.ratio} at {self.tokens} tokens, expected numbers above 0")

    @property
    def won(self) -> bool:
        """Whether the row replaces vLLM's for any size."""
        return self.low <= self.high


@dataclass(slots=True, kw_only=True)
class TuneState:
    """Everything measured for one shape on one GPU with one vLLM and one Triton."""

    identity: dict[str, Any]
    """What the measurements hold for; another identity starts anew."""
    measured: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Tokens -> `key_of` a row -> microseconds, None where it does not work."""
    trying: tuple[str, str] | None = None
    """Tokens and row being measured; a file that still has them is of a process that died on the row."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Tokens -> the last comparison."""

    def store(self, path: Path) -> None:
        """Write it atomically."""
        write_atomically(path, json.dumps(encode(self), indent=1) + "\n")


def load_state(path: Path, identity: dict[str, Any]) -> TuneState:
    """Return the state at `path` if it is of this identity, else an empty one.

    A row on which an earlier process died counts as one that does not work.

    Raises:
        InputError: the file is broken.
    """
    if not path.exists():
        return TuneState(identity=identity)
    data = read_json_object(path, max_bytes=_MAX_BYTES)
    if data.get("identity") != identity:
        return TuneState(identity=identity)
    state = _decoded(data, path)
    if state.trying is not None:
        tokens, key = state.trying
        state.measured.setdefault(tokens, {})[key] = None
        state.trying = None
    return state


def read_tuning(config: Path) -> TuneState | None:
    """Return what the tuning that made a configuration measured; None where no tuning made it.

    Raises:
        InputError: what it left beside the configuration cannot be read.
    """
    path = state_path(config)
    return _decoded(read_json_object(path, max_bytes=_MAX_BYTES), path) if path.exists() else None


def _decoded(data: dict[str, object], path: Path) -> TuneState:
    try:
        return decode(TuneState, data, origin="state")
    except InputError as error:
        raise InputError(
            f"{path.name}: not a tuning of this version: {error}", hint="delete the file to start anew"
        ) from None
