"""Configures logging: messages for people go to stderr. Data goes to stdout, not through a logger."""

from __future__ import annotations

import logging
import sys

LOGGER_NAME = "moe_optimizer"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one of this package's modules (pass `__name__`)."""
    return logging.getLogger(name)


def configure(*, verbose: bool) -> None:
    """Send this package's messages to stderr: warnings and up, or everything when verbose.

    Only the command line calls this. Inside vLLM's processes vLLM's own handler takes the messages.
    """
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
