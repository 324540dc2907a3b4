"""Reads one /metrics page of a vLLM server: everything it has counted until that moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_optimizer.launcher.metrics_page import samples

RUNNING = "vllm:num_requests_running"
"""A metric that every vLLM server has, once for each of its engines."""
_OURS = "moe_optimizer_"
_PREFIXES = ("vllm:", _OURS)
_AFTER_READY = "after_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a server had counted at one moment."""

    seconds: float
    """On the clock of whoever asked; only differences mean something."""
    totals: Mapping[str, float]
    """Every counter and gauge without its labels' differences: the sum over all label sets, by metric name."""
    buckets: Mapping[str, Mapping[float, float]]
    """Histogram -> upper bound in its unit -> observations up to it, summed over label sets."""
    engines: int = 1
    """That share the page, each with a KV cache of its own (data parallelism)."""
    model: str = ""
    """The name under which the model is served; "" where no metric has one."""
    plan: str = ""
    """Digest of the plan that is served; "" without our plugin."""
    passes: Mapping[str, str] = field(default_factory=dict)
    """Pass -> the state that every worker has reached: "not_applied", "applied" or "ran"; empty without our plugin."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Tokens of a step and dtype of the weights, for example "1-8 tokens, bf16" -> kernel of the experts; empty where
    ours compute none.
    """
    after_ready: int | None = None
    """Kernels compiled after ready, all workers together; None where nobody counts them."""
    imbalance: Mapping[int, float] = field(default_factory=dict)
    """MoE layer -> tokens of its busiest expert over the mean; empty where experts are not counted."""

    def total(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 where the page does not have it."""
        return self.totals.get(name, 0.0)


def read_moment(page: str, *, seconds: float) -> Moment:
    """Parse a page.

    Args:
        page: in Prometheus' text format.
        seconds: when it was asked for.

    Raises:
        ValueError: a line of vLLM's or ours is not a sample.
    """
    totals: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    passes: dict[str, str] = {}
    imbalance: dict[int, float] = {}
    kernels: dict[str, str] = {}
    model, plan, after_ready, engines = "", "", None, 0
    for sample in (each for prefix in _PREFIXES for each in samples(page, prefix)):
        name, labels, value = sample.name, sample.labels, sample.value
        model = model or labels.get("model_name", "")
        if name.endswith("_bucket"):
            of = buckets.setdefault(name.removesuffix("_bucket"), {})
            bound = float(labels["le"])
            of[bound] = of.get(bound, 0.0) + value
            continue
        if not math.isnan(value):
            totals[name] = totals.get(name, 0.0) + value
        engines += name == RUNNING
        if name == f"{_OURS}pass_state" and value == 1:
            passes[labels["pass"]] = labels["state"]
        elif name == f"{_OURS}build_info":
            plan = labels["plan"]
        elif name == f"{_OURS}kernel_range":
            kernels[f"{labels['tokens']} tokens, {labels['weights']}"] = labels["kernel"]
        elif name == f"{_OURS}compilations_total" and labels["when"] == _AFTER_READY:
            after_ready = (after_ready or 0) + int(value)
        elif name == f"{_OURS}expert_load_max_over_mean_ratio":
            imbalance[int(labels["layer"])] = value
    return Moment(
        seconds=seconds,
        totals=totals,
        buckets=buckets,
        engines=max(engines, 1),
        model=model,
        plan=plan,
        passes=passes,
        kernels=kernels,
        after_ready=after_ready,
        imbalance=imbalance,
    )
