"""Patches a worker's step: it is counted, experts for its real tokens, and the first one proves the captured graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.vllm_plugin.expert_load.capture import current_counting
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.worker.cache_saturation import sample_cache
from moe_optimizer.vllm_plugin.worker.captured_graphs import prove_captured
from moe_optimizer.vllm_plugin.worker.compilations import note_step
from moe_optimizer.vllm_plugin.worker.drafts import note_drafts
from moe_optimizer.vllm_plugin.worker.memory_found import prove_memory
from moe_optimizer.vllm_plugin.worker.progress import count_step


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        prove_captured(self)
        prove_memory(self)
        sample_cache(self, scheduler_output)
        count_step()
        note_step(scheduler_output)
        note_drafts(scheduler_output)
        counting = current_counting()
        if counting is None:
            return original(self, scheduler_output)
        with counting.step(scheduler_output):
            return original(self, scheduler_output)

    return execute_model


WORKER_EXECUTE_MODEL = Patch(
    target="vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model",
    why="a router sees padding, warm-up and profiling as tokens; here the scheduler's number of real tokens reaches a "
    "worker, and the first call is the first sign that the CUDA graphs are captured",
    remove_when="vLLM gives the number of real tokens to its routed experts callback, and tells which graphs it has",
    fingerprints={"0.26 to 0.33": "6707bb946f6f4074"},
    replacement=_replacement,
)
