"""Puts what the workers of a run write on the /metrics page of vLLM's API server.

Series have vLLM's own `model_name`, so that they join with its metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector

from moe_optimizer.errors import InputError
from moe_optimizer.proof.record import Proof, read_proofs
from moe_optimizer.proof.verdict import model_holders
from moe_optimizer.vllm_plugin.patch import Patch, apply_when_imported

Part = Callable[[Path, Sequence[Proof]], Iterable[Metric]]
"""Makes metrics of a run folder and of the proofs of the workers in it."""

_pages: dict[Path, RunCollector] = {}


class RunCollector(Collector):
    """Reads the workers' files when the page is asked for.

    Args:
        run_dir: where they are.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.parts: list[Part] = []

    def describe(self) -> list[Metric]:
        """Return nothing: there are no counts yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of every part."""
        try:
            proofs = model_holders(read_proofs(self._run_dir))
        except InputError:
            proofs = ()
        for part in self.parts:
            yield from part(self._run_dir, proofs)


def show_on_metrics(run_dir: Path, *parts: Part) -> None:
    """Add parts to the page of this process, if it is an API server's. Harmless when repeated."""
    page = _pages.get(run_dir)
    if page is None:
        page = _pages[run_dir] = RunCollector(run_dir)
        REGISTRY.register(page)
        apply_when_imported(SHARED_PAGE)
    page.parts.extend(part for part in parts if part not in page.parts)


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_prometheus_registry() -> CollectorRegistry:
        registry = original()
        if registry is not REGISTRY:
            for page in _pages.values():
                registry.register(page)
        return registry

    return get_prometheus_registry


SHARED_PAGE = Patch(
    target="vllm.v1.metrics.prometheus:get_prometheus_registry",
    why="with several API servers vLLM makes the page of files that they share, in a registry without the collectors "
    "of the process",
    remove_when="vLLM's registry for several API servers takes collectors",
    fingerprints={"0.32": "72beba87ab557830"},
    replacement=_replacement,
)
