"""Keeps a result of `moe-optimizer bench` or `tune` as a record.

    python benchmarks/keep.py runs/bench-1/bench.json --machine h100 --subject served
    python benchmarks/keep.py runs/tune-1/ledger.json --machine h100 --subject tuned

Run it in the checkout that was measured: the record names its commit.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.record import checkout, parser_of, write_record


def main() -> int:
    """Write the record."""
    parser = parser_of(__doc__, commit=True)
    parser.add_argument("result", type=Path)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--subject", required=True)
    parser.add_argument("--note", help="what else ran on the machine, and anything that the result does not say")
    options = parser.parse_args()
    result = json.loads(options.result.read_text(encoding="utf-8"))
    # Not where the files lay.
    result |= {key: Path(result[key]).name for key in ("plan_file", "workload") if result.get(key)}
    for entry in result.get("entries", ()):
        entry["reason"] = re.sub(r"(?<=\s)/\S*/", "", entry["reason"])
    environment = result["environment"] | {"model": Path(result["environment"]["model"]).name}
    head = {
        "what": f"{environment['model']}: {_what(result)}",
        "date": result["date"][:10],
        "command": [Path(word).name if word.startswith("/") else word for word in result["command"]],
        **checkout(options.commit),
        "environment": environment,
        **({"note": options.note} if options.note else {}),
    }
    write_record(
        head | {key: value for key, value in result.items() if key not in head}, options.machine, options.subject
    )
    return 0


def _what(result: dict[str, Any]) -> str:
    if "goal" in result:
        return f"tuned for {result['goal']} within {result['budget_s']:.0f} s: {result['plan']}"
    sides = " against ".join(side["name"] for side in result["sides"])
    return f"{sides}, workload {result['workload']}: {result['description']}"


if __name__ == "__main__":
    sys.exit(main())
