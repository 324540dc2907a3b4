"""Writes to the terminal: data to stdout, messages to stderr, an error before any other message."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from moe_optimizer import log
from moe_optimizer.errors import ExitCode, MoeOptimizerError, ServerFailedError, printable

PLAIN_WIDTH = 80
"""Columns of output that does not go to a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a command has found; it is written once nothing can refuse the command any more."""

    result: Any
    """What --json prints."""
    render: Callable[[Any], str]
    """Returns the result as text, which is printed without --json."""
    notes: tuple[str, ...] = ()
    """Lines for stderr, after the result."""
    code: int = ExitCode.OK


def make_streams_safe() -> None:
    """Make stdout and stderr escape characters that their encoding lacks, instead of raising an error.

    Otherwise a file name that is not valid UTF-8 would fail inside its own error message. A stream that was closed
    before the start (`>&-`) is replaced by /dev/null.
    """
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open to the end
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def use_color(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with colours, and neither NO_COLOR nor TERM=dumb is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def output_width() -> int:
    """Return the columns of stdout: the terminal's, or COLUMNS, or 80."""
    return shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns


def write_data(text: str) -> None:
    """Write one block of data to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def write_output(output: Output, *, as_json: bool) -> None:
    """Write what a command has found to stdout, and its notes to stderr."""
    write_data(as_json_text(output.result) if as_json else output.render(output.result))
    for line in output.notes:
        sys.stderr.write(f"{line}\n")


def as_json_text(result: Any) -> str:
    """Return what --json prints; a plan has a form of its own, with sorted keys."""
    import json

    from moe_optimizer.plan.json_codec import encode

    return result.to_json() if hasattr(result, "to_json") else json.dumps(encode(result), indent=2)


def two_columns(rows: Iterable[tuple[str, str]], *, width: int = PLAIN_WIDTH) -> str:
    """Return a name and a text in each row, at most `width` wide except for long words such as paths."""
    import textwrap

    rows = list(rows)
    indent = max(len(name) for name, _ in rows) + 2
    room = max(width - indent, 20)
    lines: list[str] = []
    for name, text in rows:
        wrapped = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{name:<{indent}}{wrapped[0]}", *(f"{'':<{indent}}{line}" for line in wrapped[1:])]
    return "\n".join(lines)


def warning_lines(warnings: Iterable[str]) -> tuple[str, ...]:
    """Return each warning as a line of its own."""
    return tuple(f"warning: {_one_line(warning)}" for warning in warnings)


def write_warnings(warnings: Iterable[str]) -> None:
    """Write each warning as a line of its own to stderr."""
    for line in warning_lines(warnings):
        sys.stderr.write(f"{line}\n")


def write_error(error: MoeOptimizerError) -> None:
    """Write the error to stderr: one line, then the hint if there is one.

    The last log lines of a dead server follow the first line unchanged, and then the warnings noted on the error.
    """
    first, _, log = str(error).partition("\n") if isinstance(error, ServerFailedError) else (str(error), "", "")
    log = "\n".join(filter(None, (log, *warning_lines(getattr(error, "__notes__", ())))))
    write_error_lines(first, log, hint=error.hint)


def write_error_lines(message: str, log: str = "", *, hint: str | None) -> None:
    """Write `error: MESSAGE`, the lines of a log, a blank line and `hint: HINT` to stderr."""
    sys.stderr.write(f"error: {_one_line(message)}\n")
    sys.stderr.write(f"{log}\n" if log else "")
    if hint:
        sys.stderr.write(f"\nhint: {_one_line(hint)}\n")


def _one_line(text: str) -> str:
    return " ".join(printable(text).split("\n")).strip()


class _Held(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


@contextmanager
def held_messages(*, verbose: bool, then: Callable[[Iterable[str]], None] = write_warnings) -> Iterator[None]:
    """Hold this package's log messages until the block has succeeded, then pass them to `then`; drop them if it raises.

    The first stderr line of a command that fails is its error: an earlier warning would push it down. With `verbose`
    every message is written at once.
    """
    if verbose:
        log.configure(verbose=True)
        yield
        return
    logger = logging.getLogger(log.LOGGER_NAME)
    held = _Held()
    logger.handlers = [held]
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        log.configure(verbose=False)
    then(held.records)
