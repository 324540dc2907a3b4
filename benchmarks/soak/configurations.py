"""Changed configurations through `inspect` and `plan`: each ends with a result or a sentence, none with a traceback.

    python benchmarks/soak/configurations.py [--count 10000] [--write]

The configurations of the contract test, with another seed each time: published ones and small ones of several families,
of which one to four fields are removed, replaced or taken from another.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_name, cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402
from tests.contract.test_any_configuration import INSPECT, PLAN, changed_configs, run_on  # noqa: E402

_BATCH = 500
_SETTINGS = settings(
    deadline=None, database=None, phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck)
)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run them, print how they ended, and with --write store a record.

    Raises:
        AssertionError: one ended otherwise; hypothesis shows it.
    """
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=600.0, help="no further batch after so long")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    ended: dict[str, Counter[int]] = {"inspect": Counter(), "plan": Counter()}
    seen: set[bytes] = set()

    @given(changed=changed_configs())
    def all_end_well(changed: bytes) -> None:
        for command in (INSPECT, PLAN):
            ended[command[0]][int(run_on(changed, command)[0])] += 1
        seen.add(hashlib.sha256(changed).digest())

    def done() -> int:
        return sum(ended["inspect"].values())

    begin, seed = time.monotonic(), args.seed
    while done() < args.count and time.monotonic() - begin < args.minutes * 60:
        seeded(seed)(settings(_SETTINGS, max_examples=min(_BATCH, args.count - done()))(all_end_well))()
        seed += 1
    found = {
        "seeds": [args.seed, seed],
        "configurations": done(),
        "different": len(seen),
        "exit_codes": {name: dict(sorted(codes.items())) for name, codes in ended.items()},
        "tracebacks": 0,
    }
    print(found)
    if args.write:
        record = {
            **head("changed configurations through inspect and plan", args.commit), **host(load_before),
            "libraries": packages("hypothesis"), **found,
        }  # fmt: skip
        write_record(record, cpu_slug(cpu_name()), "soak_configurations")
    return found


if __name__ == "__main__":
    main()
