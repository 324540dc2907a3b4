"""Measures what pruning the experts costs: perplexity of the bundled model, served without and with sparsity_24.

One server after another on vLLM's CPU build, BF16: with all weights, pruned by magnitude alone, and pruned by magnitude
x norm of the input. The norms are measured on the model's training text, the perplexity on its held-out text. Beside it
the bytes of the experts as the workers' proofs have them.

    python benchmarks/serving/sparsity_24_quality.py --write
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import cpu_name, cpu_slug, parser_of, write_record
from benchmarks.serving.tiny_moe_quality import TINY_MOE, make_record, print_table, served, tiny_moe_plan
from moe_optimizer.inspection.activation_norms import read_activation_norms_file
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan

MAX_CALIBRATION_TOKENS = 16384
ALL, BY_MAGNITUDE, BY_NORM = "all weights", "2:4 by magnitude", "2:4 by magnitude x norm"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    options = parser_of(__doc__, write=True).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        norms = measure_norms(Path(folder))
        file = read_activation_norms_file(norms)
        assert file is not None, norms
        results = {
            ALL: served(plan_of(Wish.OFF), Path(folder) / "off"),
            BY_MAGNITUDE: served(plan_of(Wish.ON), Path(folder) / "magnitude"),
            BY_NORM: served(plan_of(Wish.ON, norms), Path(folder) / "norm"),
        }
    print_table(results)
    if options.write:
        norms_of = f"examples/tiny-moe/corpus.txt, {file.tokens} tokens"
        record = make_record("2:4 pruned experts and without", results, norms=norms_of)
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
    return tiny_moe_plan(
        wishes={"sparsity_24": (wish, "benchmark")},
        required=frozenset({"sparsity_24"}) if wish is Wish.ON else frozenset(),
        activation_norms=read_activation_norms_file(norms),
    )


if __name__ == "__main__":
    sys.exit(main())
