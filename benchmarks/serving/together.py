"""Starts several planned servers on the same GPUs at once, and loads one after the other.

    python benchmarks/serving/together.py FOLDER --tokenizer MODEL --workload FILE --repetitions N PLAN.json...

For bench_layouts.py; bench_beside.py starts its servers by `started` too. FOLDER gets what `moe-optimizer bench` leaves
of a run: the samples of each side, in the order of the plans, and the facts of each start. That command starts two
servers one after the other, each ready as fast as it can be, and warmed up for all that traffic can bring. Here time is
short, and the uncounted round of each load is all the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_optimizer.errors import MoeOptimizerError  # noqa: E402
from moe_optimizer.launcher.compile_caches import graph_cache  # noqa: E402
from moe_optimizer.launcher.warm_up import DEFAULT_LIMIT_S  # noqa: E402
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
    request.claim_folder()
    failed: dict[str, str] = {}
    with started(request.sides, options.folder, request.ready_timeout_s, failed, warm_up_s=0.0) as up:
        if failed:
            raise SystemExit("\n".join(f"{name}: {why}" for name, why in failed.items()))

        @contextlib.contextmanager
        def is_up(side: Side, **_how: object) -> Iterator[Callable[[], RunningSide]]:
            yield lambda: up[side.name]

        measure_sides(
            request,
            on_step=lambda share, text: print(f"{share:4.0%}  {text}", file=sys.stderr, flush=True),
            handling=Handling(start=is_up, stays=True),
        )
    return 0


@contextlib.contextmanager
def started(
    sides: Sequence[Side],
    folder: Path,
    timeout_s: float,
    failed: dict[str, str],
    *,
    warm_up_s: float = DEFAULT_LIMIT_S,
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Iterator[dict[str, RunningSide]]:
    """Start all sides at the same time, yield those that answer by name, and stop them together.

    Each has a folder of its own for compiled graphs: see `graph_cache`.

    Args:
        sides, timeout_s: what to start, and how long that may take.
        folder: gets their run folders.
        failed: gets the name of each side that did not start, and why.
        warm_up_s: the most seconds of our warm-up.
        environments: variables of a side's own, by its name.
    """
    up: dict[str, RunningSide] = {}
    with contextlib.ExitStack() as stack:
        waits = {}
        for side in sides:
            own = environments.get(side.name, {})
            with changed_environment(graph_cache(side.name, os.environ) | dict(own)):
                waits[side.name] = stack.enter_context(
                    starting(side, run_dir=folder / side.name, ready_timeout_s=timeout_s, warm_up_s=warm_up_s)
                )
        for name, wait in waits.items():
            try:
                up[name] = wait()
                print(f"{name}: ready after {up[name].ready_s:.0f} s", flush=True)
            except MoeOptimizerError as error:
                failed[name] = str(error)
                print(f"{name}: {error}", flush=True)
        yield up
        for each in up.values():
            each.ask_to_stop()


if __name__ == "__main__":
    sys.exit(main())
