"""What counting tokens per expert costs: the time of a decode step with expert_load on and off.

Two servers run side by side, alike but for the pass, with layers of the shape of Qwen3-30B-A3B (few of them, with
made-up weights: the layers are alike, and each step's fixed cost weighs more than in the whole model). The same
requests go to the one and the other in turn, and which of them is first changes in every round, so that a change of the
machine's load touches both. A sample is the mean time between tokens of one round; the result is the median of the
ratios on / off of all rounds, with its 95 % interval (order statistics).

Run it on a quiet machine:  python benchmarks/serving/bench_expert_load.py --write
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import RECORDS, checkout, cpu_name, cpu_slug, write_record  # noqa: E402
from moe_optimizer.inspection import ModelInspector, find_vllm, probe_hardware, read_kernel_inventory  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.planner import PlanRequest, make_plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402
from moe_optimizer.specs.software import SoftwareSpec  # noqa: E402
from moe_optimizer.vllm_plugin.launch import ServerInfo, running  # noqa: E402

TINY_MOE = ROOT / "examples" / "tiny-moe"
SHAPE = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
"""Qwen3-30B-A3B, from its config.json."""
READY_TIMEOUT_S = 600.0
GOAL = 1.01
PACKAGES = ("moe-optimizer", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="MoE layers of the model (default: 2)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at the same time")
    parser.add_argument("--rounds", type=int, default=40, help="rounds for each batch size (default: 40)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a request (default: 32)")
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation")
    parser.add_argument("--write", action="store_true", help=f"write a record to {RECORDS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)

    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", options.layers)
        with servers(model, Path(folder), eager=options.eager) as (off, on):
            samples = {batch: measure(off, on, batch, options) for batch in options.batch}
    record = make_record(samples, options, load_before=load_before)
    for batch, result in record["results"].items():
        low, high = result["ratio_interval_95"]
        print(
            f"batch {batch:>3}: {result['off_median_ms']:7.3f} ms a token off, {result['on_median_ms']:7.3f} ms on, "
            f"on / off {result['ratio_median']:.4f} ({low:.4f} to {high:.4f})"
        )
    if options.write:
        subject = "expert_load_eager" if options.eager else "expert_load"
        write_record(record, cpu_slug(record["environment"]["cpu"]), subject)
    return 0


def write_model(folder: Path, num_layers: int) -> Path:
    """Write a configuration of `num_layers` layers of SHAPE, with the bundled model's tokenizer and no weights."""
    folder.mkdir()
    config = json.loads((TINY_MOE / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | SHAPE | {"num_hidden_layers": num_layers}))
    for path in TINY_MOE.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@contextlib.contextmanager
def servers(model: Path, folder: Path, *, eager: bool) -> Iterator[tuple[ServerInfo, ServerInfo]]:
    """Run a server without and one with the pass; both have shown that everything else that was planned runs."""
    off, on = (plan_of(model, counting=counting, eager=eager) for counting in (False, True))
    with (
        running(off, run_dir=folder / "off", ready_timeout_s=READY_TIMEOUT_S) as first,
        running(
            on, run_dir=folder / "on", require=frozenset({"expert_load"}), ready_timeout_s=READY_TIMEOUT_S
        ) as second,
    ):
        yield first, second


def plan_of(model: Path, *, counting: bool, eager: bool) -> Plan:
    """Return the balanced profile's plan for `model` on this machine, with or without the pass."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return make_plan(
        PlanRequest(
            model=ModelInspector().inspect(model),
            hardware=probe_hardware(),
            software=SoftwareSpec(vllm=find_vllm(), kernels=read_kernel_inventory()),
            profile=load_profile("balanced"),
            wishes={"expert_load": (Wish.ON if counting else Wish.OFF, "benchmark")},
            dtype="bfloat16",
            port=port,
            max_model_len=512,
            batch_size=16,
            vllm_args=("--load-format", "dummy", *(("--enforce-eager",) if eager else ())),
        )
    )


def measure(off: ServerInfo, on: ServerInfo, batch: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds between tokens of every round, after two uncounted ones."""
    samples: dict[str, list[float]] = {"off": [], "on": []}
    for round_idx in range(-2, options.rounds):
        pair = (("off", off), ("on", on)) if round_idx % 2 else (("on", on), ("off", off))
        for name, server in pair:
            seconds = _round(server, batch, options.tokens)
            if round_idx >= 0:
                samples[name].append(seconds)
    return samples


def _round(server: ServerInfo, batch: int, tokens: int) -> float:
    """Send `batch` requests at once; return the mean time between tokens, from every request's own first to last."""
    times: list[float] = []
    threads = [
        threading.Thread(target=lambda number=number: times.append(_between_tokens(server, tokens, number)))
        for number in range(batch)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(times) != batch:
        raise RuntimeError(f"{batch - len(times)} of {batch} requests failed")
    return statistics.mean(times)


def _between_tokens(server: ServerInfo, tokens: int, number: int) -> float:
    body = {
        "model": server.model, "prompt": [10 + number, 20, 30, 40], "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    arrivals = []
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                arrivals.append(time.perf_counter())
    if len(arrivals) != tokens:
        raise RuntimeError(f"got {len(arrivals)} tokens, expected {tokens}")
    return (arrivals[-1] - arrivals[0]) / (tokens - 1)


def make_record(
    samples: dict[int, dict[str, list[float]]], options: argparse.Namespace, *, load_before: float
) -> dict[str, Any]:
    """Return the record: what was run, where, from which sources, every sample."""
    vllm = find_vllm()
    return {
        "what": "time of a decode step with expert_load on over off, two servers, requests in turn",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": ["python", "benchmarks/serving/bench_expert_load.py", *sys.argv[1:]],
        **checkout(),
        "environment": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average_before": load_before,
            "system": platform.platform(),
            "python": platform.python_version(),
            "vllm": vllm.version if vllm else None,
            "packages": {name: metadata.version(name) for name in PACKAGES},
        },
        "workload": {
            "model": SHAPE | {"num_hidden_layers": options.layers, "dtype": "bfloat16", "weights": "dummy"},
            "compiled": not options.eager,
            "tokens": options.tokens,
            "rounds": options.rounds,
        },
        "goal_ratio": GOAL,
        "results": {str(batch): result(values) for batch, values in samples.items()},
    }


def result(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, the median ratio of the pairs with its interval, and the samples."""
    ratios = sorted(on / off for off, on in zip(samples["off"], samples["on"], strict=True))
    # Of n sorted values, those 0.98 sqrt(n) places from the middle bound the median with 95 % (normal approximation).
    reach = math.ceil(0.98 * math.sqrt(len(ratios)))
    middle = len(ratios) // 2
    return {
        "off_median_ms": 1e3 * statistics.median(samples["off"]),
        "on_median_ms": 1e3 * statistics.median(samples["on"]),
        "ratio_median": statistics.median(ratios),
        "ratio_interval_95": [ratios[max(0, middle - reach)], ratios[min(len(ratios) - 1, middle + reach)]],
        "off_s": samples["off"],
        "on_s": samples["on"],
    }


if __name__ == "__main__":
    sys.exit(main())
