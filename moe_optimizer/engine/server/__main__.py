"""`python -m moe_optimizer.engine.server --model FOLDER`: every argument of `EngineArgs` is an option."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.server.serve import serve
from moe_optimizer.errors import MoeOptimizerError


def main() -> int:
    """Serve until stopped; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_optimizer.engine.server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    for name, field in EngineArgs.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, dest=name, type=_value, required=field.is_required(), default=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    server = {name: given.pop(name) for name in ("host", "port", "served_model_name")}
    try:
        serve(EngineArgs(**given), **server)
    except MoeOptimizerError as error:
        print(f"error: {error}" + (f"\n\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return int(error.exit_code)
    return 0


def _value(text: str) -> Any:
    """Return a number or true/false as such, anything else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    sys.exit(main())
