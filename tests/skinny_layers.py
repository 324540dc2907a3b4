"""vLLM's dense layers in a process without groups of ranks, and a plan that has our kernel multiply in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.proof.record import PassProof
from moe_optimizer.vllm_plugin.linears import SKINNY_PASS
from moe_optimizer.vllm_plugin.session import PluginSession, start_session
from tests.plugin_state import own_session


@dataclasses.dataclass
class _Plan:
    plugin_decisions: tuple[Decision, ...]
    digest: str = ""


def planned(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, *, required: bool = False, wish: Wish = Wish.ON
) -> PluginSession:
    """Make a plan that has the pass this process's own, with nothing chosen yet."""
    from moe_optimizer.vllm_plugin.linears import op

    decision = Decision(
        pass_name=SKINNY_PASS, wish=wish, wish_origin="test", status=Status.ON, value="", reason="",
        applier=Applier.PLUGIN, required=required,
    )  # fmt: skip
    own_session(monkeypatch)
    monkeypatch.setattr(op, "chosen", op.ChosenLinears())
    plan: Any = _Plan((decision,))
    return start_session(PluginSession(run_dir=run_dir, plan=plan))


def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM's layers be whole."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    for name, value in (("rank", 0), ("world_size", 1)):
        for module in (linear, parameter):
            monkeypatch.setattr(module, f"get_tensor_model_parallel_{name}", lambda value=value: value)


def install(session: PluginSession, model: Any, *, lora: Any = None) -> PassProof:
    """Install the kernel as a worker does once its model is loaded; return the pass's entry in the proof."""
    from moe_optimizer.vllm_plugin.linears.skinny_linears import install_skinny_linears

    config = SimpleNamespace(lora_config=lora)
    runner = SimpleNamespace(get_model=lambda: model)
    install_skinny_linears(session, SimpleNamespace(vllm_config=config, model_runner=runner))
    return session.proof.passes[SKINNY_PASS]


def configured() -> Any:
    """Return a context in which vLLM makes layers in FP8 of a model in BF16, and compiles no function of theirs."""
    from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config

    config: Any = VllmConfig()
    config.compilation_config.mode = CompilationMode.NONE
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, is_hybrid=False, hf_text_config=SimpleNamespace(model_type="qwen3_moe")
    )
    return set_current_vllm_config(config)


def make_fp8_layer(scales: str, outputs: int, inputs: int, *, bias: bool = False, device: str = "cpu") -> Any:
    """Return a layer as vLLM holds it once it is loaded.

    Args:
        scales: "channel" or "block": vLLM converted the weight while it loaded; "tensor", "compressed": it is a
            checkpoint's, of the method fp8, or of compressed-tensors with scales of channels.
        outputs: N, of two parts.
        inputs: K.
        bias: whether it has one.
        device: where it is.
    """
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
    from vllm.model_executor.layers.quantization.online import fp8

    make_method: Any = {
        "tensor": lambda: Fp8LinearMethod(Fp8Config(is_checkpoint_fp8_serialized=True)),
        "channel": fp8.Fp8PtpcOnlineLinearMethod,
        "block": fp8.Fp8PerBlockOnlineLinearMethod,
    }.get(scales)

    def method_of(layer: Any, prefix: str) -> Any:
        return make_method() if make_method else _compressed(layer)

    quantisation: Any = SimpleNamespace(get_quant_method=method_of, online_quantization_config=None)
    with torch.device(device):
        layer: Any = MergedColumnParallelLinear(
            inputs, [outputs // 2] * 2, bias=bias, params_dtype=torch.bfloat16, quant_config=quantisation
        )
        loaded = (torch.randn(outputs, inputs) * (torch.rand(outputs, 1) + 0.1) * inputs**-0.5).bfloat16()
        if bias:
            torch.nn.init.normal_(layer.bias)
        if scales == "tensor":
            scale = loaded.abs().max().float() / 448
            layer.weight_scale.data[0] = scale  # the other part's stays as it was made: there is one in the checkpoint
            loaded = (loaded.float() / scale).to(torch.float8_e4m3fn)
        if scales == "compressed":
            scale = loaded.float().abs().amax(1, keepdim=True) / 448
            layer.weight_scale.data.copy_(scale)
            loaded = (loaded.float() / scale).to(torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(loaded, requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def _compressed(layer: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8

    weights = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    layer.scheme = CompressedTensorsW8A8Fp8(weights, is_static_input_scheme=False)
    unused: Any = None
    return CompressedTensorsLinearMethod(unused)
