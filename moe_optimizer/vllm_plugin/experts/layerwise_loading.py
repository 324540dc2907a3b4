"""Has vLLM finish each layer of unquantised experts as soon as its weights are loaded, and our class convert it then.

Without it vLLM allocates all layers first and converts weights after the last of them is loaded: experts that are
converted to fewer bytes would need the memory of the whole model as the checkpoint stores it. vLLM's layerwise loading,
made for its own online quantisation, keeps a layer on the meta device until all its weights have been seen, then
allocates and fills it and calls `process_weights_after_loading`. There our experts class converts the layer and frees
the loaded tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.errors import described
from moe_optimizer.log import get_logger
from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, planned_format
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.session import current_session

logger = get_logger(__name__)

# Loaders that hand every tensor to the parameters' own loaders, which is what layerwise loading counts, or that fill
# such layers one by one themselves (dummy).
_LOAD_FORMATS = frozenset({"auto", "dummy", "hf", "safetensors"})


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_weights(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        begin = _layerwise_loading_of(self)
        if begin is None:
            original(self, layer, *args, **kwargs)
        else:
            import torch

            with torch.device("meta"):
                original(self, layer, *args, **kwargs)
            begin(layer)
            self.uses_meta_device = True  # asks vLLM for the end of its layerwise loading
        _finish_after(self)

    return create_weights


def _layerwise_loading_of(method: Any) -> Callable[[Any], None] | None:
    """Return vLLM's function that begins the loading of one layer, for a layer that is converted while loading."""
    try:
        if not _converts(method):
            return None
        from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
    except Exception as error:  # noqa: BLE001 - vLLM is building its model; without this it takes more memory
        logger.warning("experts are converted after all are loaded, which takes more memory: %s", described(error))
        return None
    return initialize_online_processing


def _converts(method: Any) -> bool:
    """Return whether our class computes this layer's experts and will convert them."""
    from vllm.config import get_current_vllm_config

    session = current_session()
    return (
        session is not None
        and _is_ours(getattr(method, "experts_cls", None))
        and planned_format(session).name != PLAIN
        and get_current_vllm_config().load_config.load_format in _LOAD_FORMATS
    )


def _is_ours(experts_class: Any) -> bool:
    from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts

    return isinstance(experts_class, type) and issubclass(experts_class, MoeOptimizerExperts)


def _finish_after(method: Any) -> None:
    """Have our experts class finish a layer once vLLM has processed its weights, and freed memory returned."""
    process = method.process_weights_after_loading

    @functools.wraps(process)
    def process_weights_after_loading(layer: Any) -> None:
        process(layer)
        experts: Any = getattr(method.moe_kernel, "fused_experts", None)
        if _is_ours(type(experts)):
            experts.finish_loading(layer)
            _return_freed_memory()

    method.process_weights_after_loading = process_weights_after_loading


def _return_freed_memory() -> None:
    """Have glibc give freed blocks back to the system; does nothing with another C library.

    It keeps freed blocks of up to 32 MB for the next allocation. The weights of a layer before its conversion have
    that size, and together they would hold the memory that the conversion saves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


LAYERWISE_LOADING = Patch(
    target="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.create_weights",
    why="only vLLM's own quantisation methods can ask for a layer to be finished while the next ones are loaded",
    remove_when="vLLM lets an experts class ask for it",
    fingerprints={
        "0.26 to 0.30": "363681c6c4a86f28",
        "0.31 to 0.33": "d10d1e2015f93204",
    },
    replacement=_replacement,
)
