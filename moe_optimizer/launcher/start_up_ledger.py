"""Keeps how many seconds each phase of a start took: those of the launcher, and those that vLLM's log tells."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

_MAX_BYTES = 8 << 20
_PHASES: Mapping[str, re.Pattern[str]] = {
    "vLLM: weights": re.compile(r"Model loading took \S+ GiB memory and ([\d.]+) seconds"),
    "vLLM: torch.compile": re.compile(r"torch\.compile took ([\d.]+) s in total"),
    "vLLM: kernels": re.compile(r"JIT kernel warmup finished in ([\d.]+)s"),
    "vLLM: graphs": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    "vLLM: engine": re.compile(r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s"),
    "vLLM: self-check": re.compile(r"the self-checks of the layers took ([\d.]+) s"),
    "vLLM: canary": re.compile(r"the canary of [1-9]\d* layers took ([\d.]+) s, before ready"),
}
"""Phase -> the line of vLLM's log that tells it. "engine" holds all others but "weights"."""

_OURS = ("vLLM: self-check", "vLLM: canary", "warm-up", "proofs", "decode check")
"""Phases that a start of vLLM alone does not have."""


class StartUpLedger:
    """The phases of one start, each from the end of the one before."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seconds: dict[str, float] = {}

    def ended(self, phase: str, parts: Mapping[str, float] | None = None) -> None:
        """Note that a phase ends now.

        Args:
            phase: its name.
            parts: seconds of what it consists of.
        """
        now = time.monotonic()
        self._seconds[phase] = round(now - self._last, 2)
        self._last = now
        self._seconds |= {f"{phase}: {part}": round(seconds, 2) for part, seconds in (parts or {}).items()}

    def phases(self, log_path: Path) -> dict[str, float]:
        """Return the seconds of every phase, those inside vLLM too: they are parts of "vLLM answers"."""
        return self._seconds | vllm_phases(log_path)


def vllm_phases(log_path: Path) -> dict[str, float]:
    """Return what vLLM's log says of its own phases; of several workers the slowest. {}: nothing."""
    try:
        with log_path.open("rb") as log:
            text = log.read(_MAX_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return {}
    found = {phase: pattern.findall(text) for phase, pattern in _PHASES.items()}
    return {phase: max(map(float, seconds)) for phase, seconds in found.items() if seconds}


def render_phases(phases: Mapping[str, float], stock: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Return a line for each phase, and one for those that vLLM alone does not have; beside them those of a start of
    stock vLLM, where there is one.
    """
    ours = {"ours of these": sum(phases.get(phase, 0.0) for phase in _OURS)} if phases else {}
    rows = {phase: f"{seconds:7.1f} s" for phase, seconds in {**phases, **ours}.items()}
    if phases and stock:
        rows |= {phase: f"{rows.get(phase, ''):9}  {seconds:7.1f} s" for phase, seconds in stock.items()}
    width = max(map(len, rows), default=0)
    return tuple(f"{phase:<{width}}  {text}" for phase, text in rows.items())
