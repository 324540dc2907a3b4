"""What our classes answer where vLLM chooses the kernel of a MoE layer; shared by the patches of its oracles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.vllm_plugin.server_facts import server_facts, uses_lora, world
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session

WHY = (
    "vLLM asks a fixed list of classes which of them computes a MoE layer; there is no way to register one from outside"
)
REMOVE_WHEN = "vLLM lets out-of-tree MoE backends register (pull request 53897); the classes stay as they are"


def offering(load_class: Mapping[str, Callable[[], type]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes vLLM's `backend_to_kernel_cls` name a class of ours first.

    Args:
        load_class: name of a vLLM backend -> imports and returns our class for it. Only backends under which vLLM hands
            the weights on in their loaded layout: under the others it swaps, pads or shuffles them for the stock kernel
            before ours would see them.
    """

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backend_to_kernel_cls(backend: Any) -> Any:
            classes = original(backend)
            session = current_session()
            load = load_class.get(getattr(backend, "name", ""))
            if session is None or load is None:
                return classes
            try:
                return [*_offered_classes(session, load, classes), *classes]
            except RequiredNotAppliedError:
                raise
            except Exception as error:  # noqa: BLE001 - vLLM is choosing a kernel; stock must stay reachable
                session.refused(EXPERTS_PASS, f"fallback: {described(error)}")
                return classes

        return backend_to_kernel_cls

    return replacement


def _offered_classes(session: PluginSession, load: Callable[[], type], stock: Sequence[type]) -> list[type]:
    session.resolve_plan(server_facts)
    if session.wanted(EXPERTS_PASS) is None:
        return []
    session.proof.model_rank, session.proof.world_size = world()
    if uses_lora():
        # vLLM then takes the first class without asking it anything.
        session.refused(EXPERTS_PASS, "kernel does not support LoRA")
        return []
    offered = load()
    offered.stock_classes = tuple(stock)  # type: ignore[attr-defined]
    return [offered]
