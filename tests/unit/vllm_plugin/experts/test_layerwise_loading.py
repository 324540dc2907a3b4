"""The patch that has a layer finished while the next ones are loaded. With vLLM: tests/vllm/test_fp8_memory.py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from moe_optimizer.vllm_plugin.experts import layerwise_loading


class Method:
    """As much of vLLM's UnquantizedFusedMoEMethod as the patch touches."""

    uses_meta_device = False
    moe_kernel: object | None = None

    def __init__(self) -> None:
        self.devices: list[str] = []
        self.processed: list[Any] = []

    def create_weights(self, layer: Any, *, num_experts: int) -> None:
        import torch

        self.devices.append(torch.empty(num_experts).device.type)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed.append(layer)
        self.moe_kernel = object()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Layers whose loading was begun by vLLM's function."""
    layers: list[Any] = []
    monkeypatch.setattr(layerwise_loading, "_layerwise_loading_of", lambda _method: layers.append)
    return layers


def created() -> Method:
    method = Method()
    layerwise_loading.LAYERWISE_LOADING.replacement(Method.create_weights)(method, "layer", num_experts=2)
    return method


def test_nothing_is_allocated_until_the_layer_is_loaded(begun: list[Any]) -> None:
    method = created()
    assert (method.devices, begun, method.uses_meta_device) == (["meta"], ["layer"], True)


def test_the_weights_are_processed_once_although_vllm_asks_twice(begun: list[Any]) -> None:
    method = created()
    method.process_weights_after_loading("layer")
    method.process_weights_after_loading("layer")
    assert method.processed == ["layer"]


@pytest.mark.parametrize(
    ("load_format", "layerwise"),
    [("auto", True), ("safetensors", True), ("dummy", True), ("tensorizer", False), ("sharded_state", False)],
)
def test_layers_are_converted_while_loading_by_the_loaders_that_fill_them_one_by_one(
    load_format: str, layerwise: bool, activate_pass: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Experts:
        """In the place of our class, which needs vLLM."""

    activate_pass("fp8", on=True, required=False)
    config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(get_current_vllm_config=lambda: config))
    monkeypatch.setitem(
        sys.modules, "moe_optimizer.vllm_plugin.experts.base", SimpleNamespace(MoeOptimizerExperts=Experts)
    )
    assert layerwise_loading._converts(SimpleNamespace(experts_cls=Experts)) is layerwise


def test_a_layer_that_is_not_converted_is_created_as_by_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise_loading, "_converts", lambda _method: False)
    method = created()
    assert (method.devices, method.uses_meta_device) == (["cpu"], False)


def test_a_failure_of_ours_leaves_the_layer_to_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(_method: Any) -> bool:
        raise RuntimeError("injected")

    monkeypatch.setattr(layerwise_loading, "_converts", raising)
    method = created()
    assert (method.devices, method.uses_meta_device) == (["cpu"], False)
    assert "RuntimeError: injected" in caplog.text
