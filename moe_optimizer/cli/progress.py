"""Shows what a command is doing to the person who waits: lines, and a bar for what takes long."""

from __future__ import annotations

import contextlib
import errno
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moe_optimizer.cli import messages
from moe_optimizer.cli.termination import clean_termination
from moe_optimizer.errors import printable

_OVER = "\r\x1b[K"
"""Goes to the begin of the terminal's line and empties it."""
_SAYS_NOTHING_S = 60.0
"""Chosen: what takes a minute needs no estimate, and its first steps give none."""
_LEAST_DONE = 0.02
"""Chosen: from less nothing is told."""
OnStep = Callable[[float, str], None]


class ProgressLines:
    """Lines for stderr: at once on a terminal, elsewhere once nothing of ours can refuse the start any more.

    The first stderr line of a command that is refused is its error, for whoever reads it from a pipe or a file; lines
    that are still held then are dropped.

    Args:
        verbose: write everything at once, wherever stderr goes.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._held: list[str] | None = None if verbose or sys.stderr.isatty() else []
        self._over = False

    def line(self, text: str) -> None:
        """Write one line, or hold it."""
        if self._held is not None:
            self._held.append(text)
            return
        self._write(f"{printable(text)}\n")

    def live(self, text: str) -> None:
        """Write a line on a terminal that the next line is written over."""
        columns = shutil.get_terminal_size().columns
        self._write(printable(text)[: columns - 1])
        self._over = True

    def _write(self, text: str) -> None:
        over, self._over = _OVER if self._over else "", False
        try:
            sys.stderr.write(f"{over}{text}")
            sys.stderr.flush()
        except OSError as error:
            # The terminal was closed: SIGHUP comes as well, and nobody reads what is said until then.
            if error.errno != errno.EIO:
                raise

    def warn(self, warnings: Iterable[str]) -> None:
        """Write each warning as a line of its own, or hold it."""
        for line in messages.warning_lines(warnings):
            self.line(line)

    def release(self) -> None:
        """Write what is held; from here on every line is written at once."""
        lines, self._held = self._held or (), None
        for text in lines:
            self.line(text)


@contextlib.contextmanager
def progress_bar(
    title: str,
    *,
    lines: ProgressLines | None = None,
    folder: Path | None = None,
    share: Callable[[], float] | None = None,
) -> Iterator[OnStep]:
    """Show on stderr how far the block is: a bar where it is a terminal that takes colours, else a line for each step.

    SIGTERM and SIGHUP end the block as Ctrl-C does; the last line says that it was interrupted.

    Args:
        title: stands before the bar.
        lines: takes the lines; they are released once something was done, since what ends the command then is no
            refusal. None: without a terminal nothing is shown.
        folder: from which an interrupted run goes on; None: it does not.
        share: returns what is done now, for a bar that moves between two steps; None: it waits for the next.

    Yields:
        What takes the share that is done, and what was done last.
    """

    def line(share: float, text: str) -> None:
        if lines is not None:
            lines.line(f"{share:4.0%}  {text}")
            if share > 0:
                lines.release()

    with clean_termination(), _interrupts_said(lines, folder):
        if not messages.use_color(sys.stderr):
            yield _with_time_left(line)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
        from rich.progress_bar import ProgressBar

        class Bar(BarColumn):
            def render(self, task: Task) -> ProgressBar:
                if share is not None:
                    task.completed = share()
                return super().render(task)

        columns = (TextColumn(title), Bar(20), TimeElapsedColumn(), TextColumn("{task.description}"))
        try:
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task("starting", total=1.0)
                yield _with_time_left(
                    lambda share, text: bar.update(task, completed=share, description=printable(text))
                )
        except OSError as error:
            # The terminal was closed: what SIGHUP raised counts, not that the bar could not be taken away.
            if error.errno == errno.EIO and isinstance(error.__context__, SystemExit):
                raise error.__context__ from None
            raise


def _with_time_left(on_step: OnStep) -> OnStep:
    """Add to what is said how long the rest takes, from the second minute on, at the pace since the first call.

    More that turns out to be left makes the rest longer; the share that is shown waits, and does not go back.
    """
    first: tuple[float, float] | None = None
    shown = 0.0

    def show(share: float, text: str) -> None:
        nonlocal first, shown
        now = time.monotonic()
        first = first or (now, share)
        passed, done = now - first[0], share - first[1]
        if passed > _SAYS_NOTHING_S and done > _LEAST_DONE and share < 1:
            text += f", about {max(1, round(passed * (1 - share) / done / 60))} min left"
        shown = max(shown, share)
        on_step(shown, text)

    return show


@contextlib.contextmanager
def _interrupts_said(lines: ProgressLines | None, folder: Path | None) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        # Ctrl-C also ends the reader of a pipe.
        with contextlib.suppress(OSError):
            if lines is not None:
                lines.release()
                goes_on = "" if folder is None else f"; --resume --run-dir {shlex.quote(str(folder))} goes on"
                lines.line(f"interrupted{goes_on}")
        raise
