"""Counts how often `bench` claims a difference between two servers of the same plan: it may in one run of 20.

Both servers of a pair are up at the same time, as `bench` has them where both fit, and are loaded in turns. A pair is
started anew after some runs: what differs between two starts of one plan is chance too.

Run it on a quiet machine:  python benchmarks/serving/bench_same.py --write
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here, vllm_version  # noqa: E402
from moe_optimizer.cli.main import main as moe_optimizer  # noqa: E402
from moe_optimizer.launcher.supervisor import Supervisor  # noqa: E402
from moe_optimizer.measure.bench.result import RESULT_FILE  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

MODEL = ROOT / "examples" / "tiny-moe"
READY_TIMEOUT_S = 900.0
NO_DIFFERENCE = "no difference shown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and with --write store the record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--runs", type=int, default=40, help="runs of `bench` (default: 40)")
    parser.add_argument("--starts", type=int, default=8, help="pairs of servers to share them (default: 8)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each run (default: 5)")
    parser.add_argument("--clients", default="4", help="of the workload `small` (default: 4)")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    runs: list[dict[str, Any]] = []
    digest = ""
    with tempfile.TemporaryDirectory() as folder:
        for start in range(options.starts):
            share = range(options.runs * start // options.starts, options.runs * (start + 1) // options.starts)
            with servers(Path(folder) / f"start-{start}") as (plan, urls):
                digest = plan.digest
                for number in share:
                    runs.append(measured(urls, Path(folder) / f"run-{number}", options) | {"start": start})
                    print(f"run {number + 1} of {options.runs}: {shown(runs[-1])}", flush=True)
    record = head("bench of a plan against itself: runs that claim a difference", options.commit) | {
        "environment": host(load_before) | packages("torch") | {"vllm": vllm_version()},
        "model": MODEL.name,
        "plan_digest": digest,
        "repetitions": options.repetitions,
        "clients": options.clients,
        "words": Counter(each["verdict"] for run in runs for each in run["verdicts"]),
        "without_a_difference": sum(not claims(run) for run in runs),
        "runs": runs,
    }
    print(f"{record['without_a_difference']} of {len(runs)} runs show no difference; verdicts: {dict(record['words'])}")
    if options.write:
        write_record(record, cpu_slug(record["environment"]["cpu"]), "same")
    return 0


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Plan, list[str]]]:
    """Start two servers of one plan, which differ in their ports."""
    folder.mkdir()
    profile = load_profile("balanced")
    plans = [plan_here(MODEL, profile=profile, wishes={}, port=free_port(), batch_size=4) for _ in range(2)]
    with ExitStack() as started:
        runs = [Supervisor(plan, folder / str(number)) for number, plan in enumerate(plans)]
        for run in runs:
            started.enter_context(run.started())
        yield plans[0], [run.wait_until_ready(READY_TIMEOUT_S).base_url for run in runs]


def measured(urls: Sequence[str], folder: Path, options: Any) -> dict[str, Any]:
    """Run `bench` once; return its verdicts."""
    code = moe_optimizer(
        [
            *("bench", str(MODEL), "--plan", urls[0], "--against", urls[1], "--run-dir", str(folder)),
            *("--workload", "small", "--clients", options.clients, "--repetitions", str(options.repetitions)),
        ]
    )
    assert code == 0, f"bench ended with {code}"
    found = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    return {"verdicts": found["verdicts"]}


def claims(run: dict[str, Any]) -> bool:
    """Return whether a run claims a difference anywhere."""
    return any(each["verdict"] != NO_DIFFERENCE for each in run["verdicts"])


def shown(run: dict[str, Any]) -> str:
    """Return the verdicts of a run in one line."""
    return ", ".join(f"{each['metric']} {each['ratio']:.3f} {each['verdict']}" for each in run["verdicts"])


if __name__ == "__main__":
    sys.exit(main())
