"""The embedded engine: serves a model where vLLM cannot run, small enough to be read in an afternoon."""

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
