"""Times the MoE kernels of other libraries beside ours on one Hopper GPU, each in a process of its own.

    python benchmarks/ops/bench_cuda_peer_runs.py --out FOLDER [--peers humming,quack] [--budget-s 480]

A library that crashes, hangs or cannot be imported costs its own process: at most --limit-s, and a row with the reason.
Beside each peer all of our kernels for the same weights are timed in the same process, as bench_cuda_fused_experts.py
times them: CUDA graphs of 8 calls on 8 weight sets, sides in turns, a side only if its output matches plain torch.
What is not in a peer's time: bench_cuda_peers.py.

FOLDER/record.json has it all, beside what it had before of other peers, layers and formats. It is kept as
benchmarks/records/<date>_<gpu>_peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

SHAPES = "qwen3-30b-a3b,mixtral-8x7b-tp2,gpt-oss-120b"
DTYPES = "bf16,fp8,mxfp4,int4_g128"
TOKENS = "1,4,16,64,256,1024,4096"
MARGIN_S = 10
"""A process starts no further case in its last seconds."""
LEFT_OUT = {
    ("gpt-oss-120b", "bf16"): "8 weight sets and their copies do not fit into 80 GB",
    ("gpt-oss-120b", "fp8"): "blocks of 128 x 128 do not divide its sizes",
    ("gpt-oss-120b", "int4_g128"): "groups of 128 do not divide its sizes",
}
"""Cases that are not run."""


def main() -> int:
    """Run what the arguments say; 0 if every peer was timed in at least one case."""
    from bench_cuda_cases import PEER_FORMATS

    from benchmarks.record import parser_of

    parser = parser_of(__doc__, commit=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON records")
    parser.add_argument("--peers", default=",".join(PEER_FORMATS), help="in this order")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtypes", default=DTYPES, help="of the weights, in this order")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--limit-s", type=float, default=150, help="of one process: a peer, a layer, a format")
    parser.add_argument("--budget-s", type=float, default=480, help="start no further process after this many seconds")
    options = parser.parse_args()
    unknown = set(options.peers.split(",")) - set(PEER_FORMATS)
    if unknown:
        parser.error(f"argument --peers: unknown {sorted(unknown)}; hint: one of {', '.join(PEER_FORMATS)}")
    deadline = time.monotonic() + options.budget_s
    options.out.mkdir(parents=True, exist_ok=True)
    runs = list(planned(options.peers.split(","), options.shapes.split(","), options.dtypes.split(","), PEER_FORMATS))
    facts, rows = kept(options.out, {run[:3] for run in runs})
    versions: dict[str, str] = facts.get("peers", {})
    for run in runs:
        found, of_run = timed(run, options, deadline)
        rows += found
        facts = of_run or facts
        versions |= of_run.get("peers", {})
        write_record(options.out, facts | {"peers": versions}, rows)
    timed_peers = {row["peer"] for row in rows if row.get("sides")}
    return 0 if timed_peers >= set(options.peers.split(",")) else 4


Run = tuple[str, str, str, str]
"""Peer, layer, format, and why it is not run: "" if it is."""


def planned(peers: list[str], shapes: list[str], dtypes: list[str], formats: dict[str, tuple[str, ...]]) -> list[Run]:
    """Every layer and format for every peer, in the order in which they are worth running."""
    from bench_cuda_cases import kind_of

    runs = []
    for shape in shapes:
        for peer in peers:
            for dtype in dtypes:
                why = LEFT_OUT.get((shape, dtype), "")
                if kind_of(dtype) not in formats[peer]:
                    why = f"no kernel for {dtype} weights on Hopper"
                runs.append((peer, shape, dtype, why))
    return runs


def kept(out: Path, again: set[tuple[str, str, str]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What an earlier run left in FOLDER/record.json about peers, layers and formats that are not run again."""
    if not (out / "record.json").is_file():
        return {}, []
    record = json.loads((out / "record.json").read_text())
    rows = record.pop("cases")
    return record, [row for row in rows if (row["peer"], _name(row["shape"]), row["dtype"]) not in again]


def _name(shape: str | dict[str, Any]) -> str:
    return shape if isinstance(shape, str) else shape["name"]


def timed(run: Run, options: argparse.Namespace, deadline: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row per number of tokens, timed or absent with the reason; and the facts that the process wrote."""
    peer, shape, dtype, why = run
    tokens = [int(count) for count in options.tokens.split(",")]
    folder = options.out / f"{peer}-{shape}-{dtype}"
    left = deadline - time.monotonic()
    if not why and left < 5:
        why = f"not run: the budget of {options.budget_s:.0f} s was spent"
    if not why:
        why = run_one(run, options, folder, min(options.limit_s, left))
    rows = rows_of((peer, shape, dtype, why), tokens, folder)
    for row in rows if any("sides" in row for row in rows) else rows[:1]:
        print(described(row), flush=True)
    facts = folder / "facts.json"
    return rows, json.loads(facts.read_text()) if facts.is_file() else {}


def rows_of(run: Run, tokens: list[int], folder: Path) -> list[dict[str, Any]]:
    """What the process timed, and the reason for each number of tokens that it did not reach."""
    peer, shape, dtype, why = run
    rows = {count: {"peer": peer, "shape": shape, "dtype": dtype, "tokens": count, "absent": {peer: why}}
            for count in tokens}  # fmt: skip
    timings = folder / "timings.jsonl"
    for line in timings.read_text().splitlines() if timings.is_file() else ():
        case = json.loads(line)
        rows[case["tokens"]] = {"peer": peer, "absent": {}, **case}
    return list(rows.values())


def described(row: dict[str, Any]) -> str:
    """The row in a line: the peer's sides, our fastest, and what is absent."""
    times = {name: side["median_us"] for name, side in row.get("sides", {}).items()}
    peer = [f"{name} {us:.1f} us" for name, us in times.items() if name.startswith(row["peer"])]
    ours = min(((us, name) for name, us in times.items() if name.startswith(("direct", "grouped"))), default=None)
    parts = peer + ([f"ours {ours[0]:.1f} us ({ours[1]})"] if ours else [])
    parts += [f"absent {name}: {why}" for name, why in row["absent"].items()]
    return f"{_name(row['shape']):18} {row['dtype']:9} {row['tokens']:5d} {row['peer']:18} {'; '.join(parts)}"


def run_one(run: Run, options: argparse.Namespace, folder: Path, limit_s: float) -> str:
    """Time a peer in a process of its own; what to say of the cases that it did not reach."""
    peer, shape, dtype, _ = run
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run's
    folder.mkdir(parents=True)
    command = [
        sys.executable, str(HERE / "bench_cuda_fused_experts.py"), "--out", str(folder), "--no-build", "--no-check",
        "--peers", peer, "--shapes", shape, "--dtypes", dtype, "--routings", "uniform", "--tokens", options.tokens,
        "--budget-s", str(limit_s - MARGIN_S), *(["--commit", options.commit] if options.commit else []),
    ]  # fmt: skip
    started = time.monotonic()
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            status = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # and the compilers that the library started
            child.wait()
            return f"not reached within {limit_s:.0f} s"
    last = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()][-1:]
    print(f"{peer} {shape} {dtype}: exit {status} after {time.monotonic() - started:.0f} s", flush=True)
    return f"its process ended with {status}: {' '.join(last)[:300]}"


def write_record(out: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Put all rows so far into FOLDER/record.json, times to 0.01 us."""
    from bench_cuda_fused_experts import rounded_case

    from benchmarks.record import command_line

    record = facts | {
        "what": "fused experts of one layer: our CUDA kernels and those of other libraries, each library in a process "
        "of its own beside ours, L2-cold (8 weight sets), CUDA graphs, sides interleaved",
        "command": command_line(),
        "samples": "microseconds per call of 7 replays of a CUDA graph of 8 calls, rounded to 0.01",
        "cases": [rounded_case(row) if "sides" in row else row for row in rows],
    }  # fmt: skip
    (out / "record.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
