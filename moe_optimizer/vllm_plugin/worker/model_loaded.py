"""Patches what vLLM asks a worker right after its model is loaded, before the first forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.vllm_plugin.expert_load.capture import start_counting
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.server_facts import world
from moe_optimizer.vllm_plugin.session import PluginSession, current_session
from moe_optimizer.vllm_plugin.worker.cache_saturation import watch_cache
from moe_optimizer.vllm_plugin.worker.compilations import watch_compilations
from moe_optimizer.vllm_plugin.worker.memory_found import await_memory
from moe_optimizer.vllm_plugin.worker.planned_flags import prove_flags
from moe_optimizer.vllm_plugin.worker.progress import count_steps
from moe_optimizer.vllm_plugin.worker.sampling_kernels import compile_sampling_kernels
from moe_optimizer.vllm_plugin.worker.weights_changed import watch_experts


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_kv_cache_spec(self: Any) -> Any:
        session = current_session()
        if session is None:
            return original(self)
        start_counting(session, self)
        watch_compilations(session)
        cache_specs = original(self)
        session.proof.served_model_name = str(self.vllm_config.model_config.served_model_name)
        session.proof.model_rank, session.proof.world_size = world()
        replace_kernels(session, self)
        compile_sampling_kernels(self)
        count_steps(session)
        prove_flags(session, self, cache_specs)
        watch_experts(session, self)
        await_memory(session)
        watch_cache(session, str(self.vllm_config.cache_config.cache_dtype))
        return cache_specs

    return get_kv_cache_spec


def replace_kernels(session: PluginSession, worker: Any) -> None:
    """Have our kernels choose the experts and multiply with dense weights, each where the plan has it.

    Raises:
        RequiredNotAppliedError: the first failed on one rank of several, or the second failed and is required. Any
            other failure leaves the model as it is.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from moe_optimizer.vllm_plugin.experts.fused_router import install_fused_routers
    from moe_optimizer.vllm_plugin.linears.skinny_linears import install_skinny_linears

    install_fused_routers(session, worker.model_runner.get_model())
    install_skinny_linears(session, worker)


WORKER_MODEL_LOADED = Patch(
    target="vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec",
    why="vLLM says nothing when a model is loaded; it asks each worker for its cache right after that, and before it "
    "runs or compiles the model for the first time",
    remove_when="vLLM lets a plugin set a callback for routed experts, or tells it that a model is loaded",
    fingerprints={"0.26 to 0.33": "dfcb1de336f69cef"},
    replacement=_replacement,
)
