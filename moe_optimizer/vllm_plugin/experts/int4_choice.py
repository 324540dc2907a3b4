"""Has vLLM load the experts of INT4 checkpoints for our kernels: GPTQ without act-order, AWQ, compressed-tensors.

vLLM's method of the checkpoint repacks the weights for the backend that was picked; its emulation turns them into BF16.
What the method does after loading is replaced where our class computes the layer: our readers put the same integers in
the order that our kernels read, and the kernel object of the first load is kept when weights come again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_optimizer.specs.expert_formats import INT4
from moe_optimizer.vllm_plugin.experts.stored_choice import choosing, keep_first_kernel, offered
from moe_optimizer.vllm_plugin.experts.weight_format_int4_stored import (
    awq_weights,
    compressed_tensors_weights,
    gptq_weights,
    hold,
)
from moe_optimizer.vllm_plugin.patch import Patch, PatchState, patch_reports
from moe_optimizer.vllm_plugin.session import PluginSession

if TYPE_CHECKING:
    from moe_optimizer.vllm_plugin.experts.weight_format_int4_stored import Reader

_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.int_wna16"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe"


def _our_class(session: PluginSession, config: Any, weight_key: Any, *_arguments: Any, **_named: Any) -> type | None:
    """Return our class for a layer of an INT4 checkpoint; None where the plan has none, or it does not compute it."""
    from moe_optimizer.vllm_plugin.experts.int4_experts import is_int4

    if not is_int4(weight_key):
        return None
    return offered(session, config, weight_key, cpu=_cpu_class, cuda=_cuda_class, why_not=_why_not_planned)


def _emulation() -> Any:
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend

    return WNA16MoEBackend.EMULATION


def _why_not_planned(session: PluginSession) -> str:
    """Return why the layers that ask are not those that the plan is made for, or ""."""
    assert session.plan is not None, "the class is offered under a plan"
    model = session.plan.model
    if model.expert_format != INT4:
        return f"the plan has no INT4 experts to read: the checkpoint's are {model.expert_format}"
    loading = {patch.target for patch in INT4_LOADED.get(str(model.quant_method), ())}
    if not any(each.patch.target in loading and each.state is PatchState.APPLIED for each in patch_reports()):
        return f"vLLM's method for {model.quant_method} does not load experts as known"
    return ""


def _cpu_class() -> Any:
    from moe_optimizer.vllm_plugin.experts.int4_cpu import MoeOptimizerInt4CpuExperts

    return MoeOptimizerInt4CpuExperts


def _cuda_class() -> Any:
    from moe_optimizer.vllm_plugin.experts.int4_cuda import MoeOptimizerInt4CudaExperts

    return MoeOptimizerInt4CudaExperts


def _reading(read: Reader) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a method hold a loaded layer as `read` returns it, where our class computes the layer."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            from moe_optimizer.vllm_plugin.experts.base import MoeOptimizerExperts

            if not issubclass(self.experts_cls, MoeOptimizerExperts):
                original(self, layer)
                return
            hold(self, layer, read)
            keep_first_kernel(self, layer, lambda: _kernel(self, layer))

        return process_weights_after_loading

    return replacement


def _kernel(method: Any, layer: Any) -> tuple[Any, Any]:
    """Return vLLM's kernel object with our experts, which have their scales in the weights, and its configuration."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    around = maybe_make_prepare_finalize(
        moe=method.moe,
        quant_config=FUSED_MOE_UNQUANTIZED_CONFIG,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
        use_monolithic=False,
    )
    assert around is not None, "vLLM has one for every format of activations that our classes take"
    experts = method.experts_cls(moe_config=method.moe, quant_config=FUSED_MOE_UNQUANTIZED_CONFIG)
    return mk.FusedMoEKernel(around, experts), FUSED_MOE_UNQUANTIZED_CONFIG


INT4_CHOICE = Patch(
    target=f"{_ORACLE}:select_wna16_moe_backend",
    why="vLLM picks the kernel of INT4 experts from a fixed list, and has none for a processor without AMX",
    remove_when="vLLM lets out-of-tree MoE backends register (pull request 53897); the classes stay as they are",
    fingerprints={"0.26": "d3d1774df278ddc4", "0.27 to 0.30": "5e7fd7890414fbe2", "0.31 to 0.33": "310e722b4ad18012"},
    replacement=choosing(_our_class, _emulation),
)


def _loaded(target: str, read: Reader, fingerprints: dict[str, str]) -> Patch:
    return Patch(
        target=f"{target}.process_weights_after_loading",
        why="vLLM's method repacks loaded INT4 experts for the kernels of its own list, and makes no other's object",
        remove_when="a backend from outside can say how it wants the weights of these methods",
        fingerprints=fingerprints,
        replacement=_reading(read),
    )


INT4_LOADED = {
    "gptq": (
        _loaded(
            f"{_QUANTIZATION}.auto_gptq:AutoGPTQMoEMethod",
            gptq_weights,
            {
                "0.26": "8fb76af11f6ca100",
                "0.27 to 0.29": "c4fefc21b91818ca",
                "0.30": "c3720ba73fb78ee6",
                "0.31 to 0.33": "4fce9deef88e854e",
            },
        ),
    ),
    "awq": (
        _loaded(
            f"{_QUANTIZATION}.auto_awq:AutoAWQMoEMethod",
            awq_weights,
            {"0.26 to 0.29": "488d34e5bb4d7854", "0.30 to 0.33": "56b3401e4140d4be"},
        ),
    ),
    # 0.27 and 0.28 are left out: their method refuses zero points unless Marlin computes the layer.
    "compressed-tensors": (
        _loaded(
            f"{_COMPRESSED}.compressed_tensors_moe_wna16_marlin:CompressedTensorsWNA16MarlinMoEMethod",
            compressed_tensors_weights,
            {"0.26": "3401825c581594ce"},
        ),
        _loaded(
            f"{_COMPRESSED}.compressed_tensors_moe_wna16:CompressedTensorsWNA16MoEMethod",
            compressed_tensors_weights,
            {
                "0.29": "9250fdf5dfe82167",
                "0.30": "bb7cb0a04f6788c3",
                "0.31": "8a4fee2ecf388bf2",
                "0.32 to 0.33": "5d01a8d857b81794",
            },
        ),
    ),
}
"""Method of a checkpoint -> the patches of vLLM's methods that load it; 0.26 has another class for one than later."""
