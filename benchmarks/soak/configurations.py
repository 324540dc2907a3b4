"""Changed configurations through inspection and planning: each ends with a result or a refusal, none with a traceback.

    python benchmarks/soak/configurations.py [--count 10000] [--write]

The configurations of the contract test, with another seed each time: published ones and small ones of several families,
of which one to four fields are removed, replaced or taken from another. What `inspect` and `plan` call is called
directly: the command around it takes most of their time and does not depend on the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_name, cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402
from moe_optimizer.cli.messages import as_json_text  # noqa: E402
from moe_optimizer.cli.options import PlanOptions  # noqa: E402
from moe_optimizer.cli.planning import decide, read_request  # noqa: E402
from moe_optimizer.cli.settings import Settings  # noqa: E402
from moe_optimizer.errors import ExitCode, MoeOptimizerError  # noqa: E402
from moe_optimizer.inspection.model_inspector import ModelInspector  # noqa: E402
from moe_optimizer.plan_context.request import PlanRequest  # noqa: E402
from tests.contract.test_any_configuration import changed_configs  # noqa: E402

MODEL = ROOT / "examples" / "tiny-moe"

_BATCH = 500
_SETTINGS = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
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

    given_settings, request = read_request(PlanOptions(model=str(MODEL), hardware="h200", gpus=8))

    def ends_well(changed: bytes) -> None:
        codes = _codes(changed, given_settings, request)
        for name, code in zip(ended, codes, strict=True):
            ended[name][int(code)] += 1
        seen.add(hashlib.sha256(changed).digest())

    def done() -> int:
        return sum(ended["inspect"].values())

    begin, seed = time.monotonic(), args.seed
    while done() < args.count and time.monotonic() - begin < args.minutes * 60:
        batch = settings(_SETTINGS, max_examples=min(_BATCH, args.count - done()))
        seeded(seed)(batch(given(changed=changed_configs())(ends_well)))()
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
            **head("changed configurations through inspect and plan", args.commit), "environment": host(load_before),
            "libraries": packages("hypothesis"), **found,
        }  # fmt: skip
        write_record(record, cpu_slug(cpu_name()), "soak_configurations")
    return found


def _codes(config: bytes, given_settings: Settings, request: PlanRequest) -> tuple[ExitCode, ExitCode]:
    """Return the exit codes of inspecting and of planning; any other exception than ours is raised."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        try:
            model = ModelInspector().inspect(folder)
        except MoeOptimizerError as error:
            return error.exit_code, error.exit_code
        as_json_text(model)
        try:
            decide(given_settings, dataclasses.replace(request, model=model)).to_json()
        except MoeOptimizerError as error:
            return ExitCode.OK, error.exit_code
    return ExitCode.OK, ExitCode.OK


if __name__ == "__main__":
    main()
