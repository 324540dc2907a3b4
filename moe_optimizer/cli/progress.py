"""Shows what a command is doing to the person who waits: lines, and a bar for what takes long."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from moe_optimizer.cli import messages
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
        for line in messages.warning_lines(warnings):
            self.line(line)

    def release(self) -> None:
        """Write what is held; from here on every line is written at once."""
        lines, self._held = self._held or (), None
        for text in lines:
            self.line(text)


class ProgressBar:
    """A bar on stderr where it is a terminal that takes colours; elsewhere one line for each thing done.

    Args:
        title: stands before the bar.
        lines: takes the lines; they are released once something was done, since what ends the command then is no
            refusal. None: without a terminal nothing is shown.
    """

    def __init__(self, title: str, *, lines: ProgressLines | None = None) -> None:
        self._title = title
        self._lines = lines
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        if messages.use_color(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn(self._title), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, share: float, text: str) -> None:
        """Show which share is done, and what was done last."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share, description=printable(text))
        elif self._lines is not None:
            self._lines.line(f"{share:4.0%}  {text}")
            if share > 0:
                self._lines.release()
