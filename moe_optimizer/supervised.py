"""Runs a module as a program that ends with its launcher: `python -m moe_optimizer.supervised MODULE ARGUMENTS`."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys

from moe_optimizer.killed_children import report_killed_children
from moe_optimizer.lifeline import watch_launcher

MIDDLEWARE = "moe_optimizer.vllm_plugin.draining.RefuseWhileDraining"
"""Of an API server, which makes it when it begins to serve: it collects garbage from then on."""


def main() -> None:
    """Start the watch, then become the program: its name, its arguments and its place as __main__."""
    watch_launcher()
    report_killed_children()
    os.register_at_fork(after_in_child=_keep_signals_to_itself)
    del sys.argv[0]
    if MIDDLEWARE in sys.argv:
        # Looking for garbage among what lives to the end is a quarter of the time that vLLM's imports take.
        gc.disable()
        os.register_at_fork(after_in_child=_leave_what_was_imported)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _keep_signals_to_itself() -> None:
    """Write the signals of a forked engine no longer where the event loop of the API server reads its own.

    Python does it too, from 3.12 on.
    """
    signal.set_wakeup_fd(-1)


def _leave_what_was_imported() -> None:
    """Collect garbage in a fork, but not among the million objects that the API server had imported.

    vLLM lets them go again (`gc.unfreeze`) once it has captured graphs, and has to: what holds memory of the GPU may be
    among what it freezes meanwhile.
    """
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main()
