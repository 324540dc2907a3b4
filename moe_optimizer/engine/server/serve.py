"""Starts the server."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import uvicorn

from moe_optimizer.engine.async_llm import AsyncLLM
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.server.app import create_app
from moe_optimizer.errors import MoeOptimizerError


def serve(args: EngineArgs, *, host: str = "127.0.0.1", port: int = 8000, served_model_name: str | None = None) -> None:
    """Load the model and serve it until the process is told to stop. Requests under way may finish.

    Args:
        args: those of the engine.
        host: address to listen on.
        port: likewise.
        served_model_name: name that clients ask for; None is the model as it was given.

    Raises:
        MoeOptimizerError: the model cannot be loaded, or does not fit.
    """
    llm = AsyncLLM(args)
    try:
        app = create_app(llm, served_model_name or args.model)
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)
    finally:
        llm.shutdown()


def main() -> int:
    """Serve as the command line says, where every argument of `EngineArgs` is an option; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m moe_optimizer.engine.server")
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
