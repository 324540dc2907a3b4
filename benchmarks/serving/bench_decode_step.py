"""Writes the ledger of a decode step, ours beside stock vLLM's: time per group of kernels and the floor of its bytes.

    python benchmarks/serving/bench_decode_step.py --model DIR --out FILE [--batches 1,8,64,128] [--context 512]
        [--profile balanced] [-- further vllm serve arguments]

One GPU. Both sides get the arguments after `--`; ours follows the plan of the profile, with the tables of this machine.
Where the cache does not hold a batch with --context tokens each, its sequences are shorter, or it is left out: the
record's remarks say so.
A model without weights is decoded with --load-format dummy, which leaves routing near uniform.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.plans import plan_here  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.measure.decode_step.comparison import compare_steps, render  # noqa: E402
from moe_optimizer.plan.json_codec import encode  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402


def main() -> int:
    """Profile both sides, print their ledgers beside each other, write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,64,128")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", default="balanced")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for each side")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:at])
    batches = tuple(int(each) for each in options.batches.split(","))
    plan = plan_here(
        options.model,
        *sys.argv[at + 1 :],
        kernel_speeds=read_kernel_speeds(),
        profile=load_profile(options.profile),
        batch_size=max(batches),
    )
    record: dict[str, Any] = {
        **head(
            "where the time of one decode step goes: kernels by group beside the least time of the group's bytes",
            options.commit,
        ),
        "plan_digest": plan.digest,
    }
    found = compare_steps(
        plan,
        batches=batches,
        context=options.context,
        steps=options.steps,
        timeout_s=options.timeout_s,
        on_step=lambda _share, text: print(text, flush=True),
    )
    record["environment"] = {**gpu_environment(), "vllm": found.vllm, "torch": found.torch}
    record["remarks"] = list(found.remarks)
    record["sides"] = {"stock": encode(found.stock), "ours": encode(found.ours)}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
