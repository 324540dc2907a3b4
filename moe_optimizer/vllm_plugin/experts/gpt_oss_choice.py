"""Has vLLM load gpt-oss's experts for our kernels, which read MXFP4 as the checkpoint stores it.

vLLM picks a backend by the device and then prepares the weights for it: Triton's swizzles them, Marlin's repacks and
pads them, the CPU's packs them for AMX. Only its emulation leaves them as they were loaded, with sizes rounded to 32 at
most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moe_optimizer.vllm_plugin.experts.stored_choice import choosing, keep_first_kernel, offered
from moe_optimizer.vllm_plugin.patch import Patch
from moe_optimizer.vllm_plugin.session import PluginSession

_METHOD = "gpt_oss_mxfp4"
"""vLLM's name of the quantisation of gpt-oss's checkpoints."""


def _our_class(session: PluginSession, config: Any, activation_key: Any = None) -> type | None:
    """Return our class for a layer of gpt-oss; None where the plan has none, or it does not compute this layer."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

    quantization = get_current_vllm_config().quant_config
    if activation_key is not None or quantization is None or quantization.get_name() != _METHOD:
        return None
    return offered(session, config, kMxfp4Static, cpu=_cpu_class, cuda=_cuda_class)


def _emulation() -> Any:
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

    return Mxfp4MoeBackend.EMULATION


def _cpu_class() -> Any:
    from moe_optimizer.vllm_plugin.experts.gpt_oss_cpu import MoeOptimizerGptOssCpuExperts

    return MoeOptimizerGptOssCpuExperts


def _cuda_class() -> Any:
    from moe_optimizer.vllm_plugin.experts.gpt_oss_cuda import MoeOptimizerGptOssCudaExperts

    return MoeOptimizerGptOssCudaExperts


def _finishing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts

        original(self, layer)
        if isinstance(getattr(self.moe_kernel, "fused_experts", None), MoeOptimizerExperts):
            _widen_biases(layer)
            made = self.moe_kernel, self.moe_quant_config
            keep_first_kernel(self, layer, lambda: made)

    return process_weights_after_loading


def _widen_biases(layer: Any) -> None:
    """Hold the biases in FP32, as the kernels read them; else each call would convert them."""
    from vllm.model_executor.utils import replace_parameter

    for name in ("w13_bias", "w2_bias"):
        bias = getattr(layer, name, None)
        if bias is not None:
            replace_parameter(layer, name, bias.data.float())


GPT_OSS_CHOICE = Patch(
    target="vllm.model_executor.layers.fused_moe.oracle.mxfp4:select_mxfp4_moe_backend",
    why="vLLM picks the kernel of MXFP4 experts from a fixed list, and repacks the weights for it",
    remove_when="vLLM lets out-of-tree MoE backends register (pull request 53897); the classes stay as they are",
    fingerprints={
        "0.26": "6d424f9302ed42e2",
        "0.27 to 0.28": "8983988c11f88a93",
        "0.29": "34a87edecdb1285a",
        "0.30": "04546ef6b6ce48b0",
        "0.31": "4d4077856b5ad8c2",
        "0.32": "dea28364ed3aced2",
        "0.33": "bad74664caae6006",
    },
    replacement=choosing(_our_class, _emulation),
)
GPT_OSS_LOADED = Patch(
    target="vllm.model_executor.layers.quantization.mxfp4:GptOssMxfp4MoEMethod.process_weights_after_loading",
    why="vLLM 0.26 does not tell an experts class that its weights are loaded, and a reload makes new experts",
    remove_when="the oldest supported vLLM calls the experts' process_weights_after_loading, and keeps the kernel",
    fingerprints={"0.26 to 0.33": "bda5bb3999f1854c"},
    replacement=_finishing,
)
