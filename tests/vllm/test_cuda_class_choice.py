"""For which layers the CUDA experts classes are taken, and what they answer where not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.cuda_class import RANGES, activated, as_on_hopper, offered, stock_class
from tests.vllm.expert_layers import PASS, moe_config

torch = pytest.importorskip("torch")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return activated(tmp_path, monkeypatch, {"bf16": RANGES})


def test_without_a_table_for_its_weights_a_layer_is_left_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = activated(tmp_path, monkeypatch, {"fp8_block": RANGES})
    as_on_hopper(monkeypatch, "cuda_run")
    cls = offered("cuda", "MoeOptimizerCudaExperts")
    config = moe_config(in_dtype=torch.bfloat16)
    supported, why_not = cls.is_supported_config(cls, config, None, None, cls.activation_format())
    assert not supported
    assert "bf16" in why_not
    assert session.proof.passes[PASS].why_not == why_not


def without(stock: Any, question: str) -> Any:
    """vLLM's own class with "no" as its answer."""
    return type("Stock", (stock,), {question: staticmethod(lambda *_: False)})


@pytest.mark.parametrize(
    ("changes", "stock", "built", "reason"),
    [
        ({"has_bias": True}, lambda own: (own,), ("cuda_run",), "biases"),
        ({}, lambda own: (own, own), ("cuda_run",), "2 kernels"),
        ({}, lambda own: (without(own, "_supports_quant_scheme"),), ("cuda_run",), "quantization scheme"),
        ({}, lambda own: (own,), (), "built without"),
        ({"in_dtype": torch.float16}, lambda own: (own,), ("cuda_run",), "torch.float16"),
    ],
    ids=["bias", "two kernels of vLLM's", "no kernel of vLLM's", "not built", "float16"],
)
def test_what_the_cuda_class_does_not_do_is_left_to_vllm_with_the_reason(
    session: PluginSession, monkeypatch: pytest.MonkeyPatch, changes: Any, stock: Any, built: Any, reason: str
) -> None:
    from moe_optimizer.vllm_plugin.experts import cuda as experts_cuda

    as_on_hopper(monkeypatch, *built)
    base = experts_cuda.MoeOptimizerCudaExperts
    cls: Any = type("Offered", (base,), {"stock_classes": stock(stock_class())})
    config = moe_config(**{"in_dtype": torch.bfloat16} | changes)
    supported, why_not = cls.is_supported_config(cls, config, None, None, cls.activation_format())
    assert not supported
    assert reason in why_not
    assert session.proof.passes[PASS].why_not == why_not


@pytest.mark.parametrize(("capability", "supported"), [(90, True), (80, False), (100, False)])
def test_the_cuda_class_is_for_hopper(monkeypatch: pytest.MonkeyPatch, capability: int, supported: bool) -> None:
    from types import SimpleNamespace

    from moe_optimizer.vllm_plugin.experts import cuda as experts_cuda

    platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda asked: asked == capability)
    monkeypatch.setattr(experts_cuda, "current_platform", platform)
    assert experts_cuda.MoeOptimizerCudaExperts._supports_current_device() is supported


def test_the_cuda_class_promises_no_batch_invariance() -> None:
    from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts

    assert not MoeOptimizerCudaExperts._supports_batch_invariance()


@pytest.mark.parametrize(
    ("scheme", "supported"),
    [
        ("kFp8Static128BlockSym", True),
        ("kFp8StaticChannelSym", True),
        ("kFp8StaticTensorSym", True),
        ("kNvfp4Static", False),
        ("kFp8DynamicTokenSym", False),
    ],
)
def test_fp8_weights_are_read_with_scales_per_block_channel_or_tensor(scheme: str, supported: bool) -> None:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    from moe_optimizer.vllm_plugin.experts.fp8_cuda import MoeOptimizerFp8CudaExperts

    assert MoeOptimizerFp8CudaExperts._supports_quant_scheme(getattr(quant_utils, scheme), None) is supported


def later_apply(self: Any, output: Any, hidden_states: Any, weights: Any) -> None:
    """As a later vLLM may call its experts."""


def later_shapes(self: Any, problem: Any) -> None:
    """As a later vLLM may ask for workspaces."""


def later_init(self: Any, moe_config: Any, quant_config: Any, max_num_tokens: int) -> None:
    """As a later vLLM may make its experts."""


def later_finalize(self: Any, experts: Any, output: Any) -> None:
    """As a later vLLM may finish a forward."""


@pytest.mark.parametrize(
    ("owner", "method", "later"),
    [
        ("FusedMoEExpertsModular", "apply", later_apply),
        ("FusedMoEExpertsModular", "workspace_shapes", later_shapes),
        ("FusedMoEExpertsModular", "__init__", later_init),
        ("TopKWeightAndReduce", "apply", later_finalize),
    ],
)
def test_another_interface_of_vllms_experts_leaves_the_layer_to_vllm_with_the_reason(
    session: PluginSession, monkeypatch: pytest.MonkeyPatch, owner: str, method: str, later: Any
) -> None:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    from moe_optimizer.vllm_plugin.experts import cuda as experts_cuda

    monkeypatch.setattr(experts_cuda.MoeOptimizerCudaExperts, "_supports_current_device", staticmethod(lambda: True))
    cls = offered("cuda", "MoeOptimizerCudaExperts")
    monkeypatch.setattr(getattr(mk, owner), method, later)
    supported, why_not = cls.is_supported_config(
        cls, moe_config(in_dtype=torch.bfloat16), None, None, cls.activation_format()
    )
    assert not supported
    assert later.__name__ in why_not
    assert session.proof.passes[PASS].why_not == why_not


def test_scales_per_expert_are_left_to_vllm_where_it_does_not_tell_of_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTensorSym, kFp8StaticTensorSym

    from moe_optimizer.vllm_plugin.experts import cuda as experts_cuda
    from moe_optimizer.vllm_plugin.experts import fp8_cuda

    session = activated(tmp_path, monkeypatch, {"fp8_tensor": RANGES})
    monkeypatch.setattr(experts_cuda._load, "kernels", lambda: type("Built", (), {"cuda_run": None}))
    cls = offered("fp8_cuda", "MoeOptimizerFp8CudaExperts")
    keys = (kFp8StaticTensorSym, kFp8DynamicTensorSym)
    config = moe_config(in_dtype=torch.bfloat16)
    assert "when they change" in cls.why_not(config, keys, session)
    monkeypatch.setattr(fp8_cuda, "weight_changes_are_seen", lambda: True)
    assert cls.why_not(config, keys, session) == ""


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({"dp_size": 2}, True),
        ({"dp_size": 2, "use_ep": True, "ep_size": 2}, True),
        ({"ep_size": 2, "use_ep": True, "enable_eplb": True}, True),
        ({"dp_size": 2, "use_ep": True, "ep_size": 2, "all2all_backend": "deepep_high_throughput"}, False),
        ({"dp_size": 2, "use_ep": True, "ep_size": 2, "all2all_backend": "mori_high_throughput"}, False),
    ],
    ids=["DP", "DP+EP", "EPLB", "DeepEP", "MoRI"],
)
def test_layers_whose_tokens_arrive_as_the_router_left_them_are_ours(changes: dict[str, Any], supported: bool) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    parallel = dataclasses.replace(FusedMoEParallelConfig.make_no_parallel(), **changes)
    cls = offered("cuda", "MoeOptimizerCudaExperts")
    assert cls._supports_parallel_config(parallel) is supported


def test_under_the_load_balancer_scales_per_expert_are_left_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTensorSym, kFp8StaticTensorSym

    session = activated(tmp_path, monkeypatch, {"fp8_tensor": RANGES})
    config = moe_config(in_dtype=torch.bfloat16)
    config.moe_parallel_config = dataclasses.replace(config.moe_parallel_config, enable_eplb=True)
    cls = offered("fp8_cuda", "MoeOptimizerFp8CudaExperts")
    assert "EPLB" in cls.why_not(config, (kFp8StaticTensorSym, kFp8DynamicTensorSym), session)
