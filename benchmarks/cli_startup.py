"""Measures how long the command line takes to answer: `--help`, `--dry-run`, `inspect`, and the embedded engine's first
token of the bundled model, as `make demo` begins. Each is a fresh process.

Every sample is one process from start to end, as a user waits for it; the variants are interleaved so that a
change of the machine's load touches all of them. The page cache is warm after the first, uncounted, round: reading
Python's files from a cold disk is the disk's time, not ours.

Run it on a quiet machine:  python benchmarks/cli_startup.py --write
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402

VARIANTS: dict[str, tuple[str, ...]] = {
    "interpreter alone": ("-c", "pass"),
    "--help": ("run_optimizer.py", "--help"),
    "--dry-run": ("run_optimizer.py", "--model", "examples/tiny-moe", "--dry-run"),
    "--dry-run --json": ("run_optimizer.py", "--model", "examples/tiny-moe", "--dry-run", "--json"),
    "--dry-run --hardware h100_sxm": (
        *("run_optimizer.py", "--model", "examples/tiny-moe"),
        *("--dry-run", "--hardware", "h100_sxm", "--gpus", "1"),
    ),
    "inspect": ("-m", "moe_optimizer", "inspect", "examples/tiny-moe"),
    "first token, embedded engine": (
        *("examples/offline.py", "--model", "examples/tiny-moe"),
        *("--temperature", "0", "--max-tokens", "1", "def __init__(self, name):"),
    ),
}
GOALS_S = {"--help": 0.3, "--dry-run": 1.0, "first token, embedded engine": 10.0}
PACKAGES = (
    "moe-optimizer",
    "torch",
    "transformers",
    "typer",
    "rich",
    "pydantic",
    "PyYAML",
    "nvidia-ml-py",
    "huggingface_hub",
    "psutil",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    parser = parser_of(__doc__, write=True)
    parser.add_argument("--samples", type=int, default=21, help="processes per variant (default: 21)")
    options = parser.parse_args(arguments)

    load_before = os.getloadavg()[0]
    samples = measure(options.samples)
    record = make_record(samples, load_before=load_before)
    for name, result in record["results"].items():
        times = f"wall median {result['median_s'] * 1e3:6.1f} ms, max {result['max_s'] * 1e3:6.1f} ms"
        goal = f", goal {result['goal_s']} s" if result["goal_s"] else ""
        print(f"{name:<30}  {times}; cpu median {result['cpu_median_s'] * 1e3:6.1f} ms{goal}")
    if options.write:
        write_record(record, cpu_slug(record["environment"]["cpu"]), "cli_startup")
    return 0


@dataclass(frozen=True)
class Sample:
    """One process from start to end."""

    wall_s: float
    cpu_s: float
    """User and system time: what the process took, however busy the machine was with others."""


def measure(count: int) -> dict[str, list[Sample]]:
    """Return `count` samples for every variant, interleaved, after one uncounted round."""
    samples: dict[str, list[Sample]] = {name: [] for name in VARIANTS}
    for round_idx in range(-1, count):
        for name, arguments in VARIANTS.items():
            sample = _run(arguments)
            if round_idx >= 0:
                samples[name].append(sample)
    return samples


def _run(arguments: Sequence[str]) -> Sample:
    start = time.perf_counter()
    # Warnings go to stderr; they are part of the work, not of this report.
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, list(arguments))
    return Sample(wall_s, usage.ru_utime + usage.ru_stime)


def make_record(samples: dict[str, list[Sample]], *, load_before: float) -> dict[str, Any]:
    """Return the record: what was run, where, from which sources, every sample."""
    return {
        **head("wall and CPU time of fresh command line processes, start to end, in seconds"),
        "environment": {**host(load_before), "niceness": os.nice(0), "packages": packages(*PACKAGES)},
        "results": {
            name: {
                "arguments": list(VARIANTS[name]),
                "goal_s": GOALS_S.get(name),
                "median_s": statistics.median(sample.wall_s for sample in values),
                "min_s": min(sample.wall_s for sample in values),
                "max_s": max(sample.wall_s for sample in values),
                "samples_s": [sample.wall_s for sample in values],
                "cpu_median_s": statistics.median(sample.cpu_s for sample in values),
                "cpu_samples_s": [sample.cpu_s for sample in values],
            }
            for name, values in samples.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
