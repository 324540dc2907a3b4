"""Results of quality runs."""

from __future__ import annotations

from typing import Any

from moe_optimizer.measure.quality.intervals import Estimate
from moe_optimizer.measure.quality.result import Failure, PromptResult, QualityResult


def quality_result(**changes: Any) -> QualityResult:
    """Return the result of a plan that keeps every threshold."""

    def about(value: float) -> Estimate:
        return Estimate(value, 0.9 * value, 1.1 * value)

    fields: dict[str, Any] = {
        "positions": 8000, "not_numbers": 0, "kl_mean": about(0.0001), "kl_p99": about(0.001),
        "top1_agreement": about(0.99), "perplexity_ratio": about(1.0), "greedy_match_tokens": about(20.0),
        "generated": 32, "model": "m", "plan": "balanced", "plan_digest": "0" * 16, "reference": "stock",
        "passes": ("flash_dmoe", "scheduler"), "top_logprobs": 64, "thresholds": {"kl_mean": 0.0002}, "failed": (),
        "probes": (), "kernels": (), "passes_alone": (), "not_alone": {}, "batch": (), "first_difference": None,
        "prompts": (PromptResult(prompt="a\nb", reference="one two", plan="one too", first_difference=5),),
        "tasks": (), "environment": {},
    }  # fmt: skip
    return QualityResult(**(fields | changes))


def failure(**changes: Any) -> Failure:
    """Return a threshold that was not kept."""
    fields: dict[str, Any] = {"pass_name": "fp8", "where": "all", "metric": "kl_mean", "value": 0.02, "limit": 0.0002}
    return Failure(**(fields | changes))
