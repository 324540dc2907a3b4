"""Counts this worker's steps, for the launcher and for /metrics: its heartbeat."""

from __future__ import annotations

from moe_optimizer.log import get_logger
from moe_optimizer.proof.step_count import StepCount
from moe_optimizer.vllm_plugin.session import PluginSession

logger = get_logger(__name__)
_count: StepCount | None = None


def count_steps(session: PluginSession) -> None:
    """Count from now on. A failure leaves the count out, not the worker."""
    global _count  # noqa: PLW0603 - one per process
    try:
        _count = StepCount(session.run_dir, session.proof)
    except OSError as error:
        logger.warning("steps are not counted: %s", error)


def count_step() -> None:
    """Note that a step begins. Called in every step."""
    if _count is not None:
        _count.step()
