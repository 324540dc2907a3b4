"""SIGKILL at random points of what writes files: nothing is left half-written, and the next run goes on.

    python benchmarks/soak/kills.py [--count 200] [--minutes 600] [--resume] [--write]

In a fixed order: planning into a run folder, calibration into the cache, the files of a run folder, those of the cache.
Each runs in a fork of one process that has imported what it needs, in the same folders, and is killed at a random
moment of what it took unharmed. Then every file that has its final name must be read by its own reader, no file may be
open to others, and the same work must end well in the same folders.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import checkout, cpu_name, cpu_slug, head, host, latest_record, parser_of, write_record  # noqa: E402
from moe_optimizer.cli.main import main as command  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.inspection.expert_load import read_expert_load  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import measured_dir, read_tables, write_tables  # noqa: E402
from moe_optimizer.launcher.run_folder import RunFolder  # noqa: E402
from moe_optimizer.launcher.start_up_progress import StartUpProgress  # noqa: E402
from moe_optimizer.plan.plan import Plan  # noqa: E402
from moe_optimizer.proof.record import PassProof, Proof, ProofWriter, read_proofs  # noqa: E402
from moe_optimizer.proof.step_count import StepCount  # noqa: E402
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad  # noqa: E402

MODEL = ROOT / "examples" / "tiny-moe"
_ORDER = ("planning", "run folder", "cache", "calibration", "planning", "run folder", "cache", "run folder", "cache")
"""Calibration is the rarest: it takes most of the time and writes one file."""
_REPEATS = 30
"""Times a fork writes its files, for those that are written faster than a kill can be aimed at."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Kill, look, go on; print the counts and with --write store a record.

    Raises:
        AssertionError: a file was half-written, or the work did not go on.
    """
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, default=600.0, help="no further kill after so long")
    parser.add_argument("--resume", action="store_true", help="count those of the latest record of this machine too")
    args = parser.parse_args(arguments)
    load_before, choice, begin = os.getloadavg()[0], random.Random(args.seed), time.monotonic()
    earlier = latest_record("soak_kills") if args.resume else None
    before: dict[str, Any] = {} if earlier is None else earlier
    killed, unharmed = Counter[str](before.get("killed", {})), Counter[str](before.get("ended_before", {}))
    checked, done_before = before.get("files_read_back", 0), killed.total()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        run = Path(folder) / "run"
        works: dict[str, Callable[[], None]] = {
            "planning": lambda: _plan(run), "calibration": _calibrate,
            "run folder": lambda: _write_run(run), "cache": lambda: _write_cache(run),
        }  # fmt: skip
        seconds = {}
        for name, work in works.items():
            started = time.monotonic()
            assert _forked(work, None) == 0, f"{name} does not end well unharmed"
            seconds[name] = time.monotonic() - started
        for number in itertools.count():
            if killed.total() >= args.count or time.monotonic() - begin > args.minutes * 60:
                break
            name = _ORDER[number % len(_ORDER)]
            if name == "calibration":
                for table in measured_dir().glob("*.json"):
                    table.unlink()  # otherwise nothing is left to measure
            status = _forked(works[name], choice.uniform(0, seconds[name]))
            (killed if status == -signal.SIGKILL else unharmed)[name] += 1
            assert status in (0, -signal.SIGKILL), f"{name} ended with {status}"
            checked += _all_whole(Path(folder))
            if number % len(_ORDER) == len(_ORDER) - 1:
                print(f"{sum(killed.values())} killed", file=sys.stderr, flush=True)
                for each, work in works.items():
                    assert each == "calibration" or _forked(work, None) == 0, f"{each} does not go on after a kill"
        assert _forked(_calibrate, None) == 0, "calibration does not go on after a kill"
    this = {"commit": checkout(args.commit)["commit"], "seed": args.seed, "kills": killed.total() - done_before}
    found = {
        "runs": [*runs_of(earlier), this],
        "kills": killed.total(),
        "killed": dict(killed),
        "ended_before": dict(unharmed),
        "seconds_unharmed": {name: round(took, 2) for name, took in seconds.items()},
        "files_read_back": checked,
        "half_written": 0,
    }
    print(json.dumps(found, indent=1))
    if args.write:
        record = {**head("SIGKILL while files are written", args.commit), "environment": host(load_before), **found}
        if len({each["commit"] for each in found["runs"]}) > 1:
            record["commit"] = None  # named in the runs
        write_record(record, cpu_slug(cpu_name()), "soak_kills")
    return found


def runs_of(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the runs that made a record; an early one is of one run and names it itself."""
    if record is None:
        return []
    return record.get("runs") or [{name: record[name] for name in ("commit", "seed", "kills")}]


def _forked(work: Callable[[], None], kill_after_s: float | None) -> int:
    """Return how a fork that does the work ended: its exit code, or the negative number of the signal."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        code = 1
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                work()
            code = 0
        except BaseException as error:  # noqa: BLE001 - the fork must not go on as this program
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _plan(run: Path) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = command(["plan", "--model", str(MODEL), "--json"], program="moe-optimizer")
    assert code == 0, out.getvalue()
    folder = RunFolder(run)
    plan = Plan.from_json(out.getvalue(), origin="plan")
    with folder.locked():
        folder.prepare(plan)


def _calibrate() -> None:
    code = command(["measure", "speeds", str(MODEL), "--budget", "1", "--json"], program="moe-optimizer")
    assert code == 0, code


def _write_run(run: Path) -> None:
    folder = RunFolder(run)
    plan = Plan.load(folder.plan_path)
    for number in range(_REPEATS):
        with folder.locked():
            folder.prepare(plan, restarts=number % 2)
            folder.set_warming(warming=True)
            proof = Proof(role="worker", rank=0, pid=os.getpid(), plan_digest=plan.digest, versions={}, model_rank=0)
            proof.passes["flash_dmoe"] = PassProof(requested="x" * 20_000)
            ProofWriter(run, proof).write()
            StepCount(run, proof).step()
            folder.set_warming(warming=False)


def _write_cache(run: Path) -> None:
    plan = Plan.load(run / "plan.json")
    tables = [path for path in measured_dir().glob("*.json") if path.is_file()]
    load = ExpertLoad(
        model="m",
        num_experts=4_000,
        layers=(LayerLoad(index=0, name="0", tokens=(7,) * 4_000),),
        since="2026-01-01T00:00:00+00:00",
        steps=1,
    )
    for _ in range(_REPEATS):
        StartUpProgress(plan, run / "server.log", _say_nothing).ended()
        for table in tables:
            write_tables(table, read_tables(table))
        write_atomically(run / "expert_load.json", load.to_json())


def _say_nothing(_line: str) -> None:
    pass


def _all_whole(folder: Path) -> int:
    """Read every file that has its final name with its own reader; return how many there were."""
    run, count = folder / "run", 0
    if (run / "plan.json").exists():
        Plan.load(run / "plan.json")
    read_proofs(run)
    if (run / "expert_load.json").exists():
        read_expert_load(run / "expert_load.json")
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert not mode & 0o077, f"{path.name} has mode {mode:o}"
        if path.is_file() and not path.name.startswith("."):
            count += 1
            if path.suffix == ".seconds":
                float(path.read_text(encoding="ascii"))
            elif "kernel_speeds" in path.parts and path.suffix == ".json":
                read_tables(path)
    return count


if __name__ == "__main__":
    main()
