"""Runs a module as a program that ends with its launcher: `python -m moe_optimizer.supervised MODULE ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys

from moe_optimizer.killed_children import report_killed_children
from moe_optimizer.lifeline import watch_launcher


def main() -> None:
    """Start the watch, then become the program: its name, its arguments and its place as __main__."""
    watch_launcher()
    report_killed_children()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
