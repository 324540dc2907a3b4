"""Shows on the /metrics page of vLLM's API server what the workers have compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from moe_optimizer.errors import InputError
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import model_holders

METRIC = "moe_optimizer_compilations"
_shown: set[Path] = set()


def show_compilations(run_dir: Path) -> None:
    """Add the counts in `run_dir` to this process's metrics. Harmless when repeated."""
    # With several API servers vLLM makes the page of files that they share, without collectors.
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ and run_dir not in _shown:
        _shown.add(run_dir)
        REGISTRY.register(CompilationCollector(run_dir))


class CompilationCollector(Collector):
    """Reads the workers' proofs when the page is asked for."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def describe(self) -> list[Metric]:
        """Return nothing: there are no counts yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the counts of every worker; nothing before one has written its proof."""
        try:
            proofs = model_holders(read_proofs(self._run_dir))
        except InputError:
            return
        counts = CounterMetricFamily(
            METRIC, "Kernels and graphs that a worker compiled; after ready a request waited.", labels=("rank", "when")
        )
        for proof in proofs:
            if proof.compilations is not None:
                counts.add_metric((str(proof.model_rank), "before_ready"), proof.compilations.before_ready)
                counts.add_metric((str(proof.model_rank), "after_ready"), proof.compilations.after_ready)
        yield counts
