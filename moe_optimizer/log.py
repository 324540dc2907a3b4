"""Configures logging: messages for people go to stderr. Data goes to stdout, not through a logger."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

LOGGER_NAME = "moe_optimizer"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one of this package's modules (pass `__name__`)."""
    return logging.getLogger(name)


@contextlib.contextmanager
def timed(logger: logging.Logger, what: str) -> Iterator[None]:
    """Say at the end of the block, to whoever wants every message, what was done and how long it took."""
    begin = time.perf_counter()
    yield
    logger.debug("%s: %.0f ms", what, 1e3 * (time.perf_counter() - begin))


def configure(*, verbose: bool) -> None:
    """Send this package's messages to stderr: warnings and up, or everything when verbose.

    Only the command line calls this; inside vLLM's processes see `configure_inside_vllm`.
    """
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False


def configure_inside_vllm() -> None:
    """Have this package's messages written to stderr with its name before each. Harmless when repeated.

    vLLM configures its own logger only: without a handler of ours, warnings stand in its log as if they were vLLM's,
    and the rest is lost.
    """
    logger = logging.getLogger(LOGGER_NAME)
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("moe-optimizer %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # Some library in vLLM's workers gives the root logger a handler, which would write each message again.
        logger.propagate = False


class _ToStderr(logging.StreamHandler):
    """Writes to what sys.stderr is by then: vLLM puts one in its place that names the process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        self.stream = sys.stderr
        super().emit(record)
