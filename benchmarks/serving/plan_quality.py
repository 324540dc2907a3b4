"""Judges profiles on a model with `moe-optimizer quality`, and keeps the results as a record.

    python benchmarks/serving/plan_quality.py --model examples/tiny-moe --profiles balanced,aggressive --write

Each profile, one of ours or a YAML file, is compared with stock vLLM in a run of its own: the same tokens through both
servers' API. With --run-dir a run that was stopped goes on. What follows -- goes to the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import cpu_slug, head, host, packages, parser_of, write_record  # noqa: E402

_KEPT = (0, 5)
"""Exit codes with a result: kept, and not kept."""


def main() -> int:
    """Measure, and print what was found."""
    arguments, further = _split(sys.argv[1:])
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--profiles", default="balanced,aggressive")
    parser.add_argument("--run-dir", help="folder for answers; one below for each profile")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    results: dict[str, Any] = {}
    for profile in options.profiles.split(","):
        command = ["quality", options.model, "--profile", profile, "--json", *further]
        if options.run_dir:
            command += ["--run-dir", str(Path(options.run_dir) / profile)]
        found = subprocess.run(
            [sys.executable, "-m", "moe_optimizer", *command], stdout=subprocess.PIPE, text=True, check=False
        )
        if found.returncode not in _KEPT:
            return found.returncode
        name = Path(profile).stem
        results[name] = {"exit_code": found.returncode, **json.loads(found.stdout)}
        print(name, found.returncode, results[name]["kl_mean"], results[name]["failed"])
    machine = host(load)
    record = {
        **head("next-token distributions of plans and of stock vLLM, through the served API", options.commit),
        "environment": {
            **machine,
            "packages": packages("torch", "transformers", "numpy"),
        },
        "results": results,
    }
    if options.write:
        write_record(record, cpu_slug(str(machine["device"])).split("-")[0], f"quality_{Path(options.model).name}")
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--` and those after it."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


if __name__ == "__main__":
    sys.exit(main())
