"""Keeps what was measured as a record: a result of `moe-optimizer bench` or `tune`, files of layouts, starts or steps.

    python benchmarks/keep.py runs/bench-1/bench.json --machine h100 --subject served
    python benchmarks/keep.py runs/tune-1/ledger.json --machine h100 --subject tuned
    python benchmarks/keep.py layouts.json --machine h100_x2 --subject layouts_mixtral
    python benchmarks/keep.py ours.json vllm.json --machine h100 --subject starts
    python benchmarks/keep.py stock.json ours.json --machine h100 --subject decode_step

Run it in the checkout that was measured: the record names its commit. Files of bench_layouts.py, bench_starts.py and
bench_decode_step.py name it themselves; several of one commit, machine and workload become one record. Ends of logs are
left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.record import checkout, parser_of, write_record

JOINED = ("layouts", "starts", "remarks")
"""What a benchmark's own file holds, of which several files become one record."""
_SAME = ("what", "commit", "dirty", "environment", "model", "profile", "workload")


def main() -> int:
    """Write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--note", help="what else ran on the machine, and anything that the result does not say")
    options = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    note = {"note": options.note} if options.note else {}
    if any(key in results[0] for key in JOINED):
        record = joined(results) | (checkout(options.commit) if options.commit else {}) | note
    elif len(results) == 1:
        record = of_command(results[0], checkout(options.commit), note)
    else:
        parser.error(f"got {len(results)} results, expected one of bench or tune")
    write_record(record, options.machine, options.subject)
    return 0


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of files that a benchmark wrote.

    Raises:
        SystemExit: they are not of the same commit, machine and workload, or hold the same layout.
    """
    first, *others = results
    for other in others:
        for key in _SAME:
            if other.get(key) != first.get(key):
                raise SystemExit(f"{key}: got {other.get(key)}, expected {first.get(key)}\n\nhint: two records")
    record = dict(first)
    if others:
        record["further_commands"] = [other["command"] for other in others]
    if "starts" in first:
        return record | {"starts": [start for result in results for start in result["starts"]]}
    if "remarks" in first:
        sides = {side: steps for result in results for side, steps in result["sides"].items()}
        return record | {"remarks": [each for result in results for each in result["remarks"]], "sides": sides}
    layouts: dict[str, Any] = {}
    for result in results:
        for name, found in result["layouts"].items():
            if name in layouts:
                raise SystemExit(f"{name}: got it twice\n\nhint: bench_layouts.py goes on in the file of its --out")
            layouts[name] = {key: value for key, value in found.items() if key != "log"}
    return record | {"layouts": layouts}


def of_command(result: dict[str, Any], commit: dict[str, Any], note: dict[str, str]) -> dict[str, Any]:
    """Return the record of a result of `moe-optimizer bench` or `tune`."""
    # Not where the files lay.
    result |= {key: Path(result[key]).name for key in ("plan_file", "workload") if result.get(key)}
    for entry in result.get("entries", ()):
        entry["reason"] = re.sub(r"(?<=\s)/\S*/", "", entry["reason"])
    environment = result["environment"] | {"model": Path(result["environment"]["model"]).name}
    head = {
        "what": f"{environment['model']}: {_what(result)}",
        "date": result["date"][:10],
        "command": [Path(word).name if word.startswith("/") else word for word in result["command"]],
        **commit,
        "environment": environment,
        **note,
    }
    return head | {key: value for key, value in result.items() if key not in head}


def _what(result: dict[str, Any]) -> str:
    if "goal" in result:
        return f"tuned for {result['goal']} within {result['budget_s']:.0f} s: {result['plan']}"
    sides = " against ".join(side["name"] for side in result["sides"])
    return f"{sides}, workload {result['workload']}: {result['description']}"


if __name__ == "__main__":
    sys.exit(main())
