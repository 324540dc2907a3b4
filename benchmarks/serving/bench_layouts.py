"""Measures one model in several layouts over the GPUs of a machine.

    python benchmarks/serving/bench_layouts.py --model DIR --out FILE [--layouts tp2+tp1dp2ep,tp1x2,tp2ep]
        [--clients 1,16,128,512] [--total-s 540] [-- further vllm serve arguments]
    python benchmarks/serving/bench_layouts.py --shape mixtral --out FILE
    python benchmarks/serving/bench_layouts.py --model DIR --dry-run h100_sxm

--shape takes a published configuration (tests/data/model_configs) with random weights instead of a model's folder.

Layouts joined by + are started at once on the same GPUs, each with an equal share of their memory (with the shares of
`tp1x2:0.6+tp2:0.3`), and then loaded in turns; groups follow each other. Arguments after a layout are its own:
"tp4+tp4 --api-server-count 4". The record is written after each load: a run that is cut or killed keeps what it has, of
layouts that failed or took too long the loads that they answered. SIGTERM is the end of its time. The same command
with the same file measures what is missing: layouts and loads without all of their rounds. --dry-run starts nothing: it
prints what would run, and what the plan predicts. What did not start at once with others starts again alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import gpu_environment, head, parser_of  # noqa: E402
from benchmarks.serving.dummy_model import published_shapes, write_published_shape  # noqa: E402
from benchmarks.serving.layout_entries import Entry, foresee, groups, most_clients, write_plan  # noqa: E402
from moe_optimizer.files import write_atomically  # noqa: E402
from moe_optimizer.measure.bench.result import Limits, load_result  # noqa: E402
from moe_optimizer.measure.bench.samples import read_samples  # noqa: E402
from moe_optimizer.measure.bench.schedule import Turn  # noqa: E402
from moe_optimizer.measure.bench.side import start_path  # noqa: E402
from moe_optimizer.measure.bench.trace import loads_of  # noqa: E402
from moe_optimizer.measure.bench.workload import load_workload  # noqa: E402
from moe_optimizer.plan.json_codec import encode  # noqa: E402
from moe_optimizer.server_processes import kill_members  # noqa: E402

TOGETHER = Path(__file__).with_name("together.py")
LEAST_S = 160.0
"""With less time left no layout is started: a start takes 60 to 100 s, and the loads some."""
STOP_S = 40.0
"""For `moe-optimizer bench` to stop its servers, before everything is killed."""
LOOK_S = 2.0
"""Between two looks at what was measured so far."""


def main() -> int:
    """Measure each layout and write the record."""
    parser = parser_of(__doc__, commit=True)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model")
    model.add_argument(
        "--shape", choices=published_shapes(), metavar="NAME", help="a published one, for example mixtral"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layouts", default="tp2+tp1dp2ep,tp1x2,tp2ep")
    parser.add_argument("--clients", default="1,16,128,512")
    parser.add_argument("--profile", default="conservative", help="default: conservative, vLLM's own kernels")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--requests-per-client", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--layout-s", type=float, default=300, help="for one group, start and stop included")
    parser.add_argument("--total-s", type=float, default=3600, help="for all; what does not fit is left out")
    parser.add_argument("--dry-run", metavar="HARDWARE", help="start nothing; predict for this entry of the catalog")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, vllm_args = parser.parse_args(sys.argv[1:at]), sys.argv[at:]
    if options.out is None and not options.dry_run:
        parser.error("--out: expected a file for the record")
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        if options.shape:
            options.model = str(write_published_shape(Path(folder) / options.shape, options.shape))
            vllm_args = [*(vllm_args or ["--"]), "--load-format", "dummy"]
        return foreseen(options, vllm_args) if options.dry_run else recorded(options, vllm_args)


def foreseen(options: Any, vllm_args: list[str]) -> int:
    """Print what would run."""
    for entry in itertools.chain.from_iterable(groups(options.layouts, options.port)):
        foresee(entry, options, vllm_args)
    return 0


def recorded(options: Any, vllm_args: list[str]) -> int:
    """Measure what the record does not have yet."""
    end = time.monotonic() + options.total_s
    record = begun(options)
    waiting, layouts = groups(options.layouts, options.port), record["layouts"]
    asked_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())
    while waiting and not asked_to_end.is_set():
        group = waiting.pop(0)
        lacking = {each: missing(layouts.get(each.name, {}), options) for each in group}
        todo = [each for each in group if lacking[each]]
        if todo:
            clients = [each for each in clients_of(options) if any(each in lacking[entry] for entry in todo)]
            earlier = dict(layouts)

            def keep(found: dict[str, dict[str, Any]], earlier: dict[str, Any] = earlier) -> None:
                for name, of_start in found.items():
                    layouts[name] = together_with(earlier.get(name, {}), of_start, options)
                write_atomically(options.out, json.dumps(record, indent=1) + "\n")

            keep(measured(todo, clients, options, vllm_args, end=end, keep=keep, asked_to_end=asked_to_end))
        for each in todo:
            show(each.name, layouts[each.name])
        if len(todo) > 1 and not any(layouts[each.name]["loads"] for each in todo):
            # One that does not start takes the others with it.
            waiting = [*([each] for each in todo), *waiting]
    return int(any(missing(found, options) for found in layouts.values()))


def clients_of(options: Any) -> list[int]:
    """Return the numbers of clients that are asked for."""
    return list(map(int, options.clients.split(",")))


def missing(found: dict[str, Any], options: Any) -> list[int]:
    """Return the numbers of clients of which a layout does not have all rounds."""
    rounds = {load["clients"]: load["rounds"] for load in found.get("loads", ())}
    return [each for each in clients_of(options) if rounds.get(each, 0) < options.repetitions]


def together_with(earlier: dict[str, Any], found: dict[str, Any], options: Any) -> dict[str, Any]:
    """Return what a start found, with the loads of which an earlier one has more rounds.

    Why a start ended is no error where nothing is missing: its time may be over while the servers stop.
    """
    new = {load["clients"]: load for load in found["loads"]}
    kept = {
        load["clients"]: load
        for load in earlier.get("loads", ())
        if load["rounds"] > new.get(load["clients"], {"rounds": 0})["rounds"]
    }
    loads = new | kept
    both = found | {"loads": [loads[each] for each in clients_of(options) if each in loads]}
    if kept:
        both["clients_of_earlier_starts"] = sorted(kept)
    if not missing(both, options):
        both = {key: value for key, value in both.items() if key not in ("error", "log")}
    return both


def begun(options: Any) -> dict[str, Any]:
    """Return the record to add to: a new one, or the one that an earlier run of the same loads left."""
    record: dict[str, Any] = {
        **head(
            "one model in several layouts over the GPUs of a machine, each loaded by moe-optimizer bench; weights are "
            "random where vLLM was told to (--load-format dummy), so routing is even",
            options.commit,
        ),
        "environment": gpu_environment(),
        "model": options.shape or Path(options.model).name,
        "profile": options.profile,
        "workload": {
            "input_tokens": options.input_tokens,
            "output_tokens": options.output_tokens,
            "requests_per_client": options.requests_per_client,
            "max_running": most_clients(options),
        },
        "layouts": {},
    }
    if not options.out.exists():
        return record
    found = json.loads(options.out.read_text(encoding="utf-8"))
    for key in ("environment", "model", "profile", "workload", "commit"):
        if found.get(key) != record[key]:
            raise SystemExit(
                f"{options.out}: {key}: got {found.get(key)}, expected {record[key]}\n\nhint: another --out"
            )
    return found


def measured(
    group: list[Entry],
    clients: list[int],
    options: Any,
    vllm_args: list[str],
    *,
    end: float,
    keep: Callable[[dict[str, dict[str, Any]]], None],
    asked_to_end: threading.Event,
) -> dict[str, dict[str, Any]]:
    """Return what each layout of a group does with so many clients; with `error` where the run did not end well.

    `keep` gets the same while more is measured, after each load.
    """
    limit_s = min(options.layout_s, end - time.monotonic())
    if limit_s < LEAST_S:
        return {each.name: {"error": f"not started: {max(0, limit_s):.0f} s left", "loads": []} for each in group}
    folder = Path(tempfile.mkdtemp(prefix="layouts-"))
    workload = folder / "layouts.yaml"
    workload.write_text(workload_text(clients, options), encoding="utf-8")
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        plans = list(pool.map(lambda each: write_plan(each, options, vllm_args, folder), group))
    command = [sys.executable, str(TOGETHER), str(folder / "run"), *map(str, plans), "--tokenizer", options.model]
    command += ["--workload", str(workload), "--repetitions", str(options.repetitions)]

    def so_far(error: str) -> dict[str, dict[str, Any]]:
        failed = {"error": error, "log": logs(folder)} if error else {}
        return {
            each.name: {
                **failed,
                "beside": [other.name for other in group if other is not each],
                "memory_share": each.share,
                "serve_args": json.loads(plan.read_text(encoding="utf-8"))["serve_args"],
                "wall_s": round(time.monotonic() - started, 1),
                "start": start_of(folder / "run", number),
                "loads": loads_measured(folder / "run", number, workload, options),
            }
            for number, (each, plan) in enumerate(zip(group, plans, strict=True))
        }

    kept: list[set[str]] = [set()]

    def look() -> None:
        samples = {path.name for path in (folder / "run").glob("side-*.json")}
        if samples != kept[0]:
            keep(so_far("killed while more was measured"))
            kept[0] = samples

    error = run_for(command, folder, limit_s, look=look, asked_to_end=asked_to_end)
    found = so_far(error)
    if not error:
        shutil.rmtree(folder)
    return found


def start_of(run: Path, number: int) -> Any:
    """Return the facts of a start, where it came so far."""
    path = start_path(run, f"server-{number}")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def loads_measured(run: Path, number: int, workload: Path, options: Any) -> list[Any]:
    """Return what was measured of a side under each load, without the rounds in which something compiled, which a run
    that was cut could not send again, and without those that met a server that was being stopped.
    """
    loads = []
    for load in loads_of(load_workload(str(workload))):
        paths = [run / f"{Turn(number, load, each).key}.json" for each in range(options.repetitions)]
        found = [read_samples(path) for path in paths if path.exists()]
        rounds = [each for each in found if not each.compilations and not any(each.errors)]
        if rounds:
            loads.append(encode(load_result(load, rounds, Limits())))
    return loads


def run_for(
    command: list[str], folder: Path, limit_s: float, *, look: Callable[[], None], asked_to_end: threading.Event
) -> str:
    """Run a command for so long at most; return why it did not end well, or "". Nothing of it is left running.

    `look` is called again and again meanwhile, and before the command is stopped, which may take long.
    """
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)
    why, end = "", time.monotonic() + max(1.0, limit_s - STOP_S)
    try:
        while process.poll() is None and not why:
            if asked_to_end.wait(LOOK_S):
                why = "ended by SIGTERM"
            elif time.monotonic() >= end:
                why = f"longer than {limit_s - STOP_S:.0f} s"
            look()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S / 2)
        for plan in (folder / "run").rglob("plan.json"):
            kill_members(process.pid, str(plan))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return why or (f"exit code {process.returncode}" if process.returncode else "")


def logs(folder: Path) -> dict[str, str]:
    """Return the ends of what the command and its servers wrote."""
    paths = [folder / "err", *sorted((folder / "run").rglob("*.log"))]
    return {str(path.relative_to(folder)): path.read_text(errors="replace")[-3000:] for path in paths}


def workload_text(clients: list[int], options: Any) -> str:
    """Return a workload of moe-optimizer bench."""
    return (
        "description: requests of one length\nrequests:\n"
        f"  - {{prompt: {_exactly(options.input_tokens)}, output: {_exactly(options.output_tokens)}}}\n"
        f"clients: {clients}\nrequests_per_client: {options.requests_per_client}\n"
    )


def _exactly(tokens: int) -> str:
    return f"{{least: {tokens}, most: {tokens}}}"


def show(layout: str, found: dict[str, Any]) -> None:
    """Print what was measured."""
    for load in found["loads"]:
        print(
            f"{layout:<12}{load['clients']:>5} clients  TPOT {load['tpot_ms']['median']:.2f} ms, "
            f"TTFT {load['ttft_ms']['median']:.0f} ms, {load['output_tokens_per_s']:.0f} tokens/s"
        )
    if "error" in found:
        print(f"{layout}: {found['error']}", found.get("log", {}).get("err", "")[-500:], flush=True)


if __name__ == "__main__":
    sys.exit(main())
