"""Starts the server."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import uvicorn

from moe_optimizer.engine.async_llm import AsyncLLM
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.server.app import create_app
from moe_optimizer.errors import InputError


def serve(
    args: EngineArgs,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Load the model and serve it until the process is told to stop. Requests under way may finish.

    Clients ask for `served_model_name`, by default the model as it was given; `on_ready` is called once it listens.

    Raises:
        MoeOptimizerError: the model cannot be loaded, or does not fit.
    """
    llm = AsyncLLM(args)
    try:
        app = create_app(llm, served_model_name or args.model)
        config = uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)
        _Server(config, on_ready).run()
    finally:
        llm.shutdown()


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Listen; a port that is taken ends the process."""
        await super().startup(sockets)
        self._on_ready()


def read_command_line(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `serve` that `words` say, where every argument of `EngineArgs` is an option.

    Raises:
        InputError: an option is unknown or has a wrong value.
    """
    parser = _Parser(prog="python -m moe_optimizer.engine.server", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    for name, field in EngineArgs.model_fields.items():
        kind: dict[str, Any] = (
            {"action": argparse.BooleanOptionalAction} if field.annotation is bool else {"type": _value}
        )
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, dest=name, required=field.is_required(), default=argparse.SUPPRESS, **kind)
    given = vars(parser.parse_args(words))
    server = {name: given.pop(name) for name in ("host", "port", "served_model_name")}
    return {"args": EngineArgs(**given), **server}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"embedded engine: {message}")


def _value(text: str) -> Any:
    """Return a number as such, anything else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
