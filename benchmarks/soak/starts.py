"""Clean starts of a server, one after the other: the canary and the decode check pass in each, which ends with exit
code 0. What was shown of both is in the samples; those without it are older than the decode check.

    python benchmarks/soak/starts.py [--count 50] [--minutes 600] [--resume] [--write]

Each start serves the bundled model with our kernels required in every worker, answers a request and is stopped. The
canary comes before the launcher's warm-up, which is left out. 200 clean starts of a layer are in
`tests/unit/vllm_plugin/experts/test_self_check.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import checkout, cpu_name, cpu_slug, head, host, latest_record, parser_of, write_record  # noqa: E402
from benchmarks.soak.served import served  # noqa: E402
from moe_optimizer.proof.record import read_proofs  # noqa: E402
from tests.free_ports import free_port  # noqa: E402


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Start, ask, stop; print how each went and with --write store a record.

    Raises:
        AssertionError: a canary did not pass, or a server did not end well.
    """
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=600.0, help="no further start after so long")
    parser.add_argument("--resume", action="store_true", help="count those of the latest record of this machine too")
    args = parser.parse_args(arguments)
    load_before, begin = os.getloadavg()[0], time.monotonic()
    commit = checkout(args.commit)["commit"]
    starts = _of_the_latest_record() if args.resume else []
    while len(starts) < args.count and time.monotonic() - begin < args.minutes * 60:
        with tempfile.TemporaryDirectory() as folder:
            try:
                starts.append(_start(Path(folder)))
            except (OSError, RuntimeError) as error:
                said = (Path(folder) / "stderr").read_text(encoding="utf-8").splitlines()
                starts.append({"error": str(error), "said": said[-20:], "passed": False, "exit_code": None})
        starts[-1]["commit"] = commit
        print(starts[-1], flush=True)
    found = {"starts": len(starts), "false_alarms": sum(not start["passed"] for start in starts), "samples": starts}
    if args.write:
        record = {
            **head("clean starts of a server with the canary", args.commit),
            "environment": host(load_before),
            **found,
        }
        if {start["commit"] for start in starts} != {commit}:
            record["commit"] = None  # named in the samples
        write_record(record, cpu_slug(cpu_name()), "soak_starts")
    assert starts, "no start"
    assert not found["false_alarms"], starts
    assert all(start["exit_code"] == 0 for start in starts), starts
    return found


def _of_the_latest_record() -> list[dict[str, Any]]:
    record = latest_record("soak_starts") or {"commit": None, "samples": []}
    return [{"commit": record["commit"], **start} for start in record["samples"]]


def _start(folder: Path) -> dict[str, Any]:
    port = free_port()
    with (folder / "stderr").open("w") as said, served(folder / "run", port, said, "--strict", "--no-warm-up") as run:
        body = json.dumps({"model": run.ready["model"], "prompt": "def", "max_tokens": 4}).encode()
        url, kind = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=600) as answer:
            assert answer.status == 200
        canaries = [
            proof.passes["flash_dmoe"].canary for proof in read_proofs(folder / "run") if proof.role == "worker"
        ]
        shown = [each["canary"] for each in run.ready["passes"] if each["pass_name"] == "flash_dmoe"]
    return {
        "seconds": round(run.ready["start_up_s"], 1),
        "canary": canaries,
        "shown": shown,
        "passed": bool(canaries) and all(each.startswith("passed") for each in canaries),
        "exit_code": run.code,
    }


if __name__ == "__main__":
    main()
