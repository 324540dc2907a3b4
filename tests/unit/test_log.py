"""Our messages inside vLLM's processes are told from vLLM's."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from moe_optimizer.log import LOGGER_NAME, configure_inside_vllm, get_logger


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    logger = logging.getLogger(LOGGER_NAME)
    kept = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [], True
    yield
    logger.handlers, logger.level, logger.propagate = kept


def test_each_message_begins_with_our_name_and_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_inside_vllm()
    configure_inside_vllm()
    # As vLLM does later, to name the process in each line.
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    # As a library in a worker does, which calls `logging.info` or `basicConfig`.
    root = logging.StreamHandler(stderr)
    logging.getLogger().addHandler(root)
    get_logger("moe_optimizer.vllm_plugin.session").warning("not %s", "applied")
    get_logger("moe_optimizer.vllm_plugin.session").info("done")
    logging.getLogger().removeHandler(root)
    assert stderr.getvalue().splitlines() == ["moe-optimizer WARNING: not applied", "moe-optimizer INFO: done"]
