"""Counts how often `bench` claims a difference between two servers of the same plan: it may in one run of 20.

Both servers of a pair are up at the same time, as `bench` has them where both fit, and are loaded in turns. A pair is
started anew after some runs: what differs between two starts of one plan is chance too.

Run it:  python benchmarks/serving/bench_same.py --write

The machine need not be quiet: both servers of a pair meet the same noise. The record is written after each run, and
says the load before it. With --resume the runs of this machine's latest record count too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, head, host, latest_record, packages, parser_of, write_record  # noqa: E402
from benchmarks.serving.plans import free_port, plan_here, vllm_version  # noqa: E402
from moe_optimizer.cli.main import main as moe_optimizer  # noqa: E402
from moe_optimizer.launcher.supervisor import Supervisor  # noqa: E402
from moe_optimizer.measure.bench.result import RESULT_FILE  # noqa: E402
from moe_optimizer.profiles import load_profile  # noqa: E402

MODEL = ROOT / "examples" / "tiny-moe"
READY_TIMEOUT_S = 900.0
SUBJECT = "same"
NO_DIFFERENCE = "no difference shown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and with --write store the record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--runs", type=int, default=40, help="runs of `bench` (default: 40)")
    parser.add_argument("--starts", type=int, default=8, help="pairs of servers to share them (default: 8)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each run (default: 5)")
    parser.add_argument("--clients", default="4", help="of the workload `small` (default: 4)")
    parser.add_argument("--minutes", type=float, default=600.0, help="no further run after so long (default: 600)")
    parser.add_argument("--resume", action="store_true", help="count the runs of this machine's latest record too")
    options = parser.parse_args(arguments)
    begin, share = time.monotonic(), -(-options.runs // options.starts)
    # Before the first record is written, which changes the checkout where git has an earlier one.
    first = head("bench of a plan against itself: runs that claim a difference", options.commit) | {
        "environment": host(os.getloadavg()[0]) | packages("torch") | {"vllm": vllm_version()},
        "model": MODEL.name,
        "repetitions": options.repetitions,
        "clients": options.clients,
    }
    runs = of_the_latest_record(first) if options.resume else []

    def more() -> bool:
        return len(runs) < options.runs and time.monotonic() - begin < options.minutes * 60

    while more():
        start = runs[-1]["start"] + 1 if runs else 0
        with tempfile.TemporaryDirectory() as folder, servers(Path(folder) / "servers") as urls:
            for number in range(share):
                if not more():
                    break
                # Each with its load: what else the machine does may change from run to run, and must not show.
                when = {"date": first["date"], "load_average_before": round(os.getloadavg()[0], 2)}
                run = measured(urls, Path(folder) / f"run-{number}", options)
                runs.append(run | when | {"start": start, "commit": first["commit"]})
                print(f"run {len(runs)} of {options.runs}: {shown(run)}", flush=True)
                if options.write:
                    write_record(first | summary(runs), cpu_slug(first["environment"]["cpu"]), SUBJECT)
    found = summary(runs)
    print(f"{found['without_a_difference']} of {len(runs)} runs show no difference; verdicts: {dict(found['words'])}")
    return 0


def of_the_latest_record(first: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of this machine's latest record; `first`: the head of the one that goes on.

    Raises:
        SystemExit: it measured something else.
    """
    record = latest_record(SUBJECT)
    if record is None:
        return []
    for key, there, here in (
        *((key, record[key], first[key]) for key in ("model", "repetitions", "clients")),
        *((key, record["environment"][key], first["environment"][key]) for key in ("torch", "vllm")),
    ):
        if there != here:
            raise SystemExit(f"--resume: {key}: the latest record has {there}, this run {here}")
    return list(record["runs"])


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a record says of its runs, with them; its commit too where they are of several."""
    several = {} if len({run["commit"] for run in runs}) == 1 else {"commit": None}  # named in the runs
    return several | {
        "words": Counter(each["verdict"] for run in runs for each in run["verdicts"]),
        "without_a_difference": sum(not claims(run) for run in runs),
        "runs": list(runs),
    }


@contextmanager
def servers(folder: Path) -> Iterator[list[str]]:
    """Start two servers of one plan, which differ in their ports; yield their URLs."""
    folder.mkdir()
    profile = load_profile("balanced")
    plans = [plan_here(MODEL, profile=profile, wishes={}, port=free_port(), batch_size=4) for _ in range(2)]
    with ExitStack() as started:
        runs = [Supervisor(plan, folder / str(number)) for number, plan in enumerate(plans)]
        for run in runs:
            started.enter_context(run.started())
        yield [run.wait_until_ready(READY_TIMEOUT_S).base_url for run in runs]


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
