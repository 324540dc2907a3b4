"""Writes the ledger of a decode step, ours beside stock vLLM's: time per group of kernels and the floor of its bytes.

    python benchmarks/serving/bench_decode_step.py --model DIR --out FILE [--batches 1,8,64,128] [--context 512]
        [--profile balanced] [-- further vllm serve arguments]

One GPU. Both sides get the arguments after `--`; ours follows the plan of the profile, with the tables of this machine.
A model without weights is decoded with --load-format dummy, which leaves routing near uniform.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import head, parser_of  # noqa: E402
from benchmarks.serving.plans import plan_here  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.measure.decode_step.ledger import Ledger, ledger_of  # noqa: E402
from moe_optimizer.measure.decode_step.profiled_steps import StepProfile  # noqa: E402
from moe_optimizer.measure.decode_step.profiling import Side, profile_steps  # noqa: E402
from moe_optimizer.plan.json_codec import encode  # noqa: E402
from moe_optimizer.plan.pass_params import Fp8Params, KvCacheParams  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

SIDES: tuple[Side, ...] = ("stock", "ours")


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
        "sides": {},
    }
    ledgers: dict[Side, list[Ledger]] = {}
    for side in SIDES:
        found = profile_steps(
            plan, side, batches=batches, context=options.context, steps=options.steps, timeout_s=options.timeout_s
        )
        ledgers[side] = [ledger_of_side(plan, side, profile) for profile in found.profiles]
        record |= {"device": found.device, "vllm": found.vllm, "torch": found.torch}
        record["sides"][side] = {
            "ledgers": [encode(each) for each in ledgers[side]],
            "profiles": [encode(profile) for profile in found.profiles],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for stock, ours in zip(ledgers["stock"], ledgers["ours"], strict=True):
        print(table_of(stock, ours))
    return 0


def ledger_of_side(plan: Plan, side: Side, profile: StepProfile) -> Ledger:
    """Return the ledger of one side, with the bits that its weights and its cache are stored in."""
    assert plan.hardware.gpu is not None
    expert_bits = linear_bits = plan.model.weight_bits
    kv_bits = 16
    if side == "ours":
        fp8, cache = plan.decision("fp8").params, plan.decision("kv_cache").params
        if isinstance(fp8, Fp8Params):
            expert_bits = fp8.stored_expert_bits or expert_bits
            linear_bits = fp8.stored_linear_bits or linear_bits
        kv_bits = cache.kv_bits if isinstance(cache, KvCacheParams) else kv_bits
    return ledger_of(
        profile, plan.model, plan.hardware.gpu, expert_bits=expert_bits, linear_bits=linear_bits, kv_bits=kv_bits
    )


def table_of(stock: Ledger, ours: Ledger) -> str:
    """Return both ledgers of one batch, a line per group."""
    lines = [
        f"batch {stock.batch}, context {stock.context}: step {stock.step_us:.0f} us stock vLLM, {ours.step_us:.0f} us "
        f"ours; kernels {stock.kernels_us:.0f} and {ours.kernels_us:.0f} us",
        f"{'group':14} {'stock us':>9} {'calls':>7} {'ours us':>9} {'calls':>7} {'least us':>9}",
    ]
    by_group = {row.group: row for row in ours.rows}
    groups = [row.group for row in stock.rows] + [row.group for row in ours.rows]
    of_stock = {row.group: row for row in stock.rows}
    for group in dict.fromkeys(groups):
        cells = [_cells(of_stock.get(group)), _cells(by_group.get(group))]
        row = of_stock.get(group) or by_group[group]
        least = "" if row.least_us is None else f"{row.least_us:.0f}"
        lines.append(f"{group:14} {cells[0]} {cells[1]} {least:>9}")
    return "\n".join(lines) + "\n"


def _cells(row: Any) -> str:
    return f"{row.us:9.1f} {row.calls:7.1f}" if row is not None else f"{'':9} {'':7}"


if __name__ == "__main__":
    sys.exit(main())
