"""Puts what the workers of a run write on the /metrics page of vLLM's API server.

Series have vLLM's own `model_name`, so that they join with its metrics.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector

from moe_optimizer.errors import InputError
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import Proof, read_proofs
from moe_optimizer.proof.verdict import model_holders
from moe_optimizer.vllm_plugin.patch import Patch, PatchReport, PatchState, apply_when_imported

logger = get_logger(__name__)
MetricSource = Callable[[Path, Sequence[Proof]], Iterable[Metric]]
"""Makes metrics of a run folder and of the proofs of the workers in it."""

_FRESH_S = 3.0
"""Chosen: the launcher reads the page every second, the workers write their counts every three."""
_pages: dict[Path, RunCollector] = {}


class RunCollector(Collector):
    """Reads the workers' files when the page is asked for.

    Args:
        run_dir: where they are.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.parts: list[MetricSource] = []
        self._made: list[Metric] = []
        self._made_at = float("-inf")

    def describe(self) -> list[Metric]:
        """Return nothing: there are no counts yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of every part, as they were at most a few seconds ago."""
        now = time.monotonic()
        if now - self._made_at > _FRESH_S:
            try:
                proofs = model_holders(read_proofs(self._run_dir))
            except InputError:
                proofs = ()
            self._made = [metric for part in self.parts for metric in part(self._run_dir, proofs)]
            self._made_at = now
        yield from self._made


def show_on_metrics(run_dir: Path, *parts: MetricSource) -> None:
    """Add parts to the page of this process, if it is an API server's. Harmless when repeated."""
    page = _pages.get(run_dir)
    if page is None:
        page = _pages[run_dir] = RunCollector(run_dir)
        REGISTRY.register(page)
        apply_when_imported(SHARED_PAGE, on_change=_say_if_refused)
    page.parts.extend(part for part in parts if part not in page.parts)


def _say_if_refused(report: PatchReport) -> None:
    if report.state is PatchState.REFUSED:
        logger.warning("/metrics of several API servers lacks ours: %s", report.detail)


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collect(self: Any) -> Iterator[Metric]:
        yield from original(self)
        for page in _pages.values():
            yield from page.collect()

    return collect


SHARED_PAGE = Patch(
    target="prometheus_client.multiprocess:MultiProcessCollector.collect",
    why="with several API servers the page is made of files that they share, in a new registry each time, without the "
    "collectors of the process",
    remove_when="prometheus_client takes collectors for the page of several processes",
    fingerprints={"prometheus_client 0.26": "755d31a616399513"},
    replacement=_replacement,
)
