"""Measures how long placing experts takes and how even the result is: our solver and vLLM's default EPLB policy.

Both sides run in one process on one core, in pairs, on the same loads: `anew` without an earlier placement, `moved`
after the load has changed, with the earlier placement as vLLM's EPLB gives it each time. Times are CPU times of the
process, so that other work on the machine disturbs them less; neither side uses threads.

Run it:  python benchmarks/bench_placement.py --write
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402
from moe_optimizer.placement import imbalance, moves, place_experts  # noqa: E402


@dataclass(frozen=True)
class Size:
    """One model on one installation."""

    experts: int
    layers: int
    ranks: int
    replicas: int
    nodes: int = 1
    groups: int = 1

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes, {self.groups} groups" if self.nodes > 1 else ""
        return f"{self.experts} x {self.layers}, {self.ranks} ranks, {self.replicas} replicas{nodes}"

    @property
    def work(self) -> float:
        """Layers times E log E."""
        return self.layers * self.experts * math.log2(self.experts)


SIZES = (
    Size(256, 61, 64, 256),
    Size(256, 61, 64, 320),
    Size(256, 61, 32, 288),
    Size(256, 61, 64, 320, nodes=8, groups=8),
    Size(128, 48, 8, 128),
    Size(1024, 96, 512, 1024),
    Size(1024, 96, 512, 1536),
)
GROWTH = tuple(Size(experts, 96, experts // 2, experts * 3 // 2) for experts in (64, 128, 256, 512, 1024))
"""The same layers, two experts and one more replica for each rank: only E changes."""
CHANGE = 0.2
"""Standard deviation of the logarithm by which loads change."""
LOADS: dict[str, Callable[[np.random.Generator, Size], np.ndarray]] = {
    "zipf": lambda rng, size: np.stack(
        [rng.permutation(1e6 / np.arange(1, size.experts + 1)) for _ in range(size.layers)]
    ),
    "log-normal": lambda rng, size: 1000 * rng.lognormal(0, 1, (size.layers, size.experts)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, and with --write store the record."""
    parser = parser_of(__doc__, write=True)
    parser.add_argument("--samples", type=int, default=15, help="pairs of calls per case (default: 15)")
    options = parser.parse_args(arguments)

    load_before = os.getloadavg()[0]
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    cases = [measure(size, name, options.samples) for size in SIZES for name in LOADS]
    growth = [measure_growth(size, options.samples) for size in GROWTH]
    for case in cases:
        anew, moved = case["anew"], case["moved"]
        print(
            f"{case['size']:<42} {case['load']:<10} "
            f"anew {anew['ours_ms']['median']:6.2f} ms {in_words(anew)} "
            f"imbalance {anew['ours_imbalance']:.4f} {anew['theirs_imbalance']:.4f}  "
            f"moved {moved['ours_ms']['median']:6.2f} ms {in_words(moved)} "
            f"moves {moved['ours_moves']} {moved['theirs_moves']}"
        )
    for case in growth:
        units = ", ".join(
            f"{name} {case[name]['ms']['median']:7.2f} ms, {case[name]['ns_per_layer_e_log_e']:5.1f} ns a unit"
            for name in ("anew", "moved")
        )
        print(f"E {case['experts']:>5}: {units}")
    if options.write:
        record = make_record(cases, growth, load_before=load_before)
        write_record(record, cpu_slug(record["environment"]["cpu"]), "placement")
    return 0


def measure(size: Size, load_name: str, samples: int) -> dict[str, Any]:
    """Return times, balance and moves of both sides for one size and kind of load."""
    rng = np.random.default_rng(0)
    load = LOADS[load_name](rng, size)
    changed = load * rng.lognormal(0, CHANGE, load.shape)
    sides = {"ours": place_experts_at(size), "theirs": default_placement_at(size)}
    first = {name: place(load, None) for name, place in sides.items()}
    return {
        "size": str(size),
        "load": load_name,
        "anew": _compared(size, load, {name: Side(place, None, first[name]) for name, place in sides.items()}, samples),
        "moved": _compared(
            size, changed, {name: Side(place, first[name], first[name]) for name, place in sides.items()}, samples
        ),
    }


Place = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class Side:
    """One of the two solvers, and what it is given."""

    place: Place
    previous: np.ndarray | None
    first: np.ndarray
    """Moves are counted from here."""


def place_experts_at(size: Size) -> Place:
    """Return our solver for this size."""
    return lambda load, previous: place_experts(
        load, size.ranks, size.replicas, size.nodes, size.groups, previous=previous
    )


def default_placement_at(size: Size) -> Place:
    """Return vLLM's default policy for this size; tensors are made outside of its time in `_time`."""
    import torch

    from tests.unit.placement.deepseek import default_policy

    policy = default_policy()

    def place(load: np.ndarray, previous: np.ndarray | None) -> np.ndarray:
        old = None if previous is None else torch.from_numpy(previous)
        return policy.rebalance_experts(
            torch.from_numpy(load), size.replicas, size.groups, size.nodes, size.ranks, old
        ).numpy()

    return place


def _compared(size: Size, load: np.ndarray, sides: dict[str, Side], samples: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    placed: dict[str, np.ndarray] = {}
    for _ in range(samples):
        for name, side in sides.items():
            start = time.process_time()
            placed[name] = side.place(load, side.previous)
            times[name].append((time.process_time() - start) * 1e3)
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["theirs"], strict=True)]
    result: dict[str, Any] = {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    for name, each in times.items():
        result[f"{name}_ms"] = spread(each)
        result[f"{name}_imbalance"] = imbalance(load, placed[name], size.ranks)
        result[f"{name}_moves"] = moves(sides[name].first, placed[name], size.ranks)
    return result


def in_words(compared: dict[str, Any]) -> str:
    """Return the ratio of a pair's times as "1/12.3 (11.0 to 12.9)"."""
    return f"1/{compared['ratio']:.1f} ({compared['lowest']:.1f} to {compared['highest']:.1f})"


def spread(times_ms: list[float]) -> dict[str, Any]:
    """Return samples with their median and minimum."""
    return {"median": statistics.median(times_ms), "min": min(times_ms), "samples": times_ms}


def measure_growth(size: Size, samples: int) -> dict[str, Any]:
    """Return our times for one size, and the time for each unit of layers * E log E."""
    rng = np.random.default_rng(0)
    load = LOADS["log-normal"](rng, size)
    changed = load * rng.lognormal(0, CHANGE, load.shape)
    place = place_experts_at(size)
    first = place(load, None)
    result: dict[str, Any] = {"experts": size.experts, "size": str(size)}
    for name, given, previous in (("anew", load, None), ("moved", changed, first)):
        times = []
        for _ in range(samples):
            start = time.process_time()
            place(given, previous)
            times.append((time.process_time() - start) * 1e3)
        each = spread(times)
        result[name] = {"ms": each, "ns_per_layer_e_log_e": each["median"] * 1e6 / size.work}
    return result


def make_record(cases: list[dict[str, Any]], growth: list[dict[str, Any]], *, load_before: float) -> dict[str, Any]:
    """Return the record: where, with what, every sample."""
    from benchmarks.serving.plans import vllm_version

    return {
        **head("placing experts: our solver and vLLM's default EPLB policy"),
        # This process is pinned to one of the cores.
        "environment": {
            **host(load_before),
            "cores": os.cpu_count(),
            "packages": packages("numpy", "torch"),
            "vllm": vllm_version(),
        },
        "clock": "CPU time of the process, pinned to one core; ratios are of the two calls of a pair",
        "workload": f"loads from numpy's default_rng(0); changed: times log-normal(0, {CHANGE})",
        "results": {"cases": cases, "growth": growth},
    }


if __name__ == "__main__":
    sys.exit(main())
