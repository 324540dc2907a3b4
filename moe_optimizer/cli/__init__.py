"""Implements the commands `moe-optimizer` and `run_optimizer.py`: one file per command."""

from __future__ import annotations

INTERRUPTED = 128 + 2
"""Exit code after Ctrl-C (SIGINT), as shells report it."""
