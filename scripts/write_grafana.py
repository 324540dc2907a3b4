"""Writes docs/grafana/moe-optimizer.json, the Grafana dashboard of vLLM's metrics and ours.

A dashboard's file is long and says one thing thirty times; the panels below are what it is made of. Run it after a
change:  python scripts/write_grafana.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "moe-optimizer.json"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24


class Panel(NamedTuple):
    """One panel: a graph over time, or a table of what is now."""

    title: str
    queries: Mapping[str, str]
    """Legend -> PromQL; `MODEL` stands for the chosen models, `RATE` for the window of a rate."""
    unit: str = "short"
    table: bool = False
    description: str = ""


def _quantiles(metric: str) -> dict[str, str]:
    return {
        f"p{round(100 * share)}": f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{{MODEL}}[RATE])))"
        for share in (0.5, 0.99)
    }


PANELS = (
    Panel("Output tokens", {"{{model_name}}": "sum by (model_name) (rate(vllm:generation_tokens_total{MODEL}[RATE]))"}),
    Panel("Prompt tokens", {"{{model_name}}": "sum by (model_name) (rate(vllm:prompt_tokens_total{MODEL}[RATE]))"}),
    Panel(
        "Requests",
        {
            "running": "sum(vllm:num_requests_running{MODEL})",
            "waiting": "sum(vllm:num_requests_waiting{MODEL})",
            "ended per second": "sum(rate(vllm:request_success_total{MODEL}[RATE]))",
        },
    ),
    Panel("Time to first token", _quantiles("vllm:time_to_first_token_seconds"), unit="s"),
    Panel("Time per output token", _quantiles("vllm:request_time_per_output_token_seconds"), unit="s"),
    Panel("Time of a request", _quantiles("vllm:e2e_request_latency_seconds"), unit="s"),
    Panel(
        "KV cache",
        {
            "used": "avg(vllm:kv_cache_usage_perc{MODEL})",
            "prefix hits": "sum(rate(vllm:prefix_cache_hits_total{MODEL}[RATE])) / "
            "sum(rate(vllm:prefix_cache_queries_total{MODEL}[RATE]))",
        },
        unit="percentunit",
    ),
    Panel("Preemptions", {"preempted": "sum(rate(vllm:num_preemptions_total{MODEL}[RATE]))"}),
    Panel(
        "Compiled after ready",
        {"rank {{rank}}": 'sum by (rank) (moe_optimizer_compilations_total{when="after_ready", MODEL})'},
        description="A request waited for each of them. More than 0: the warm-up missed a shape.",
    ),
    Panel(
        "Busiest expert of a layer",
        {"layer {{layer}}": "topk(5, max by (layer) (moe_optimizer_expert_load_max_over_mean_ratio{MODEL}))"},
        description="Tokens of the busiest expert over the mean of all; the five layers where it is the most.",
    ),
    Panel(
        "Busiest rank, if experts were split over ranks",
        {"{{ranks}} ranks": "max by (ranks) (moe_optimizer_expert_load_rank_imbalance_ratio{MODEL})"},
    ),
    Panel(
        "Kernel calls",
        {"{{kernel}}": "sum by (kernel) (rate(moe_optimizer_kernel_calls_total{MODEL}[RATE]))"},
        description="Of all layers and workers. Replays of a CUDA graph are not seen: on GPUs these are the captures.",
    ),
    Panel(
        "Fallbacks",
        {"{{pass}}: {{reason}}": "sum by (pass, reason) (moe_optimizer_fallbacks{MODEL})"},
        description="Layers that stay as vLLM has them, or workers in which a pass is not applied.",
    ),
    Panel(
        "FP8 numbers at the largest there is",
        {
            "weights, {{model_name}}": "moe_optimizer_fp8_saturated_weights_ratio{MODEL}",
            "cache, {{model_name}}": (
                "sum by (model_name) (rate(moe_optimizer_fp8_cache_saturated_values_total{MODEL}[RATE])) / "
                "sum by (model_name) (rate(moe_optimizer_fp8_cache_sampled_values_total{MODEL}[RATE]))"
            ),
        },
        unit="percentunit",
        description="A scale per block brings its largest weight there, and no other: more is clipping. "
        "What is there of an FP8 cache was clipped, or nearly.",
    ),
    Panel("Kernels by tokens of a step", {"": "moe_optimizer_kernel_range{MODEL}"}, table=True),
    Panel("Passes", {"": "max by (pass, state) (moe_optimizer_pass_state{MODEL}) == 1"}, table=True),
    Panel("Versions", {"": "moe_optimizer_build_info{MODEL}"}, table=True),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "title": "moe-optimizer",
        "uid": "moe-optimizer",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(vllm:num_requests_running, model_name)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    across = _COLUMNS // _WIDTH
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.description,
        "type": "table" if panel.table else "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": number % across * _WIDTH, "y": number // across * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "legendFormat": legend,
                "expr": query.replace("MODEL", 'model_name=~"$model"').replace("RATE", "$__rate_interval"),
                **({"format": "table", "instant": True} if panel.table else {}),
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
