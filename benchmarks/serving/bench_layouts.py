"""Measures one model on several GPUs of a machine: slices of every layer, whole experts per GPU, or whole servers.

    python benchmarks/serving/bench_layouts.py --model DIR --out FILE [--gpus N] [--sides slices,experts,replicas]
        [-- further vllm serve arguments]

One server (or group of servers) after the other, each loaded by closed loops (closed_loop.py) of as many clients for
all GPUs together: whole servers share them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.closed_loop import OUTPUT_TOKENS, PROMPT_TOKENS, load_at, table_of  # noqa: E402
from benchmarks.serving.plans import plan_here, served  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.launcher.http_client import ServerClient  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

PASSES = ("parallelism", "replicas")
_BY = "this benchmark"
SIDES = {
    "slices": {"parallelism.expert_parallel": (Wish.OFF, _BY)},
    "experts": {"parallelism.expert_parallel": (Wish.ON, _BY)},
    "replicas": {"replicas": (Wish.ON, _BY)},
}
REQUESTS = {1: 4, 16: 4, 128: 2}
"""Clients -> requests of each."""


def main() -> int:
    """Serve, load and stop each side; print a table and write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, help="GPUs to use (default: all)")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"default: {','.join(SIDES)}")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, vllm_args = parser.parse_args(sys.argv[1:at]), tuple(sys.argv[at + 1 :])
    if unknown := set(options.sides.split(",")) - set(SIDES):
        parser.error(f"--sides: got {sorted(unknown)}, expected some of {', '.join(SIDES)}")
    record: dict[str, Any] = {
        **head(
            "one model on several GPUs in slices, with whole experts, and as whole servers behind a router: closed "
            "loops of streamed completions, one after the other; weights are random where vLLM was told to "
            "(--load-format dummy), so routing is nearly even",
            options.commit,
        ),
        "environment": gpu_environment(),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "sides": {},
    }
    for side in options.sides.split(","):
        record["sides"][side] = measure(make(options.model, options.gpus, vllm_args, side))
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table_of({side: found["loads"] for side, found in record["sides"].items()}))
    return 0


def make(model: str, gpus: int | None, vllm_args: tuple[str, ...], side: str) -> Plan:
    """Return the plan of one side; apart from the layout they are stock vLLM."""
    return plan_here(
        model,
        *vllm_args,
        kernel_speeds=read_kernel_speeds(),
        profile=load_profile("conservative"),
        num_gpus=gpus,
        wishes={"flash_dmoe": (Wish.OFF, _BY), **SIDES[side]},
        batch_size=128,
        max_model_len=1024,
    )


def measure(plan: Plan) -> dict[str, Any]:
    """Serve one plan and load it."""
    with tempfile.TemporaryDirectory() as folder, running(plan, run_dir=Path(folder), ready_timeout_s=500) as info:
        model = ServerClient(info.base_url).models()[0]
        return {
            **served(plan, info, PASSES),
            "loads": load_at(info.base_url, model, plan.model.vocab_size, REQUESTS),
        }


if __name__ == "__main__":
    sys.exit(main())
