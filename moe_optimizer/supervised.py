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
    os.register_at_fork(after_in_child=_become_a_fork)
    del sys.argv[0]
    if MIDDLEWARE in sys.argv:
        # Looking for garbage among what lives to the end is a quarter of the time that vLLM's imports take.
        gc.disable()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _become_a_fork() -> None:
    """Collect garbage, but not among what the API server had imported; and write signals no longer where its event loop
    reads its own, as Python does by itself from 3.12 on.
    """
    gc.freeze()
    gc.enable()
    signal.set_wakeup_fd(-1)


if __name__ == "__main__":
    main()
