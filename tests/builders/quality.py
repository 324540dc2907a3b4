"""Results of quality runs."""

from __future__ import annotations

from typing import Any

from moe_optimizer.measure.quality.intervals import Estimate
from moe_optimizer.measure.quality.result import Continuations, Failure, PromptResult, QualityResult, TaskResult


def quality_result(**changes: Any) -> QualityResult:
    """Return the result of a plan that keeps every threshold."""

    def about(value: float) -> Estimate:
        return Estimate(value, 0.9 * value, 1.1 * value)

    fields: dict[str, Any] = {
        "positions": 8000, "not_numbers": 0, "kl_mean": about(0.0001), "kl_p99": about(0.001),
        "top1_agreement": about(0.99), "perplexity_ratio": about(1.0), "greedy_match_tokens": about(20.0),
        "generated": 32, "model": "m", "plan": "balanced", "plan_digest": "0" * 16, "reference": "stock",
        "passes": ("flash_dmoe", "scheduler"), "top_logprobs": 64, "flat": False, "failed": (),
        "thresholds": {"kl_mean": 0.0002, "task_drop": 0.01},
        "probes": (), "kernels": (), "passes_alone": (), "not_alone": {}, "batch": (), "first_difference": None,
        "prompts": (
            PromptResult(
                prompt="a\nb", reference="one two", plan="one too", first_difference=5,
                in_batch=Continuations(reference="one two", plan="one tow", first_difference=5),
            ),
        ),
        "tasks": (task_result(),), "environment": {},
    }  # fmt: skip
    return QualityResult(**(fields | changes))


def task_result(**changes: Any) -> TaskResult:
    """Return a task of which both servers answer as much right."""
    fields: dict[str, Any] = {
        "task": "mmlu", "metric": "acc", "questions": 400, "reference": 0.64, "plan": 0.635,
        "difference": Estimate(-0.005, -0.02, 0.01), "only_reference": 6, "only_plan": 4, "p_value": 0.754,
    }  # fmt: skip
    return TaskResult(**(fields | changes))


def failure(**changes: Any) -> Failure:
    """Return a threshold that was not kept."""
    fields: dict[str, Any] = {"pass_name": "fp8", "where": "all", "metric": "kl_mean", "value": 0.02, "limit": 0.0002}
    return Failure(**(fields | changes))
