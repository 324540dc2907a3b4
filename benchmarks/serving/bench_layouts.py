"""Measures one model in several layouts over the GPUs of a machine, beside what the plan predicts of each.

    python benchmarks/serving/bench_layouts.py --model DIR --out FILE [--layouts tp2,tp1x2,tp1dp2ep,tp2ep]
        [--clients 1,16,128,512] [--profile conservative] [-- further vllm serve arguments]

Each layout is served and loaded by `moe-optimizer bench`, one after the other; `moe-optimizer plan` predicts it for as
many clients. The record is written after each layout, so that a run that is cut keeps what it has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402

COMMAND = (sys.executable, "-m", "moe_optimizer")


def main() -> int:
    """Measure each layout and write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layouts", default="tp2,tp1x2,tp1dp2ep,tp2ep")
    parser.add_argument("--clients", default="1,16,128,512")
    parser.add_argument("--profile", default="conservative", help="conservative: vLLM's own kernels")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=900, help="for one layout")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, vllm_args = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    record: dict[str, Any] = {
        **head(
            "one model in several layouts over the GPUs of a machine, each loaded by moe-optimizer bench, beside the "
            "plan's prediction; weights are random where vLLM was told to (--load-format dummy), so routing is even",
            options.commit,
        ),
        "environment": gpu_environment(),
        "workload": {"input_tokens": options.input_tokens, "output_tokens": options.output_tokens},
        "layouts": {},
    }
    for layout in options.layouts.split(","):
        record["layouts"][layout] = measured(layout, options, vllm_args)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        show(layout, record["layouts"][layout])
    return 0


def measured(layout: str, options: Any, vllm_args: list[str]) -> dict[str, Any]:
    """Return what one layout does and what was predicted of it; with `error` where it did not run."""
    most = max(int(count) for count in options.clients.split(","))
    common = [options.model, "--profile", options.profile, "--layout", layout, "--batch-size", str(most), "--json"]
    after = ["--", *vllm_args] if vllm_args else []
    predicted: dict[str, Any] = {}
    tokens = ["--input-tokens", str(options.input_tokens), "--output-tokens", str(options.output_tokens)]
    for clients in options.clients.split(","):
        plan = call(["plan", *common, *tokens, "--clients", clients, *after], 120)
        predicted[clients] = plan["layouts"]["estimates"][0] if "layouts" in plan else plan
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "layouts.yaml"
        workload.write_text(workload_text(options), encoding="utf-8")
        load = ["--against", "", "--workload", str(workload), "--repetitions", str(options.repetitions)]
        started = time.monotonic()
        result = call(["bench", *common, *load, "--run-dir", f"{folder}/run", *after], options.timeout_s)
    return {"wall_s": round(time.monotonic() - started, 1), "predicted": predicted, "bench": result}


def workload_text(options: Any) -> str:
    """Return a workload of moe-optimizer bench."""
    return (
        "description: requests of one length\nrequests:\n"
        f"  - {{prompt: {_exactly(options.input_tokens)}, output: {_exactly(options.output_tokens)}}}\n"
        f"clients: [{options.clients}]\nrequests_per_client: 3\n"
    )


def _exactly(tokens: int) -> str:
    return f"{{least: {tokens}, most: {tokens}}}"


def call(arguments: list[str], timeout_s: float) -> dict[str, Any]:
    """Return the JSON that a command prints, or what it printed when it failed."""
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {timeout_s:g} s"}
    if done.returncode:
        return {"error": done.stderr[-2000:], "exit_code": done.returncode}
    return json.loads(done.stdout)


def show(layout: str, found: dict[str, Any]) -> None:
    """Print predicted and measured side by side."""
    if "error" in found["bench"]:
        print(f"{layout}: {found['bench']['error'][-300:]}")
        return
    for load in found["bench"]["sides"][0]["loads"]:
        predicted = found["predicted"].get(str(load["clients"]), {})
        print(
            f"{layout:<12}{load['clients']:>5} clients  TPOT {load['tpot_ms']['median']:.2f} ms measured, "
            f"{predicted.get('tpot_ms')} predicted; {load['output_tokens_per_s']:.0f} tokens/s measured, "
            f"{predicted.get('tokens_per_s')} predicted"
        )


if __name__ == "__main__":
    sys.exit(main())
