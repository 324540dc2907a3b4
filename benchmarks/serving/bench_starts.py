"""Measures the time to ready of a plan and of vLLM alone, in turns, and the first minutes after it.

    python benchmarks/serving/bench_starts.py --model DIR --out FILE [--profile balanced] [--enable-fp8] [--turns 2]
        [--sides vllm,ours] [--total-s 500] [--load-s 300 --clients 16] [-- further vllm serve arguments]

Give the run empty caches (XDG_CACHE_HOME, VLLM_CACHE_ROOT, TRITON_CACHE_DIR), or its first starts are no first starts.
Both sides share them, as they do for a user. vLLM alone is ready when /health answers: it has no warm-up and no checks.
Ours is ready after both, when `serve` says so. With --load-s each is loaded from then on (first_minutes.py): 300 for
the first five minutes. The record is written after each start.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import environment, head, parser_of  # noqa: E402
from benchmarks.serving.first_minutes import first_minutes  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here  # noqa: E402
from moe_optimizer import env  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.launcher.decode_check import DEFAULT_LIMIT_S as DECODE_CHECK_S  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.launcher.warm_up import DEFAULT_LIMIT_S as WARM_UP_S  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.process_environment import changed_environment  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402
from moe_optimizer.proof.record import PROOF_PAUSE_S, read_proofs  # noqa: E402

SIDES = ("vllm", "ours")
_OURS = ("flash_dmoe", "expert_load", "expert_placement")
"""Passes that need the plugin: off for vLLM alone, which gets the same flags otherwise."""
_COMPILED = re.compile(r"compiled before the server is ready: (.*)")
"""A line of the plugin in the server's log."""
LEAST_S = 60.0
"""With less time left no server is started."""


def main() -> int:
    """Start and stop, print each time, and write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="balanced")
    parser.add_argument("--enable-fp8", action="store_true", help="vLLM alone then has its online FP8 by block")
    parser.add_argument(
        "--sides", default=",".join(SIDES), help="default: both; of one alone, each on a GPU of its own"
    )
    parser.add_argument("--turns", type=int, default=2, help="starts of each side (default: 2)")
    parser.add_argument("--load-s", type=float, default=0, help="load each for so long from when it is ready")
    parser.add_argument("--clients", type=int, default=16, help="of that load (default: 16)")
    parser.add_argument("--total-s", type=float, default=500, help="for all; what does not fit is left out")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, vllm_args = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    sides = options.sides.split(",")
    if not set(sides) <= set(SIDES):
        parser.error(f"--sides: got {options.sides}, expected some of {', '.join(SIDES)}")
    end = time.monotonic() + options.total_s
    found: dict[str, Any]
    record: dict[str, Any] = {
        **head("time to ready of vLLM alone and of ours, in turns with shared caches, empty at first", options.commit),
        "environment": environment(),
        "starts": [],
    }
    for turn in range(options.turns):
        for side in sides:
            left = end - time.monotonic() - options.load_s
            found = {"ready_s": None}
            if left > LEAST_S:
                found = started(side, plan_of(side, options, vllm_args), options, left)
            record["starts"].append({"side": side, "turn": turn, **found})
            write_atomically(options.out, json.dumps(record, indent=1) + "\n")
            print({name: value for name, value in record["starts"][-1].items() if name != "load"}, flush=True)
            print(*found.get("load", {}).get("stretches", ()), sep="\n", flush=True)
    return 0


def plan_of(side: str, options: Any, vllm_args: list[str]) -> Plan:
    """Return the plan of a side for this machine."""
    wishes = {"fp8": (Wish.ON, "this benchmark")} if options.enable_fp8 else {}
    if side == "vllm":
        wishes |= dict.fromkeys(_OURS, (Wish.OFF, "this benchmark"))
    return plan_here(
        options.model,
        *vllm_args,
        kernel_speeds=read_kernel_speeds(),
        profile=load_profile(options.profile),
        wishes=wishes,
        port=free_port(),
    )


def started(side: str, plan: Plan, options: Any, left_s: float) -> dict[str, Any]:
    """Start one side, load it if asked to, and stop it; return its time to ready, where that went, what compiled."""
    alone = side == "vllm"
    said: list[str] = []
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        changed_environment({env.DISABLE: "1"} if alone else {}),
        running(
            plan,
            run_dir=Path(folder),
            ready_timeout_s=left_s - 10,
            warm_up_s=0.0 if alone else WARM_UP_S,
            decode_check_s=0.0 if alone else DECODE_CHECK_S,
            echo=said.append,
        ) as info,
    ):
        found: dict[str, Any] = {"ready_s": round(time.monotonic() - begin, 2), "warm_up": info.warm_up}
        if options.load_s:
            vocabulary = plan.model.vocab_size
            found["load"] = first_minutes(
                info.base_url, info.model, vocabulary, clients=options.clients, seconds=options.load_s
            )
            time.sleep(PROOF_PAUSE_S)
        return found | {
            "warmed_up": next((line for line in said if line.startswith("warmed up in")), None),
            "phases_s": dict(info.phases_s),
            "serve_args": list(plan.serve_args.words),
            "ran": [row.pass_name for row in info.rows if row.ran.startswith("yes")],
            "compilations": [asdict(each.compilations) for each in read_proofs(info.run_dir) if each.compilations],
            "compiled": _COMPILED.findall(info.log_path.read_text(errors="replace")),
        }


if __name__ == "__main__":
    sys.exit(main())
