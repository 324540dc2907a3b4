"""Starts the server."""

from collections.abc import Callable
from typing import Any

import uvicorn

from moe_optimizer.engine.async_llm import AsyncLLM
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.server.app import create_app


def serve(
    args: EngineArgs, *, host: str, port: int, served_model_name: str | None = None, on_ready: Callable[[], None]
) -> None:
    """Load the model and serve it until the process is told to stop. Requests under way may finish.

    Clients ask for `served_model_name`, by default the model as it was given; `on_ready` is called once it listens.

    Raises:
        ServerFailedError: the engine has stopped, so whoever watches the process has to see it end.
    """
    llm = AsyncLLM(args)
    try:
        app = create_app(llm, served_model_name or args.model)
        server = _Server(uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=30))
        server.on_ready, server.llm = on_ready, llm
        server.run()
        llm.check_health()
    finally:
        llm.shutdown()


class _Server(uvicorn.Server):
    """Says when it listens, and ends with its engine."""

    on_ready: Callable[[], None]
    llm: AsyncLLM

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Listen; a port that is taken ends the process."""
        await super().startup(sockets)
        self.on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; asked ten times a second."""
        return await super().on_tick(counter) or self.llm.failure is not None
