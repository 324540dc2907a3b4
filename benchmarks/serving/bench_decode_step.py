"""Writes the ledger of a decode step, ours beside stock vLLM's: time per group of kernels and the floor of its bytes.

    python benchmarks/serving/bench_decode_step.py --model DIR --out FILE [--batches 1,8,64,128] [--context 512]
        [--sides stock,ours] [--profile balanced] [-- further vllm serve arguments]

One GPU. Both sides get the arguments after `--`; ours follows the plan of the profile, with the tables of this machine.
The record is written after each side. With one of --sides, each on a GPU of its own, keep.py makes one record of both;
give a context for each batch then (512,512,256), since no side knows what the other could hold.
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
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.measure.decode_step.comparison import (  # noqa: E402
    SIDES,
    profiled_sides,
    remarks_of,
    side_steps,
)
from moe_optimizer.plan.json_codec import encode  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402


def main() -> int:
    """Profile both sides, print their ledgers beside each other, write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,64,128")
    parser.add_argument("--context", default="512", help="tokens of a sequence, of all batches or of each")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", default="balanced")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for each side")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:at])
    batches = tuple(int(each) for each in options.batches.split(","))
    contexts = tuple(int(each) for each in options.context.split(","))
    if len(contexts) not in (1, len(batches)):
        parser.error(f"--context: got {options.context}, expected one number or one for each of {len(batches)} batches")
    if unknown := set(options.sides.split(",")).difference(SIDES):
        parser.error(f"--sides: got {', '.join(sorted(unknown))}, expected {' or '.join(SIDES)}, or both with a comma")
    sides = tuple(side for side in SIDES if side in options.sides.split(","))
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
        "environment": gpu_environment(),
        "remarks": [],
        "sides": {},
    }
    for side, found in profiled_sides(
        plan,
        sides,
        batches=batches,
        contexts=contexts * (len(batches) // len(contexts)),
        steps=options.steps,
        timeout_s=options.timeout_s,
        on_step=lambda _share, text: print(text, flush=True),
    ):
        steps = side_steps(plan, side, found)
        record["environment"] |= {"vllm": found.vllm, "torch": found.torch}
        record["remarks"] += remarks_of(side, found)
        record["sides"][side] = encode(steps)
        write_atomically(options.out, json.dumps(record, indent=1) + "\n")
        for each in steps.ledgers:
            spent = f"step {each.step_us:.0f} us, kernels {each.kernels_us:.0f} us"
            print(f"{side}, batch {each.batch}: {spent}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
