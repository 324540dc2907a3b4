"""The patch that has a layer finished while the next ones are loaded. With vLLM: tests/vllm/test_fp8_memory.py."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from moe_optimizer.vllm_plugin.experts.layerwise_loading import LAYERWISE_LOADING


class Experts:
    """Stands in for our class, which needs vLLM."""

    finished: ClassVar[list[Any]] = []

    def finish_loading(self, layer: Any) -> None:
        self.finished.append(layer)


class Method:
    """As much of vLLM's UnquantizedFusedMoEMethod as the patch touches."""

    uses_meta_device = False
    moe_kernel: object | None = None

    def __init__(self, experts_cls: type) -> None:
        self.experts_cls = experts_cls
        self.devices: list[str] = []
        self.processed: list[Any] = []

    def create_weights(self, layer: Any, *, num_experts: int) -> None:
        import torch

        self.devices.append(torch.empty(num_experts).device.type)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed.append(layer)
        self.moe_kernel = SimpleNamespace(fused_experts=self.experts_cls())


@pytest.fixture
def vllm(activate_pass: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan with FP8 experts; stand-ins for vLLM's configuration and for what begins the loading of a layer."""
    session = activate_pass("fp8", on=True, required=False)
    begun: list[Any] = []
    load_config = SimpleNamespace(load_format="auto")
    config = SimpleNamespace(load_config=load_config)
    for name, module in {
        "vllm": ModuleType("vllm"),
        "vllm.config": SimpleNamespace(get_current_vllm_config=lambda: config),
        "vllm.model_executor.model_loader.reload.layerwise": SimpleNamespace(initialize_online_processing=begun.append),
        "moe_optimizer.vllm_plugin.experts.base": SimpleNamespace(MoeOptimizerExperts=Experts),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(session=session, begun=begun, load_config=load_config)


def created(experts_cls: type = Experts) -> Method:
    method = Method(experts_cls)
    LAYERWISE_LOADING.replacement(Method.create_weights)(method, "layer", num_experts=2)
    return method


def test_nothing_is_allocated_until_the_layer_is_loaded(vllm: Any) -> None:
    method = created()
    assert (method.devices, vllm.begun, method.uses_meta_device) == (["meta"], ["layer"], True)


def test_freed_memory_is_returned_once_a_layer_is_processed(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = created()
    libc = SimpleNamespace(malloc_trim=lambda pad: method.processed.append("returned"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    method.process_weights_after_loading("layer")
    assert method.processed == ["layer", "returned"]


@pytest.mark.parametrize("load_format", ["auto", "tensorizer"])
def test_our_class_finishes_a_layer_that_vllm_has_processed_once(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    monkeypatch.setattr(Experts, "finished", [])
    vllm.load_config.load_format = load_format
    method = created()
    assert (method.processed, Experts.finished) == ([], [])
    method.process_weights_after_loading("layer")
    assert (method.processed, Experts.finished) == (["layer"], ["layer"])


@pytest.mark.parametrize(
    ("load_format", "device"),
    [("auto", "meta"), ("safetensors", "meta"), ("dummy", "meta"), ("tensorizer", "cpu"), ("sharded_state", "cpu")],
)
def test_layers_are_converted_while_loading_by_the_loaders_that_fill_them_one_by_one(
    vllm: Any, load_format: str, device: str
) -> None:
    vllm.load_config.load_format = load_format
    assert created().devices == [device]


@pytest.mark.parametrize("planned", [False, True], ids=["plain format", "vLLM's experts"])
def test_a_layer_that_is_not_converted_is_created_as_by_vllm(vllm: Any, planned: bool) -> None:
    if not planned:
        vllm.session.plan = None
    method = created(object if planned else Experts)
    assert (method.devices, vllm.begun, method.uses_meta_device) == (["cpu"], [], False)


def test_a_failure_of_ours_leaves_the_layer_to_vllm(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    del vllm.load_config.load_format
    method = created()
    assert (method.devices, method.uses_meta_device) == (["cpu"], False)
    assert "AttributeError" in caplog.text
