"""Measures what counting tokens per expert costs: the time of a decode step with expert_load on and off.

Two servers run side by side, alike but for the pass, with made-up weights and layers of Qwen3-30B-A3B's shape: few of
them on the CPU, where each step's fixed cost then weighs more than in the whole model; all 48 on a GPU, which both
servers share. The same requests go to each in turn, and the order changes in every round, so that a change of the
machine's load touches both. A sample is the time between two tokens of a request. Quantiles of all samples are
compared, with the 95 % interval of their ratio (bootstrap over rounds). Other work on the machine only ever adds time,
so on a busy machine the low quantile says most.

On the CPU it also measures the added work by itself: microseconds for each layer and each step, plain and compiled,
without a server.

Run it on a quiet machine:  python benchmarks/serving/bench_expert_load.py --write
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, gpu_environment, head, host, packages, parser_of, write_record  # noqa: E402
from benchmarks.serving.counting_work import added_shares, added_work  # noqa: E402
from benchmarks.serving.decode_steps import (  # noqa: E402
    Rounds,
    measure_in_turn,
    quantile_of,
    quantiles,
    whole_microseconds,
)
from benchmarks.serving.dummy_model import write_dummy_model  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here, vllm_version  # noqa: E402
from moe_optimizer.inspection.hardware_probe import probe_hardware  # noqa: E402
from moe_optimizer.inspection.vllm_installation import find_vllm  # noqa: E402
from moe_optimizer.launcher.launch import ServerInfo  # noqa: E402
from moe_optimizer.launcher.supervisor import Supervisor  # noqa: E402
from moe_optimizer.plan.decision import Wish  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402

SHAPE = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
"""Qwen3-30B-A3B, from its config.json."""
READY_TIMEOUT_S = 600.0
GOAL = 1.01
GPU_SHARE = 0.46
"""Of the memory, for each of the two servers."""
GPU_CACHE = "2G"
"""Stated: vLLM would measure what is free, while the other server takes memory and gives some back."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--layers", type=int, help="MoE layers of the model (default: 2 on the CPU, 48 on a GPU)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at the same time")
    parser.add_argument("--rounds", type=int, default=40, help="rounds for each batch size (default: 40)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a request (default: 32)")
    parser.add_argument("--eager", action="store_true", help="without vLLM's compilation")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    options = parser.parse_args(arguments)
    gpu = on_gpu()
    options.layers = options.layers or (48 if gpu else 2)

    load_before = os.getloadavg()[0]
    alone = {
        batch: None if gpu else added_work(batch, num_experts=SHAPE["num_experts"], top_k=SHAPE["num_experts_per_tok"])
        for batch in options.batch
    }
    with tempfile.TemporaryDirectory() as folder:
        model = write_dummy_model(Path(folder) / "model", SHAPE | {"num_hidden_layers": options.layers})
        with servers(model, Path(folder), eager=options.eager) as (off, on):
            samples = {
                batch: measure_in_turn(off, on, batch=batch, tokens=options.tokens, rounds=options.rounds)
                for batch in options.batch
            }
    record = make_record(samples, alone, options, load_before=load_before)
    show(record["results"], options.layers)
    if options.out:
        options.out.write_text(json.dumps(record) + "\n")
    if options.write:
        subject = "expert_load_eager" if options.eager else "expert_load"
        write_record(record, cpu_slug(record["environment"]["cpu"]), subject)
    return 0


def show(results: dict[str, Any], layers: int) -> None:
    """Print the table of all batch sizes."""
    for batch, result in results.items():
        print(f"batch {batch}, {layers} layers")
        for name, row in result["quantiles"].items():
            low, high = row["ratio_interval_95"]
            times = f"{row['off_ms']:8.3f} ms off, {row['on_ms']:8.3f} ms on"
            print(f"  {name:>4} of the steps: {times}, on / off {row['ratio']:.4f} ({low:.4f} to {high:.4f})")
        work = result["added_work"]
        if work is None:
            continue
        print(
            f"  by itself: {work['layer_us_compiled']:.1f} us a layer compiled, {work['layer_us_plain']:.1f} us plain, "
            f"{work['step_us']:.1f} us a step; compiled {work['share_compiled']:.2%} of a step, "
            f"plain {work['share_plain']:.2%}"
        )


@contextlib.contextmanager
def servers(model: Path, folder: Path, *, eager: bool) -> Iterator[tuple[ServerInfo, ServerInfo]]:
    """Run a server without and one with the pass; both have shown that everything else that was planned runs.

    They start at the same time, which takes half as long.
    """
    runs = []
    with contextlib.ExitStack() as started:
        for name, required in (("off", frozenset()), ("on", frozenset({"expert_load"}))):
            plan = plan_of(model, counting=name == "on", eager=eager)
            runs.append(Supervisor(plan, folder / name, require=required))
            started.enter_context(runs[-1].started())
        off, on = (run.wait_until_ready(READY_TIMEOUT_S) for run in runs)
        yield off, on


def plan_of(model: Path, *, counting: bool, eager: bool) -> Plan:
    """Return the balanced profile's plan for `model` on this machine, with or without the pass."""
    return plan_here(
        model,
        *("--load-format", "dummy"),
        *(("--enforce-eager",) if eager else ()),
        *(("--gpu-memory-utilization", str(GPU_SHARE), "--kv-cache-memory-bytes", GPU_CACHE) if on_gpu() else ()),
        wishes={"expert_load": (Wish.ON if counting else Wish.OFF, "benchmark")},
        dtype="bfloat16",
        port=free_port(),
        max_model_len=512,
        batch_size=16,
    )


def on_gpu() -> bool:
    """Return whether vLLM serves on a GPU here."""
    vllm = find_vllm()
    return vllm is not None and vllm.device == "cuda"


def make_record(
    samples: dict[int, dict[str, Rounds]],
    alone: dict[int, dict[str, float] | None],
    options: argparse.Namespace,
    *,
    load_before: float,
) -> dict[str, Any]:
    """Return the record: what was run, where, from which sources, every sample."""
    return {
        **head("time of a decode step with expert_load on over off, two servers, requests in turn", options.commit),
        "environment": {
            **host(load_before),
            **({} if gpu_name() is None else gpu_environment()),
            "vllm": vllm_version(),
            "packages": packages("moe-optimizer", "torch"),
        },
        "workload": {
            "model": SHAPE | {"num_hidden_layers": options.layers, "dtype": "bfloat16", "weights": "dummy"},
            "compiled": not options.eager,
            "tokens": options.tokens,
            "rounds": options.rounds,
        },
        "goal_ratio": GOAL,
        "results": {
            str(batch): {
                "quantiles": quantiles(values),
                "added_work": added_shares(alone[batch], options.layers, quantile_of(values["off"], 0.1)),
                "off_us": whole_microseconds(values["off"]),
                "on_us": whole_microseconds(values["on"]),
            }
            for batch, values in samples.items()
        },
    }


def gpu_name() -> str | None:
    """Return the GPU that the servers run on; None on the CPU."""
    gpu = probe_hardware().gpu
    return gpu.name if gpu is not None and on_gpu() else None


if __name__ == "__main__":
    sys.exit(main())
