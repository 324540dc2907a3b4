"""Says while a server starts which phase its log has reached, and how long the last start like it took."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from moe_optimizer.files import read_text, write_atomically
from moe_optimizer.launcher.server_log import READING
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
    """

    def __init__(self, plan: Plan, log_path: Path, say: Callable[[str], None]) -> None:
        # What makes two starts alike as far as time goes: a changed flag seldom doubles it.
        key = "\n".join([plan.model.path, str(plan.vllm_version), str(plan.num_gpus)])
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._last_start = cache_dir(os.environ) / "start_up" / f"{name}.seconds"
        self._log_path, self._say = log_path, say
        self._phase, self._left = _FIRST, list(_NEXT)
        self._read_bytes, self._rest = 0, b""
        self._began = self._phase_began = time.monotonic()
        self._expected = self._read_expected()
        self.past_arguments = False
        """Weights are being read: what vLLM says of its arguments it has said."""

    def look(self) -> None:
        """Read what the log has more, and say which phases have ended."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._read_bytes)
                new = log.read()
        except OSError:
            return
        self._read_bytes += len(new)
        text = self._rest + new
        self.past_arguments = self.past_arguments or any(words.encode() in text for words in READING)
        self._rest = text[-100:]  # a line may be half written
        while self._left and any(sign in text for sign, _ in self._left):
            sign, phase = self._left.pop(0)
            if sign in text:
                self._reached(phase)

    def _reached(self, phase: str) -> None:
        now = time.monotonic()
        self._say(f"{self._phase} {now - self._phase_began:.0f} s; {phase}{self._expected}")
        self._phase, self._phase_began, self._expected = phase, now, ""

    def _read_expected(self) -> str:
        try:
            seconds = float(read_text(self._last_start, max_bytes=_MAX_SECONDS_BYTES))
            return f" (the last start took {seconds:.0f} s in all)"
        except ValueError:  # also InputError: it cannot be read
            return ""

    def ended(self) -> None:
        """Keep how long this start took, for the next one."""
        with contextlib.suppress(OSError):
            write_atomically(self._last_start, f"{time.monotonic() - self._began:.1f}")
