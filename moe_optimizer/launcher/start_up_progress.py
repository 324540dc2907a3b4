"""Says while a server starts which phase its log has reached, and how long the last start like it took."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.plan.plan import Plan
from moe_optimizer.resources import cache_dir

_MAX_SECONDS_BYTES = 64
_FIRST = "importing vLLM"
_NEXT = (
    (b"Initializing a V1 LLM engine", "starting engine and workers"),
    (b"Starting to load model", "loading weights"),
    (b"Loading weights took", "compiling and sizing the cache"),
    (b"init engine (profile", "opening the port"),
)
"""What vLLM's log says at the end of a phase, and the phase that begins with it."""


class StartUpProgress:
    """The phases of one start.

    Args:
        plan: what is started.
        log_path: of the first server; the others start as it does.
        say: takes a line for each phase.
        live: takes the state of the start again and again, instead of those lines; None: there is no terminal.
    """

    def __init__(
        self, plan: Plan, log_path: Path, say: Callable[[str], None], live: Callable[[str], None] | None = None
    ) -> None:
        # What makes two starts alike as far as time goes: a changed flag seldom doubles it.
        key = "\n".join([plan.model.path, str(plan.vllm_version), str(plan.num_gpus)])
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._last_start = cache_dir(os.environ) / "start_up" / f"{name}.seconds"
        self._log_path, self._say, self._live = log_path, say, live
        self._phase, self._left = _FIRST, list(_NEXT)
        self._done: list[str] = []
        self.phases_s: dict[str, float] = {}
        """Seconds of each phase that has ended, by what the log says of it."""
        self._read_bytes, self._rest = 0, b""
        self._began = self._phase_began = time.monotonic()
        self._expected = self._read_expected()
        if live is None:
            say(f"{_FIRST}{f'; about {self._expected} in all, as the last start' if self._expected else ''}")

    def look(self) -> None:
        """Read what the log has more, and show which phases have ended."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._read_bytes)
                new = log.read()
        except OSError:
            return
        self._read_bytes += len(new)
        text = self._rest + new
        self._rest = text[-100:]  # a line may be half written
        while self._left and any(sign in text for sign, _ in self._left):
            sign, phase = self._left.pop(0)
            if sign in text:
                self._reached(phase)
        if self._live is not None:
            now = time.monotonic()
            total = f"{now - self._began:.0f} s{f' of about {self._expected}' if self._expected else ''}"
            phases = ", ".join([f"{self._phase} {now - self._phase_began:.0f} s", *reversed(self._done)])
            self._live(f"{total}: {phases}")

    def _reached(self, phase: str) -> None:
        self._ended()
        now = time.monotonic()
        self._done.append(f"{self._phase} {now - self._phase_began:.0f} s")
        if self._live is None:
            self._say(f"{self._done[-1]}; {phase}")
        self._phase, self._phase_began = phase, now

    def _ended(self) -> None:
        self.phases_s[self._phase] = time.monotonic() - self._phase_began

    def _read_expected(self) -> str:
        try:
            return f"{float(read_text(self._last_start, max_bytes=_MAX_SECONDS_BYTES)):.0f} s"
        except ValueError:  # also InputError: it cannot be read
            return ""

    def ended(self) -> None:
        """Keep how long this start took, for the next one; on a terminal say what its phases took."""
        self._ended()
        if self._live is not None:
            self._reached("")
            self._say(", ".join(self._done))
        with contextlib.suppress(OSError):
            write_atomically(self._last_start, f"{time.monotonic() - self._began:.1f}")
