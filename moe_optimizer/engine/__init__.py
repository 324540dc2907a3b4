"""The embedded engine: serves a model where vLLM cannot run, small enough to be read in an afternoon.

Importing this package imports no torch; using a name of it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_optimizer.engine.async_llm import AsyncLLM
    from moe_optimizer.engine.beam_search import BeamSearchParams
    from moe_optimizer.engine.engine_args import EngineArgs
    from moe_optimizer.engine.llm import LLM
    from moe_optimizer.engine.llm_engine import LLMEngine
    from moe_optimizer.engine.outputs import CompletionOutput, RequestOutput
    from moe_optimizer.engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
]

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchParams": "beam_search",
    "CompletionOutput": "outputs",
    "EngineArgs": "engine_args",
    "LLMEngine": "llm_engine",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
