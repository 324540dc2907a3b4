"""How long the command line takes to answer: `--help`, `--dry-run` and `inspect`, each as a fresh process.

Every sample is one process from start to end, as a user waits for it; the variants are interleaved so that a
change of the machine's load touches all of them. The page cache is warm after the first, uncounted, round: reading
Python's files from a cold disk is the disk's time, not ours.

Run it on a quiet machine:  python benchmarks/cli_startup.py --write
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
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
}
GOALS_S = {"--help": 0.3, "--dry-run": 1.0}
PACKAGES = ("moe-optimizer", "typer", "rich", "pydantic", "PyYAML", "nvidia-ml-py", "huggingface_hub", "psutil")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and with --write store the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=21, help="processes per variant (default: 21)")
    parser.add_argument("--write", action="store_true", help=f"write a record to {RECORDS.relative_to(ROOT)}")
    options = parser.parse_args(arguments)

    load_before = os.getloadavg()[0]
    samples = measure(options.samples)
    record = make_record(samples, load_before=load_before)
    for name, result in record["results"].items():
        goal = f"  goal {result['goal_s']} s" if result["goal_s"] else ""
        print(f"{name:<32}  median {result['median_s'] * 1e3:6.1f} ms  max {result['max_s'] * 1e3:6.1f} ms{goal}")
    if options.write:
        path = RECORDS / f"{record['date']}_{_slug(record['environment']['cpu'])}_cli_startup.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def measure(count: int) -> dict[str, list[float]]:
    """Return `count` wall times in seconds for every variant, interleaved, after one uncounted round."""
    samples: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for round_idx in range(-1, count):
        for name, arguments in VARIANTS.items():
            start = time.perf_counter()
            # Warnings go to stderr; they are part of the work, not of this report.
            subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=True)
            if round_idx >= 0:
                samples[name].append(time.perf_counter() - start)
    return samples


def make_record(samples: dict[str, list[float]], *, load_before: float) -> dict[str, Any]:
    """Return the record: what was run, where, from which sources, every sample."""
    return {
        "what": "wall time of fresh command line processes, start to end, in seconds",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": ["python", "benchmarks/cli_startup.py", *sys.argv[1:]],
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "environment": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average_before": load_before,
            "system": platform.platform(),
            "python": platform.python_version(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
        },
        "results": {
            name: {
                "arguments": list(VARIANTS[name]),
                "goal_s": GOALS_S.get(name),
                "median_s": statistics.median(values),
                "min_s": min(values),
                "max_s": max(values),
                "samples_s": values,
            }
            for name, values in samples.items()
        },
    }


def _git(*arguments: str) -> str:
    shown = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return shown.stdout.strip()


def _cpu_name() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def _slug(name: str) -> str:
    """The processor's name for a file name: "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.0GHz" -> "xeon-platinum-8480c"."""
    plain = re.sub(r"\((?:R|TM)\)|\bIntel\b|\bAMD\b|\bCPU\b|@.*|\d+-Core Processor|Processor", " ", name, flags=re.I)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "cpu"


if __name__ == "__main__":
    sys.exit(main())
