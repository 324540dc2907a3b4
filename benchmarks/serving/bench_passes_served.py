"""Measures decoding speed of a served model with and without some passes, one server after the other on one GPU.

    python benchmarks/serving/bench_passes_served.py --model DIR --out FILE --sides stock,flash_dmoe,fp8,fp8+flash_dmoe
        [-- further vllm serve arguments]

The servers get the same plan but for the passes that a side names; "stock" names none. Each is loaded by closed loops
(closed_loop.py); what is reported is the time per output token and tokens per second of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.closed_loop import OUTPUT_TOKENS, PROMPT_TOKENS, load_at, table_of  # noqa: E402
from benchmarks.serving.plans import compiled_by, plan_here, served  # noqa: E402
from moe_optimizer.cli.progress import ProgressLines  # noqa: E402
from moe_optimizer.cli.speed_questions import measure_if_needed  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.launcher.http_client import ServerClient  # noqa: E402
from moe_optimizer.launcher.launch import running  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.json_codec import encode  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

PASSES = ("flash_dmoe", "fp8", "expert_load", "kv_cache")
"""Those that a side can name; what it does not name is off."""
STOCK = "stock"
CALIBRATE_S = 30.0
ROUNDS = {1: 4, 8: 3, 64: 2}
"""Concurrency -> requests per client."""


def main() -> int:
    """Serve, load, stop, twice; print a table and write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sides", default="stock,flash_dmoe", type=_sides, help="default: stock,flash_dmoe")
    own, rest = _split(sys.argv[1:])
    options = parser.parse_args(own)
    record: dict[str, Any] = {
        **head(
            "decoding with the passes that each side names and without them: closed loops of streamed completions, "
            "one GPU, one server after the other; weights are random where vLLM was told to (--load-format dummy)",
            options.commit,
        ),
        "environment": gpu_environment(),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "sides": {},
    }
    for side, passes in options.sides.items():
        measure_if_needed(make(options.model, rest, passes), CALIBRATE_S, ProgressLines(verbose=True))
        record["sides"][side] = measure(make(options.model, rest, passes), passes)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table_of({side: found["loads"] for side, found in record["sides"].items()}))
    return 0


def _sides(text: str) -> dict[str, frozenset[str]]:
    """Return side -> its passes."""
    sides = {side: frozenset(() if side == STOCK else side.split("+")) for side in text.split(",")}
    unknown = frozenset().union(*sides.values()) - set(PASSES)
    if unknown:
        raise argparse.ArgumentTypeError(f"got {sorted(unknown)}, expected {STOCK} or some of {PASSES} joined by +")
    return sides


def _split(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], tuple(arguments[at + 1 :])


def make(model: str, vllm_args: tuple[str, ...], passes: frozenset[str]) -> Plan:
    """Return the plan of one side."""
    # Measured speeds decide where our kernel is used; whatever else is named is on.
    wishes = {name: (Wish.ON if name in passes else Wish.OFF, "this benchmark") for name in PASSES}
    if "flash_dmoe" in passes:
        wishes["flash_dmoe"] = (Wish.AUTO, "this benchmark")
    return plan_here(
        model,
        *vllm_args,
        kernel_speeds=read_kernel_speeds(),
        profile=load_profile("conservative"),
        wishes=wishes,
        batch_size=64,
        max_model_len=1024,
    )


def measure(plan: Plan, passes: frozenset[str]) -> dict[str, Any]:
    """Serve one plan and load it at every concurrency."""
    with tempfile.TemporaryDirectory() as folder, running(plan, run_dir=Path(folder), ready_timeout_s=500) as info:
        model = ServerClient(info.base_url).models()[0]
        loads = load_at(info.base_url, model, plan.model.vocab_size, ROUNDS, compiled=compiled_by(info))
        return {
            **served(plan, info, passes),
            "proofs": {
                name: [encode(proof.passes[name]) for proof in info.proofs if name in proof.passes] for name in passes
            },
            "loaded": loaded(info.log_path),
            "loads": loads,
        }


def loaded(log_path: Path) -> list[str]:
    """Return vLLM's own words on the memory that the weights took and the room that is left."""
    words = ("Model loading took", "Available KV cache memory", "GPU KV cache size")
    lines = log_path.read_text(errors="replace").splitlines()
    return [line[line.index(word) :] for line in lines for word in words if word in line]


if __name__ == "__main__":
    sys.exit(main())
