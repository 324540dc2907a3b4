"""Measures what four bits cost: perplexity of the bundled model, served with experts in BF16, FP8, MXFP4 and INT4.

One server after another on vLLM's CPU build, activations in BF16. Beside the perplexity of the model's held-out text
the bytes of the experts, and by how much each layer's output changes on synthetic tokens, as the workers' proofs have
them.

    python benchmarks/serving/four_bit_quality.py --write
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import cpu_name, cpu_slug, parser_of, write_record
from benchmarks.serving.tiny_moe_quality import make_record, print_table, served, tiny_moe_plan
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.profiles import load_profile
from moe_optimizer.profiles.schema import Profile
from moe_optimizer.specs.expert_formats import INT4, INT4_GROUPS

BF16 = "bf16"
PASS_OF = {BF16: None, "fp8": "fp8", "mxfp4": "four_bit"} | {f"int4-{group}": "four_bit" for group in INT4_GROUPS}
"""Format of the experts, of INT4 with the columns that share a scale -> the pass that converts them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    options = parser_of(__doc__, write=True).parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: served(plan_of(name), Path(folder) / name) for name in PASS_OF}
    print_table(results)
    if options.write:
        record = make_record("experts in BF16, FP8, MXFP4 and INT4", results)
        write_record(record, cpu_slug(cpu_name()), "four_bit")
    return 0


def plan_of(experts: str) -> Plan:
    """Return the balanced profile's plan for the bundled model on this machine with our kernel, and with the experts in
    one of the formats.
    """
    on = {"flash_dmoe", PASS_OF[experts]}
    passes = ("flash_dmoe", *filter(None, PASS_OF.values()))
    return tiny_moe_plan(
        profile=_profile(experts),
        wishes={name: (Wish.ON if name in on else Wish.OFF, "benchmark") for name in passes},
        required=frozenset(name for name in on if name),
    )


def _profile(experts: str) -> Profile:
    profile = load_profile("balanced")
    name, _, group = experts.partition("-")
    if name != INT4:
        return profile
    section = profile.passes.four_bit.model_copy(update={"format": INT4, "group": int(group)})
    return profile.model_copy(update={"passes": profile.passes.model_copy(update={"four_bit": section})})


if __name__ == "__main__":
    sys.exit(main())
