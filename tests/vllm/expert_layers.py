"""Layers of the bundled model's shape as vLLM hands them to an experts class, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.vllm_plugin.session import PluginSession
from tests.plugin_state import own_session
from tests.vllm.conftest import tiny_plan

PASS = "flash_dmoe"
EXPERTS, HIDDEN, WIDTH, TOP_K = 16, 128, 128, 4


def activated(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> PluginSession:
    """Make a plan this process's own without patching vLLM: the tests build the class themselves."""
    from moe_optimizer.vllm_plugin import session as sessions

    own_session(monkeypatch)
    return sessions.start_session(PluginSession(run_dir=run_dir, plan=tiny_plan(**changes)))


def moe_config(**changes: Any) -> Any:
    """Return vLLM's description of a layer of the bundled model."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    fields: dict[str, Any] = {
        "num_experts": EXPERTS,
        "experts_per_token": TOP_K,
        "hidden_dim": HIDDEN,
        "intermediate_size": WIDTH,
        "num_local_experts": EXPERTS,
        "num_logical_experts": EXPERTS,
        "activation": MoEActivation.SILU,
        "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.float32,
    }
    return FusedMoEConfig(**(fields | changes))


def make_layer(width: int = WIDTH) -> Any:
    """Return a loaded layer."""
    import torch

    generator = torch.Generator().manual_seed(7)
    layer: Any = torch.nn.Module()
    for name, shape in (("w13_weight", (EXPERTS, 2 * width, HIDDEN)), ("w2_weight", (EXPERTS, HIDDEN, width))):
        values = torch.randn(*shape, generator=generator) * 0.1
        layer.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    layer.layer_name = "model.layers.0.mlp.experts"
    layer.expert_map = None
    return layer


def make_cpu_experts(**quant_config: Any) -> Any:
    """Return our experts class for CPUs as vLLM makes it when it is chosen."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from moe_optimizer.vllm_plugin.experts.cpu import MoeOptimizerCpuExperts

    stock = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.CPU)
    cls = type("Offered", (MoeOptimizerCpuExperts,), {"stock_classes": tuple(stock)})
    return cls(moe_config(), FusedMoEQuantConfig.make(**quant_config))


def compute_wrongly(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    """Have the CPU kernel of a format of the weights give a tenth more than it should."""
    from moe_optimizer.vllm_plugin.experts.weight_format import weight_format

    form = type(weight_format(weights))
    computed = form.compute

    def wrong(self: Any, weights: Any, call: Any) -> None:
        computed(self, weights, call)
        call.out.mul_(1.1)

    monkeypatch.setattr(form, "compute", wrong)
