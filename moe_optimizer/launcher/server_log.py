"""Follows a server's log file, and finds the reason of a failure in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from moe_optimizer.errors import printable
from moe_optimizer.killed_children import KILLED

_FOLLOW_INTERVAL_S = 0.2
_MAX_BYTES = 2**20
_MAX_CAUSE = 500
MAX_LOG_BYTES = 64 * 2**20
"""Chosen: days of vLLM's lines once in 10 s; a line for each request fills it in hours."""
_DEAD_WORKER = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: -(\d+)\)")
# "ValueError: ...", also behind vLLM's prefixes ("(Worker pid=1) ERROR 01-01 00:00:00 [file.py:1] ").
_ERROR = re.compile(r"(?:^|\] |\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S.*)$")
# vLLM's outer processes raise these when an inner one failed; the cause is elsewhere in the log.
_CONSEQUENCES = ("initialization failed", "root cause", "died unexpectedly")
# The last line that argparse writes: "api_server.py: error: argument --dtype: invalid choice: 'cheese' (...)".
_USAGE_ERROR = re.compile(r"^\S+: error: (\S.*)$")
_REFUSED = re.compile(r"(?:[a-z_]\w*\.)*(?:ValueError|ValidationError): ")
# pydantic explains on the line after the error's name, and appends values that do not help a user.
_DETAIL = re.compile(r"^\s+(?:Value error, )?(.*?)(?: \[type=.*)?$")
READING = ("checkpoint shards", "Loading weights took", "Model loading took")
"""Parts of lines that vLLM writes from when it reads weights; a later failure is not a refused argument."""


def root_cause(log_path: Path) -> str:
    """Return the last exception in the log that does not follow from an earlier one; "" when there is none."""
    lines = _lines(log_path)
    causes = []
    for index, line in enumerate(lines):
        match = _ERROR.search(line)
        if match and not any(words in match[1] for words in _CONSEQUENCES):
            causes.append(_with_detail(match[1], lines[index + 1 : index + 2]))
    return printable(causes[-1] if causes else "")[:_MAX_CAUSE]


def refusal(log_path: Path, status: int) -> str:
    """Return why vLLM refused its arguments, "" when it ended for another reason.

    It refuses by a usage error (exit status 2), or by an error of its configuration before it reads weights.
    """
    lines = _lines(log_path)
    if status == 2:
        found = [match[1] for line in lines if (match := _USAGE_ERROR.match(line))]
        return printable(found[-1])[:_MAX_CAUSE] if found else ""
    cause = root_cause(log_path)
    refused = _REFUSED.match(cause)
    if refused is None or any(words in line for line in lines for words in READING):
        return ""
    return cause[refused.end() :]


def killed_processes(log_path: Path) -> list[tuple[str, str]]:
    """Return which processes of the server the end of its log says were killed: process id or name, and signal."""
    try:
        with log_path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _MAX_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    workers = [(name, signal.Signals(int(number)).name) for name, number in _DEAD_WORKER.findall(text)]
    return workers + KILLED.findall(text)


def bound(log_path: Path) -> None:
    """Move a log that has grown large aside, in place of what was moved there before; it begins anew."""
    with contextlib.suppress(OSError):
        if log_path.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(log_path, log_path.with_name(f"{log_path.name}.old"))
            # The server appends to the open file, so it goes on at the new end.
            os.truncate(log_path, 0)


def _lines(log_path: Path) -> list[str]:
    try:
        with log_path.open("rb") as stream:
            return stream.read(_MAX_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _with_detail(error: str, following: list[str]) -> str:
    if "ValidationError: " not in error or not following:
        return error
    detail = _DETAIL.match(following[0])
    return f"{error.partition(': ')[0]}: {detail[1]}" if detail and detail[1] else error


@contextlib.contextmanager
def followed(path: Path, stream: TextIO) -> Iterator[None]:
    """Copy a growing file to a stream while the block lasts."""
    stop = threading.Event()

    def follow() -> None:
        with path.open(encoding="utf-8", errors="replace") as file:
            while True:
                stopping = stop.is_set()
                if file.tell() > path.stat().st_size:
                    file.seek(0)  # it was moved aside
                text = file.read()
                if text:
                    stream.write(text)
                    stream.flush()
                elif stopping:
                    return
                else:
                    stop.wait(_FOLLOW_INTERVAL_S)

    thread = threading.Thread(target=follow, name="log-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
