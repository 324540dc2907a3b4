"""Lists the kernels that are compared on one layer: vLLM's own, and each of ours that covers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_optimizer.measure.kernel_speeds.measured_layer import MeasuredLayer
from moe_optimizer.ops import use_huge_pages
from moe_optimizer.specs.kernel_speeds import STOCK

MakeCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
"""(activations, routing weights, ids) -> a call of the layer."""


def ours_for(layer: MeasuredLayer, tokens: int) -> tuple[str, ...]:
    """Return our kernels that cover this many tokens, by their names in the tables, the likeliest best first."""
    if layer.device == "cpu":
        from moe_optimizer.vllm_plugin.experts import kernel

        return (kernel.NAME,)
    from moe_optimizer.ops.cuda_variants import MoeSizes, candidate_variants
    from moe_optimizer.ops.expert_inputs import bits_of

    shape = layer.shape
    sizes = MoeSizes(
        num_tokens=tokens,
        top_k=shape.top_k,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        weight_bits=bits_of(layer.w13),
    )
    return tuple(str(variant) for variant in candidate_variants(sizes))


def sides_for(layer: MeasuredLayer, ours: Sequence[str]) -> dict[str, MakeCall]:
    """Return what calls the layer: vLLM's own kernel, and these of ours."""
    return _cuda_sides(layer, ours) if layer.device == "cuda" else _cpu_sides(layer)


def _cuda_sides(layer: MeasuredLayer, ours: Sequence[str]) -> dict[str, MakeCall]:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    stock = layer.runner(TritonExperts(layer.moe_config, layer.quant_config))
    return {STOCK: stock} | {name: layer.runner(_ours_on_cuda(layer, name, TritonExperts)) for name in ours}


def _ours_on_cuda(layer: MeasuredLayer, variant: str, stock: type) -> Any:
    """Return our experts class with one kernel for any number of tokens, outside any plan."""
    from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts
    from moe_optimizer.vllm_plugin.experts.fp8_cuda import MoeOptimizerFp8CudaExperts

    fp8 = layer.w13.dtype == torch.float8_e4m3fn
    base = MoeOptimizerFp8CudaExperts if fp8 else MoeOptimizerCudaExperts
    offered = type("Measured", (base,), {"stock_classes": (stock,)})
    experts = offered(layer.moe_config, layer.quant_config)
    experts.use_kernel(layer.w13, layer.w2, layer.expert_map, variant)
    return experts


def _cpu_sides(layer: MeasuredLayer) -> dict[str, MakeCall]:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from moe_optimizer.vllm_plugin.experts import kernel
    from moe_optimizer.vllm_plugin.experts.cpu import MoeOptimizerCpuExperts

    config = layer.moe_config
    classes = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
    form = MoeOptimizerCpuExperts.activation_format()
    stock = next(cls for cls in classes if cls.is_supported_config(cls, config, None, None, form)[0])
    theirs: Any = stock(config, layer.quant_config)
    module = torch.nn.Module()
    for name, weight in (("w13_weight", layer.w13), ("w2_weight", layer.w2)):
        module.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    theirs.process_weights_after_loading(module)
    theirs.packed = (module.w13_weight, module.w2_weight)
    for weight in (layer.w13, layer.w2):
        use_huge_pages(weight)  # as our class does once a layer is loaded
    ours = MoeOptimizerCpuExperts(config, layer.quant_config)
    return {STOCK: layer.runner(theirs), kernel.NAME: layer.runner(ours)}
