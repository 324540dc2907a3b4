"""Metrics of the expert load: figures for each layer, and the count of each expert where it is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from moe_optimizer.costs.expert_imbalance import LoadReport, load_report
from moe_optimizer.env import read_environment
from moe_optimizer.errors import InputError
from moe_optimizer.inspection.expert_load import read_run_load
from moe_optimizer.proof.record import Proof
from moe_optimizer.specs.expert_load import ExpertLoad

TOKENS_METRIC = "moe_optimizer_expert_tokens"
_LOAD = "moe_optimizer_expert_load"


def expert_load_metrics(run_dir: Path, proofs: Sequence[Proof]) -> Iterator[Metric]:
    """Yield the figures, and each expert's count if the environment asks for it; nothing before the first served step.

    61 layers of 256 experts are 15,616 series, which cost the API server 200 ms each time the page is read.
    """
    try:
        load = read_run_load(run_dir)
    except InputError:
        return
    # As vLLM's metrics call it, so that they join.
    name = next((proof.served_model_name for proof in proofs if proof.served_model_name), load.model)
    load = dataclasses.replace(load, model=name)
    if read_environment().expert_series:
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
