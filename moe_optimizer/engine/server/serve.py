"""Starts the server: `serve`, which the command line calls, and `python -m moe_optimizer.engine.server`."""

from __future__ import annotations

from pathlib import Path

import uvicorn

from moe_optimizer.engine.async_llm import AsyncLLM
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.server.app import create_app


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
        app = create_app(llm, served_model_name or str(Path(args.model)))
        uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=30)
    finally:
        llm.shutdown()
