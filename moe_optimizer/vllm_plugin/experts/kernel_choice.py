"""Offers our experts classes first where vLLM chooses the kernel of a MoE layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.vllm_plugin.experts.lora import why_adapters_keep_vllms
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.server_facts import cpu_threads, server_facts, world
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session

_WHY = (
    "vLLM asks a fixed list of classes which of them computes a MoE layer; there is no way to register one from outside"
)
_REMOVE_WHEN = "vLLM lets out-of-tree MoE backends register (pull request 53897); the classes stay as they are"


def _offering(load_class: Mapping[str, Callable[[], type]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes vLLM's `backend_to_kernel_cls` name a class of ours first.

    Args:
        load_class: name of a vLLM backend -> imports and returns our class for it. Only backends that hand the weights
            on as they were loaded: the others swap, pad or shuffle them for vLLM's own kernel first.
    """

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backend_to_kernel_cls(backend: Any) -> Any:
            classes = original(backend)
            session = current_session()
            load = load_class.get(getattr(backend, "name", ""))
            if session is None or load is None:
                return classes
            with session.falling_back(EXPERTS_PASS):
                return [*offered_classes(session, load, classes), *classes]
            return classes

        return backend_to_kernel_cls

    return replacement


def offered_classes(session: PluginSession, load: Callable[[], Any], stock: Sequence[type]) -> list[Any]:
    """Return our class for a layer, or none where the plan has none for this worker; the proof gets the reason.

    Args:
        session: this process's; it makes its plan here if it has none yet.
        load: imports and returns the class.
        stock: vLLM's classes for the same backend, in its order.
    """
    session.resolve_plan(server_facts)
    if session.wanted(EXPERTS_PASS) is None:
        return []
    session.proof.model_rank, session.proof.world_size = world()
    if why_not := why_adapters_keep_vllms() or _other_worker(session):
        session.refused(EXPERTS_PASS, why_not)
        return []
    offered = load()
    offered.stock_classes = tuple(stock)
    return [offered]


def _other_worker(session: PluginSession) -> str:
    """Return why the speeds that the plan goes by are not those of this worker, or ""."""
    decision = session.wanted(EXPERTS_PASS)
    planned = None if decision is None else decision.params_as(FlashDmoeParams).threads
    here = cpu_threads()
    if planned is None or planned == here:
        return ""
    return f"ours was measured faster with {planned} threads, and this worker has {here}"


def _cpu_class() -> type:
    from moe_optimizer.vllm_plugin.experts.cpu import MoeOptimizerCpuExperts

    return MoeOptimizerCpuExperts


def _cuda_class() -> type:
    from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, planned_format

    session = current_session()
    if session is not None and planned_format(session).name != PLAIN:
        from moe_optimizer.vllm_plugin.experts.converted_cuda import MoeOptimizerConvertedCudaExperts

        return MoeOptimizerConvertedCudaExperts
    from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts

    return MoeOptimizerCudaExperts


def _fp8_cuda_class() -> type:
    from moe_optimizer.vllm_plugin.experts.fp8_cuda import MoeOptimizerFp8CudaExperts

    return MoeOptimizerFp8CudaExperts


UNQUANTIZED_ORACLE = Patch(
    target="vllm.model_executor.layers.fused_moe.oracle.unquantized:backend_to_kernel_cls",
    why=_WHY,
    remove_when=_REMOVE_WHEN,
    fingerprints={
        "0.26 to 0.27": "4f8ac45abed86ca6",
        "0.28 to 0.30": "89a607bc5f183ec7",
        "0.31 to 0.32": "259b71de159bb70d",
        "0.33": "f0914422b8321d51",
    },
    replacement=_offering({"CPU": _cpu_class, "TRITON": _cuda_class}),
)
FP8_ORACLE = Patch(
    target="vllm.model_executor.layers.fused_moe.oracle.fp8:backend_to_kernel_cls",
    why=_WHY,
    remove_when=_REMOVE_WHEN,
    fingerprints={
        "0.26 to 0.30": "93d904bd592f4ea8",
        "0.31 to 0.32": "4be97248bb34cafb",
        "0.33": "4b482574a5636522",
    },
    replacement=_offering({"TRITON": _fp8_cuda_class}),
)
