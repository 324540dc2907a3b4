"""Lines about what a command is doing, for the person who waits; never before an error that ends it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from moe_optimizer.errors import printable


class ProgressLines:
    """Lines for stderr: at once on a terminal, elsewhere once nothing can refuse or end the start any more.

    The first stderr line of a command that fails is its error, for whoever reads it from a pipe or a file; lines
    that are still held then are dropped.

    Args:
        verbose: write everything at once, wherever stderr goes.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._held: list[str] | None = None if verbose or sys.stderr.isatty() else []

    def line(self, text: str) -> None:
        """Write one line, or hold it."""
        if self._held is not None:
            self._held.append(text)
            return
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()

    def warn(self, warnings: Iterable[str]) -> None:
        """Write each warning as a line of its own, or hold it."""
        for warning in warnings:
            self.line(f"warning: {' '.join(warning.split())}")

    def release(self) -> None:
        """Write what is held; from here on every line is written at once."""
        lines, self._held = self._held or (), None
        for text in lines:
            self.line(text)
