"""Shows the expert load on the /metrics page of vLLM's API server."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moe_optimizer.costs.expert_imbalance import LoadReport, load_report
from moe_optimizer.errors import InputError
from moe_optimizer.inspection.expert_load import read_run_load
from moe_optimizer.log import get_logger
from moe_optimizer.proof.record import read_proofs
from moe_optimizer.proof.verdict import model_holders
from moe_optimizer.specs.expert_load import ExpertLoad

TOKENS_METRIC = "moe_optimizer_expert_tokens"
_LOAD = "moe_optimizer_expert_load"

logger = get_logger(__name__)
_shown: set[Path] = set()


def show_on_metrics(run_dir: Path) -> None:
    """Add the counts in `run_dir` to this process's metrics. Harmless when repeated."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        # With several API servers vLLM makes the page of files that they share, without collectors.
        logger.warning("expert load is not on /metrics with several API servers; it is in %s", run_dir)
        return
    if run_dir not in _shown:
        _shown.add(run_dir)
        REGISTRY.register(ExpertLoadCollector(run_dir))


class ExpertLoadCollector(Collector):
    """Reads the workers' files when the page is asked for."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def describe(self) -> list[Metric]:
        """Return nothing: there are no counts yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the counts and their figures; nothing before the first served step."""
        try:
            load = read_run_load(self._run_dir)
            holders = model_holders(read_proofs(self._run_dir))
        except InputError:
            return
        # As vLLM's metrics call it, so that they join.
        name = next((proof.served_model_name for proof in holders if proof.served_model_name), load.model)
        load = dataclasses.replace(load, model=name)
        yield _tokens(load)
        yield from _about(load)
        yield from _figures(load.model, load_report(load))


def _tokens(load: ExpertLoad) -> Metric:
    tokens = CounterMetricFamily(
        TOKENS_METRIC,
        "Tokens routed to an expert; a token counts for each of its experts.",
        labels=("model_name", "layer", "expert"),
    )
    for layer in load.layers:
        for expert, count in enumerate(layer.tokens):
            tokens.add_metric((load.model, str(layer.index), str(expert)), count)
    return tokens


def _about(load: ExpertLoad) -> Iterator[Metric]:
    steps = CounterMetricFamily(f"{_LOAD}_steps", "Forward passes that were counted.", labels=("model_name",))
    steps.add_metric((load.model,), load.steps)
    yield steps
    since = GaugeMetricFamily(f"{_LOAD}_since_timestamp_seconds", "When counting began.", labels=("model_name",))
    since.add_metric((load.model,), datetime.fromisoformat(load.since).timestamp())
    yield since


def _figures(model: str, report: LoadReport) -> Iterator[Metric]:
    busiest = GaugeMetricFamily(
        f"{_LOAD}_max_over_mean_ratio",
        "Tokens of the busiest expert of a layer over the mean of all its experts.",
        labels=("model_name", "layer", "name"),
    )
    ranks = GaugeMetricFamily(
        f"{_LOAD}_rank_imbalance_ratio",
        "Tokens of the busiest rank over the mean, with the experts in order on that many ranks.",
        labels=("model_name", "layer", "ranks"),
    )
    for layer in report.layers:
        if layer.figures is None:
            continue
        busiest.add_metric((model, str(layer.index), layer.name), layer.figures.max_over_mean)
        for count, imbalance in layer.figures.rank_imbalance.items():
            ranks.add_metric((model, str(layer.index), str(count)), imbalance)
    yield busiest
    yield ranks
