"""Runs a module as a program that ends with its launcher: `python -m moe_optimizer.supervised MODULE ARGUMENTS`."""

from __future__ import annotations

import os
import runpy
import signal
import sys

from moe_optimizer.killed_children import report_killed_children
from moe_optimizer.lifeline import watch_launcher


def main() -> None:
    """Start the watch, then become the program: its name, its arguments and its place as __main__."""
    watch_launcher()
    report_killed_children()
    os.register_at_fork(after_in_child=_keep_signals_to_itself)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _keep_signals_to_itself() -> None:
    """Write the signals of a forked engine no longer where the event loop of the API server reads its own.

    Python does it too, from 3.12 on.
    """
    signal.set_wakeup_fd(-1)


if __name__ == "__main__":
    main()
