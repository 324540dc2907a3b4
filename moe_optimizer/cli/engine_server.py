"""Serves the embedded engine alone: `python -m moe_optimizer.cli.engine_server --model FOLDER`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_optimizer.errors import InputError, MoeOptimizerError


def main(words: Sequence[str]) -> None:
    """Serve what `words` say; end with the error of a model or an option that cannot be used, and its exit code."""
    from moe_optimizer.engine.server.serve import serve

    try:
        serve(**read_command_line(words), on_ready=lambda: None)
    except MoeOptimizerError as error:
        print(f"error: {error}" + (f"\n\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)


def read_command_line(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `serve` that `words` say, where every argument of `EngineArgs` is an option.

    Raises:
        InputError: an option is unknown or has a wrong value.
    """
    from moe_optimizer.engine import EngineArgs

    parser = _Parser(prog="python -m moe_optimizer.cli.engine_server", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    for name, field in EngineArgs.model_fields.items():
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if field.annotation is bool else {"type": _value}
        )
        kind["help"] = (field.description or "").replace("%", "%%")
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, dest=name, required=field.is_required(), default=argparse.SUPPRESS, **kind)
    given = vars(parser.parse_args(words))
    server = {name: given.pop(name) for name in ("host", "port", "served_model_name")}
    return {"args": EngineArgs(**given), **server}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"embedded engine: {message}", hint=f"{self.prog} --help lists the options")


def _value(text: str) -> Any:
    """Return a number as such, anything else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    main(sys.argv[1:])
