"""Starts several planned servers on the same GPUs at once, and loads one after the other (for bench_layouts.py).

    python benchmarks/serving/together.py FOLDER --tokenizer MODEL --workload FILE --repetitions N PLAN.json...

FOLDER gets what `moe-optimizer bench` leaves of a run: the samples of each side, in the order of the plans, and the
facts of each start. That command starts two servers one after the other, each ready as fast as it can be, and warmed up
for all that traffic can bring. Here time is short, and the uncounted round of each load is all the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_optimizer.launcher.compile_caches import graph_cache  # noqa: E402
from moe_optimizer.measure.bench.request import BenchRequest  # noqa: E402
from moe_optimizer.measure.bench.result import Limits  # noqa: E402
from moe_optimizer.measure.bench.run import Handling, measure_sides  # noqa: E402
from moe_optimizer.measure.bench.side import RunningSide, Side, starting  # noqa: E402
from moe_optimizer.measure.bench.workload import load_workload  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.process_environment import changed_environment  # noqa: E402


def main() -> int:
    """Measure, and leave the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    options = parser.parse_args()
    request = BenchRequest(
        command=tuple(sys.argv),
        sides=tuple(Side(name=path.stem, plan=Plan.load(path)) for path in options.plans),
        workload_name=options.workload,
        workload=load_workload(options.workload),
        repetitions=options.repetitions,
        limits=Limits(),
        folder=options.folder,
        tokenizer=options.tokenizer,
        trust_remote_code=False,
        ready_timeout_s=3600.0,
    )
    if not request.side_by_side:
        raise SystemExit("the servers do not fit beside each other: their shares of the memory are more than all of it")
    measure_sides(
        request,
        on_step=lambda share, text: print(f"{share:4.0%}  {text}", file=sys.stderr, flush=True),
        handling=Handling(start=start_apart, at_once=True),
    )
    return 0


@contextlib.contextmanager
def start_apart(side: Side, *, run_dir: Path, ready_timeout_s: float) -> Iterator[Callable[[], RunningSide]]:
    """Start a server without our warm-up, with a folder of its own for compiled graphs: see `graph_cache`."""
    with changed_environment(graph_cache(side.name, os.environ)):
        starts = starting(side, run_dir=run_dir, ready_timeout_s=ready_timeout_s, warm_up_s=0.0)
        stack = contextlib.ExitStack()
        wait = stack.enter_context(starts)
    with stack:
        yield wait


if __name__ == "__main__":
    sys.exit(main())
