"""Puts our class into vLLM's fixed lists of kernels for experts that the checkpoint stores in four bits.

Each list ends in an emulation, which leaves the weights as they were loaded: where our class computes a layer, vLLM is
told the emulation's name with our class instead of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.vllm_plugin.experts.kernel_choice import offered_classes
from moe_optimizer.vllm_plugin.session import EXPERTS_PASS, PluginSession, current_session

_KEPT = "moe_optimizer_kernel"
"""Attribute of a layer's method: the kernel object that captured and compiled graphs call."""


def choosing(
    choose: Callable[..., type | None], emulation: Callable[[], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a replacement of vLLM's selection.

    Args:
        choose: gets this process's session and what vLLM asks with, and returns our class, or None.
        emulation: imports and returns vLLM's name of its emulation.
    """

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def select(config: Any, *arguments: Any, **named: Any) -> Any:
            session = current_session()
            ours = None
            if session is not None and config.moe_backend == "auto":
                with session.falling_back(EXPERTS_PASS):
                    ours = choose(session, config, *arguments, **named)
            return original(config, *arguments, **named) if ours is None else (emulation(), ours)

        return select

    return replacement


def offered(
    session: PluginSession,
    config: Any,
    weight_key: Any,
    *,
    cpu: Callable[[], Any],
    cuda: Callable[[], Any],
    why_not: Callable[[PluginSession], str] = lambda _session: "",
) -> type | None:
    """Return our class for a layer; None where the plan has none, or it does not compute it: the proof gets the reason.

    Args:
        session, config: of this process, and vLLM's of the layer.
        weight_key: vLLM's name of how the weights are stored.
        cpu, cuda: import and return the class for the device.
        why_not: says why the layers that ask are not those that the plan is made for, or "".
    """
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.platforms import current_platform

    load = cpu if current_platform.is_cpu() else cuda
    for ours in offered_classes(session, load, load().stock_classes):
        if reason := why_not(session):
            session.refused(EXPERTS_PASS, reason)
            return None
        standard = mk.FusedMoEActivationFormat.Standard
        if ours.is_supported_config(ours, config, weight_key, None, standard)[0]:
            return ours
    return None


def keep_first_kernel(method: Any, layer: Any, make: Callable[[], tuple[Any, Any]]) -> None:
    """Give a layer's method the kernel object of its first load: vLLM copies new weights into its tensors.

    Args:
        method, layer: vLLM's, with the weights as our kernels read them.
        make: returns the kernel object of a first load, and its configuration.
    """
    held = getattr(method, _KEPT, None) or make()
    method.moe_kernel, method.moe_quant_config = held
    # vLLM asks again, of every layer on a GPU for one (DeepGEMM's warm-up): its own answer is of the loaded tensors.
    method.get_fused_moe_quant_config = lambda _layer: held[1]
    if not hasattr(method, _KEPT):
        method.moe_kernel.fused_experts.finish_loading(layer)
        setattr(method, _KEPT, held)
