"""Measures what a step that checks drafts costs, by the number of drafts and of clients, on one GPU.

    python benchmarks/serving/bench_verify_steps.py --model DIR --out FILE [--drafts 0,3,1,5] [--profile balanced]
        [--enable-fp8] [--enable-four-bit] [--total-s 500] [-- further vllm serve arguments]

A language model of one narrow layer with random weights drafts, and vLLM accepts drafts at a fixed rate whatever they
are (rejection_sample_method "synthetic"): what is measured is the cost of a step, not how well anything drafts. Each
number of drafts has a server of its own, one after the other, loaded by closed loops (closed_loop.py). The record is
written after each.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.bench_speculation import drafted  # noqa: E402
from benchmarks.serving.closed_loop import OUTPUT_TOKENS, PROMPT_TOKENS, load_at  # noqa: E402
from benchmarks.serving.dummy_model import write_draft_model  # noqa: E402
from benchmarks.serving.plans import compiled_by, free_port, plan_here, served  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.inspection.draft_model import read_draft  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.launcher.http_client import ServerClient  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.plan.serve_args import ServeArguments  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

ACCEPTANCE = 0.7
"""Share of drafts that are accepted, given that all before them were."""
ROUNDS = {1: 3, 4: 3, 16: 2, 64: 2}
"""Clients -> requests of each."""
LEAST_S = 100.0
"""With less time left no server is started: it would not answer its first load."""
_FLAG = "--speculative-config"


def main() -> int:
    """Serve with each number of drafts, load, print a table and write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafts", default="0,3,1,5", help="drafts of a step; 0: none (default: 0,3,1,5)")
    parser.add_argument("--profile", default="balanced")
    parser.add_argument("--enable-fp8", action="store_true")
    parser.add_argument("--enable-four-bit", action="store_true")
    parser.add_argument("--total-s", type=float, default=500, help="for all; what does not fit is left out")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, vllm_args = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    end = time.monotonic() + options.total_s
    record: dict[str, Any] = {
        **head(
            "what a step costs that checks drafts: closed loops on one GPU, one server for each number of drafts; a "
            "model of one narrow layer drafts, and drafts are accepted at a fixed rate; weights are random where vLLM "
            "was told to (--load-format dummy)",
            options.commit,
        ),
        "environment": gpu_environment(),
        "workload": {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "acceptance": ACCEPTANCE},
        "sides": {},
        "not_measured": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        draft = write_draft_model(Path(folder) / "draft", Path(options.model))
        for drafts in map(int, options.drafts.split(",")):
            left = end - time.monotonic()
            if left < LEAST_S:
                record["not_measured"][drafts] = f"not started: {left:.0f} s were left"
            else:
                plan = plan_of(options, vllm_args, draft, drafts)
                record["sides"][drafts] = measured(plan, drafts, ready_timeout_s=left - 20)
            write_atomically(options.out, json.dumps(record, indent=1) + "\n")
            print(table_of(record["sides"]), flush=True)
    return 0


def plan_of(options: Any, vllm_args: list[str], draft: Path, drafts: int) -> Plan:
    """Return the profile's plan with that many drafts of a step, accepted at a fixed rate."""
    profile = load_profile(options.profile)
    section = profile.passes.speculation.model_copy(
        update={"method": "draft", "model": str(draft), "draft_tokens": drafts or None}
    )
    profile = profile.model_copy(update={"passes": profile.passes.model_copy(update={"speculation": section})})
    wishes = {"speculation": (Wish.ON if drafts else Wish.OFF, "this benchmark")}
    for name, asked in (("fp8", options.enable_fp8), ("four_bit", options.enable_four_bit)):
        if asked:
            wishes[name] = (Wish.ON, "this benchmark")
    plan = plan_here(
        options.model,
        *vllm_args,
        kernel_speeds=read_kernel_speeds(),
        profile=profile,
        wishes=wishes,
        draft=read_draft(str(draft), origin="this benchmark") if drafts else None,
        port=free_port(),
        batch_size=max(ROUNDS),
        input_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        max_model_len=1024,
    )
    return accepting(plan, drafts) if drafts else plan


def accepting(plan: Plan, drafts: int) -> Plan:
    """Return the plan with vLLM's synthetic acceptance instead of a comparison with what the model samples."""
    config = plan.serve_args.json_object(_FLAG)
    assert config is not None, f"no drafts in {plan.serve_args}"
    config |= {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [ACCEPTANCE**position for position in range(1, drafts + 1)],
    }
    return dataclasses.replace(
        plan, serve_args=plan.serve_args.without(_FLAG) + ServeArguments(_FLAG, json.dumps(config))
    )


def measured(plan: Plan, drafts: int, *, ready_timeout_s: float) -> dict[str, Any]:
    """Serve one plan and load it at every number of clients."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(plan, run_dir=Path(folder), ready_timeout_s=ready_timeout_s) as info,
    ):
        model = ServerClient(info.base_url).models()[0]
        loads = {}
        for clients, requests in ROUNDS.items():
            before = drafted(info)
            asked = {clients: requests}
            found = load_at(info.base_url, model, plan.model.vocab_size, asked, compiled=compiled_by(info))[clients]
            loads[clients] = {**found, **step_of(found, drafted_between(before, drafted(info)))}
        return {
            **served(plan, info, ("speculation", "flash_dmoe", "fp8", "four_bit")),
            "drafts": drafts,
            "loads": loads,
        }


def drafted_between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return by how much vLLM's counters of drafts rose, the rounds that are not counted included."""
    return {name: after[name] - before[name] for name in after}


def step_of(load: dict[str, Any], drafts: dict[str, float]) -> dict[str, Any]:
    """Return tokens of a request and step, and the time of a step that follows from the time per output token."""
    tokens = 1 + (drafts["accepted_tokens"] / drafts["drafts"] if drafts["drafts"] else 0.0)
    return {"drafted": drafts, "tokens_per_step": tokens, "step_ms": tokens * load["tpot_ms_median"]}


def table_of(sides: dict[int, dict[str, Any]]) -> str:
    """Return a line per number of drafts: time per token, tokens per step and the time of a step at every load."""
    lines = [f"{'drafts':>6}" + "".join(f"{f'{clients} clients: TPOT, tokens, step':>36}" for clients in ROUNDS)]
    for drafts, side in sides.items():
        cells = (
            f"{load['tpot_ms_median']:18.3f} {load['tokens_per_step']:7.2f} {load['step_ms']:9.3f}"
            for load in side["loads"].values()
        )
        lines.append(f"{drafts:>6}" + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
