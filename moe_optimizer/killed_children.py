"""Says in the log which child of a server's first process was killed: vLLM itself ends with status 0 then."""

from __future__ import annotations

import os
import re
import signal
import sys
from multiprocessing import popen_fork

_FATAL = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
_LINE = "moe-optimizer: process {pid} was killed by {name}"
KILLED = re.compile(r"^moe-optimizer: process (\d+) was killed by (SIG[A-Z]+)$", re.MULTILINE)
"""The line in the log: process id and signal."""


def report_killed_children() -> None:
    """Have multiprocessing report to stderr each child of this process that it finds killed."""
    poll = popen_fork.Popen.poll

    def reporting(self: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
        known = self.returncode
        status = poll(self, flag)
        if known is None and status is not None and status < 0:
            name = signal.Signals(-status).name
            if name in _FATAL:
                sys.stderr.write(_LINE.format(pid=self.pid, name=name) + "\n")
                sys.stderr.flush()
        return status

    popen_fork.Popen.poll = reporting
